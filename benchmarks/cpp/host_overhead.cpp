// Host time of an asynchronous all_reduce of 1 KiB in C++: TorchComm beside raw NCCL on the same
// communicator, in one process a rank. It takes rank, size and store from the launcher's variables:
//
//   torchrun --no-python --nproc_per_node 2 <build>/benchmarks/cpp/host_overhead [rounds]
//
// Rank 0 prints one line of JSON: for each variant the median and the quartiles over the rounds, in
// microseconds a call, of the slowest rank in each round.

#include <ATen/Functions.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "loops.h"
#include "torch_overlap/comm/torch_comm.h"

namespace {

using torch_overlap::RedOpType;
using torch_overlap::TorchComm;

constexpr int kCalls = 100;
constexpr int kWarmup = 10;
constexpr size_t kCount = 256;

struct Quartiles {
  double low;
  double median;
  double high;
};

Quartiles quartiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
  };
  return {at(0.25), at(0.5), at(0.75)};
}

void print(const char* name, const Quartiles& us, const char* end) {
  std::printf("\"%s\": {\"us\": %.3f, \"low_us\": %.3f, \"high_us\": %.3f}%s", name, us.median,
              us.low, us.high, end);
}

int run(int rounds) {
  const auto comm = TorchComm::create("nccl", c10::kCUDA, "overhead");
  const at::Tensor tensor =
      at::zeros({static_cast<int64_t>(kCount)}, at::TensorOptions().device(comm->device()));
  const auto stream =
      c10::cuda::getStreamFromPool(/*isHighPriority=*/false, comm->device().index());
  // [variant, round]; the variants take turns, each round beginning with another one.
  std::vector<double> measured(2 * rounds);
  for (int round = -kWarmup; round < rounds; ++round) {
    for (int turn = 0; turn < 2; ++turn) {
      const int variant = (round + kWarmup + turn) % 2;
      c10::cuda::device_synchronize();
      const double seconds = variant == 0
                                 ? raw_all_reduce_loop(comm->native_handle(), tensor.data_ptr(),
                                                       kCount, kCalls, stream.stream())
                                 : torch_comm_all_reduce_loop("overhead", kCount, kCalls);
      if (seconds < 0) {
        std::fprintf(stderr, "host_overhead: ncclAllReduce failed\n");
        return 1;
      }
      if (round >= 0) measured[variant * rounds + round] = seconds * 1e6 / kCalls;
    }
  }
  at::Tensor samples = at::tensor(measured, at::kDouble).view({2, rounds}).to(comm->device());
  comm->all_reduce(samples, RedOpType::MAX, /*async_op=*/false);
  samples = samples.cpu();
  if (comm->rank() == 0) {
    std::vector<double> ratios;
    std::vector<double> raw;
    std::vector<double> ours;
    for (int round = 0; round < rounds; ++round) {
      raw.push_back(samples[0][round].item<double>());
      ours.push_back(samples[1][round].item<double>());
      ratios.push_back(ours.back() / raw.back());
    }
    std::printf(
        "{\"what\": \"async all_reduce 1 KiB\", \"ranks\": %d, \"calls\": %d, \"rounds\": %d, ",
        comm->size(), kCalls, rounds);
    print("raw", quartiles(raw), ", ");
    print("cpp", quartiles(ours), ", ");
    const Quartiles ratio = quartiles(ratios);
    std::printf("\"cpp_to_raw\": {\"median\": %.3f, \"low\": %.3f, \"high\": %.3f}}\n",
                ratio.median, ratio.low, ratio.high);
  }
  comm->finalize();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 60;
  if (rounds < 1) {
    std::fprintf(stderr, "host_overhead: expected a number of rounds >= 1, got %s\n", argv[1]);
    return 2;
  }
  try {
    return run(rounds);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "host_overhead: %s\n", error.what());
    return 1;
  }
}
