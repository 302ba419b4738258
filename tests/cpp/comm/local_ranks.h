#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backends/local/spawn.h"

// Helpers of all tests of communicators: ranks that are threads, and data that every rank can
// recompute.

namespace torch_overlap::testing {

using Comm = std::shared_ptr<TorchComm>;
using std::chrono::milliseconds;
using HostClock = std::chrono::steady_clock;

// Seed of the run. It differs in every run and is printed, so that a failure can be repeated
// (TORCH_OVERLAP_TEST_SEED).
inline uint64_t run_seed() {
  static const uint64_t seed = [] {
    const char* given = std::getenv("TORCH_OVERLAP_TEST_SEED");
    const uint64_t value = given != nullptr ? std::stoull(given) : std::random_device()();
    std::printf("TORCH_OVERLAP_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

// Returns the input of `rank`: equal for equal arguments, on any thread.
inline at::Tensor sample(int rank, int salt, at::IntArrayRef sizes,
                         at::ScalarType dtype = at::kFloat) {
  auto generator = at::detail::createCPUGenerator(run_seed() * 1000003 + rank * 8191 + salt);
  return at::randint(-50, 50, sizes, generator, at::TensorOptions().dtype(at::kDouble)).to(dtype);
}

// Returns an output filled with a marker, so that an element that was not written is detected.
inline at::Tensor poisoned(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::full(sizes, 99, at::TensorOptions().dtype(dtype));
}

inline void expect_equal(const at::Tensor& got, const at::Tensor& expected, const char* what = "") {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::equal(got, expected)) << what << "\ngot\n" << got << "\nexpected\n" << expected;
}

// Returns the error that `body` must throw.
template <typename Body>
Error error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "expected an Error";
  return {ErrorKind::kRuntime, ""};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline CommOptions with_timeout(milliseconds timeout, Hints hints = {}) {
  CommOptions options;
  options.timeout = timeout;
  options.hints = std::move(hints);
  return options;
}

}  // namespace torch_overlap::testing
