#pragma once

#include <atomic>
#include <cstdint>

namespace torch_overlap {

// Counters behind gemm_statistics(); the backends increment them.
struct GemmCounters {
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> plans{0};
  std::atomic<int64_t> queries{0};
  std::atomic<int64_t> measured{0};
  std::atomic<int64_t> unfused{0};
};
GemmCounters& gemm_counters();

inline void count(std::atomic<int64_t>& counter) {
  counter.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace torch_overlap
