#include "torch_overlap/gemm/options.h"

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/counters.h"

namespace torch_overlap {
namespace {

std::atomic<GemmTuning> tuning_choice{GemmTuning::kHeuristic};
std::atomic<Mxfp8Path> mxfp8_choice{Mxfp8Path::kDequantize};

}  // namespace

void set_gemm_tuning(std::string_view tuning) {
  if (tuning == "heuristic") {
    tuning_choice = GemmTuning::kHeuristic;
  } else if (tuning == "measured") {
    tuning_choice = GemmTuning::kMeasured;
  } else if (tuning == "best") {
    tuning_choice = GemmTuning::kBest;
  } else {
    fail(ErrorKind::kValue,
         "set_gemm_tuning: expected \"heuristic\", \"measured\" or \"best\", got \"", tuning,
         "\"; use one of them");
  }
}

GemmTuning gemm_tuning() { return tuning_choice.load(std::memory_order_relaxed); }

void set_gemm_mxfp8(std::string_view path) {
  TORCH_OVERLAP_CHECK(path == "dequantize" || path == "native", kValue,
                      "set_gemm_mxfp8: expected \"dequantize\" or \"native\", got \"", path,
                      "\"; use one of them");
  mxfp8_choice = path == "native" ? Mxfp8Path::kNative : Mxfp8Path::kDequantize;
}

Mxfp8Path gemm_mxfp8() { return mxfp8_choice.load(std::memory_order_relaxed); }

GemmCounters& gemm_counters() {
  static GemmCounters counters;
  return counters;
}

GemmStatistics gemm_statistics() {
  const GemmCounters& counters = gemm_counters();
  return {.calls = counters.calls,
          .plans = counters.plans,
          .queries = counters.queries,
          .measured = counters.measured,
          .composed = counters.unfused};
}

void reset_gemm_statistics() {
  GemmCounters& counters = gemm_counters();
  for (auto* counter : {&counters.calls, &counters.plans, &counters.queries, &counters.measured,
                        &counters.unfused}) {
    *counter = 0;
  }
}

}  // namespace torch_overlap
