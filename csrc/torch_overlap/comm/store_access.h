#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/interrupt.h"
#include "torch_overlap/comm/options.h"

namespace torch_overlap {

inline std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// Without the backtrace that c10's errors carry.
std::string what_happened(const std::exception& error);

// Runs `body`; the store's own error becomes ours.
template <typename Body>
auto in_store(const std::string& what, const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(ErrorKind::kRuntime, what, ": expected the store to answer, got: ", what_happened(error),
         "; has the process that serves it ended?");
  }
}

// Asks `is_done` now and again until it is, or the timeout is over: whether it was. Store::wait()
// would keep the connection from other threads of this process, and what they have to say may be
// what the missing ranks wait for; and no signal would end it, as one ends this (interrupt.h).
template <typename IsDone>
bool poll(Milliseconds timeout, const IsDone& is_done) {
  using std::chrono::microseconds;
  const auto begin = std::chrono::steady_clock::now();
  while (true) {
    if (is_done()) return true;
    const auto waited =
        std::chrono::duration_cast<microseconds>(std::chrono::steady_clock::now() - begin);
    if (waited >= timeout) return false;
    check_interrupt();
    const auto pause = std::clamp(waited / 8, microseconds(200), microseconds(100'000));
    std::this_thread::sleep_for(std::min(pause, microseconds(timeout) - waited));
  }
}

// Whether keys are there, asked for again and again: mostly for the first that was missing.
class KeysThere {
 public:
  explicit KeysThere(std::vector<std::string> keys) : keys_(std::move(keys)) {}

  const std::vector<std::string>& keys() const { return keys_; }
  bool all(c10d::Store& store);
  // Which are not, by position.
  std::vector<int> missing(c10d::Store& store) const;

 private:
  const std::vector<std::string> keys_;
  size_t next_ = 0;
};

// "<key>/0", "<key>/1", ...
std::vector<std::string> part_keys(const std::string& key, int size);
// A value must not be empty: some stores cannot tell that from a key that is not there.
void put_part(c10d::Store& store, const std::string& key, const std::string& mine);
// A value that begins with '=', or nothing if it is not there, also if it was a moment ago:
// Store::get() would wait for it to come again.
std::optional<std::string> get_if_there(c10d::Store& store, const std::string& key);
// The parts; nothing if one is not there.
std::optional<std::vector<std::string>> get_parts(c10d::Store& store,
                                                  const std::vector<std::string>& keys);

}  // namespace torch_overlap
