// Measures the cost of the flight recorder: host time of a barrier on `fake`, which does nothing
// itself, with the recorder and without. The two take turns as processes of their own, because the
// recorder's size is read once. Prints one line of JSON, in nanoseconds a call.
//
//   <build>/benchmarks/cpp/recorder_cost [rounds]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "torch_overlap/comm/torch_comm.h"

namespace {

constexpr int kCalls = 200'000;

// The child: nanoseconds of one call, the best of some loops.
double measure() {
  const auto comm = torch_overlap::TorchComm::create("fake", c10::kCPU, "cost", {},
                                                     torch_overlap::RankAndSize{0, 8});
  double best = 1e9;
  for (int loop = 0; loop < 5; ++loop) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) comm->barrier(/*async_op=*/true);
    const auto took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, std::chrono::duration<double, std::nano>(took).count() / kCalls);
  }
  comm->finalize();
  return best;
}

double measure_in_child(const char* program, const char* size) {
  ::setenv("TORCHCOMM_FR_BUFFER_SIZE", size, /*overwrite=*/1);
  const std::string command = std::string("\"") + program + "\" child";
  double result = -1;
  std::FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr || std::fscanf(pipe, "%lf", &result) != 1) result = -1;
  if (pipe != nullptr) ::pclose(pipe);
  return result;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "child") == 0) {
    std::printf("%f\n", measure());
    return 0;
  }
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 7;
  std::vector<double> on;
  std::vector<double> off;
  std::vector<double> difference;
  for (int round = 0; round < rounds; ++round) {
    off.push_back(measure_in_child(argv[0], "0"));
    on.push_back(measure_in_child(argv[0], "2048"));
    if (on.back() < 0 || off.back() < 0) {
      std::fprintf(stderr, "recorder_cost: a measurement failed\n");
      return 1;
    }
    difference.push_back(on.back() - off.back());
  }
  if (difference.empty()) {
    std::fprintf(stderr, "recorder_cost: expected a number of rounds >= 1, got %s\n", argv[1]);
    return 2;
  }
  std::printf(
      "{\"what\": \"barrier on fake\", \"rounds\": %d, \"off_ns\": %.1f, \"on_ns\": %.1f, "
      "\"recorder_ns\": %.1f}\n",
      rounds, median(off), median(on), median(difference));
  return 0;
}
