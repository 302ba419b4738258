#include "torch_overlap/overlap/schedule.h"

#include <algorithm>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

int wrap(int rank, int size) { return (rank % size + size) % size; }

GatherSchedule ring_of_chunks(int rank, int size) {
  GatherSchedule schedule{.exchanges = {}, .steps = {{rank}}};
  for (int i = 1; i < size; ++i) {
    const int recv = wrap(rank - i, size);
    schedule.exchanges.push_back({.dst = wrap(rank + 1, size),
                                  .send = wrap(rank - i + 1, size),
                                  .src = wrap(rank - 1, size),
                                  .recv = recv});
    schedule.steps.push_back({recv});
  }
  return schedule;
}

GatherSchedule all_pairs_chunks(int rank, int size) {
  GatherSchedule schedule{.exchanges = {}, .steps = {{rank}}};
  for (int i = 1; i < size; ++i) {
    const int src = wrap(rank - i, size);
    schedule.exchanges.push_back(
        {.dst = wrap(rank + i, size), .send = rank, .src = src, .recv = src});
    schedule.steps.push_back({src});
  }
  return schedule;
}

GatherSchedule pairs_of_chunks(int rank, int size) {
  TORCH_OVERLAP_CHECK(size % 2 == 0, kValue,
                      "gather_schedule: expected an even number of ranks for products of two "
                      "chunks, got ",
                      size);
  GatherSchedule schedule;
  const int other = rank ^ 1;
  for (int i = 0; i < size / 2; ++i) {
    // Each of these exchanges is a permutation of the ranks, so every rank also receives once.
    for (const int member : {rank, other}) {
      const int src = wrap(member - 2 * i, size);
      if (src == rank) continue;
      schedule.exchanges.push_back(
          {.dst = wrap(member + 2 * i, size), .send = rank, .src = src, .recv = src});
    }
    schedule.steps.push_back({.first = wrap(rank - rank % 2 - 2 * i, size), .count = 2});
  }
  return schedule;
}

}  // namespace

int64_t RowPartition::begin(int rank) const { return std::min(rank * largest(), rows); }

int64_t RowPartition::length(int rank) const { return begin(rank + 1) - begin(rank); }

GatherSchedule gather_schedule(int rank, int size, GatherOrder order) {
  switch (order) {
    case GatherOrder::ring:
      return ring_of_chunks(rank, size);
    case GatherOrder::chunk_pairs:
      return pairs_of_chunks(rank, size);
    case GatherOrder::all_pairs:
      break;
  }
  return all_pairs_chunks(rank, size);
}

ReduceScatterSchedule reduce_scatter_schedule(int rank, int size) {
  ReduceScatterSchedule schedule;
  for (int i = 1; i < size; ++i) {
    const int dst = wrap(rank + i, size);
    schedule.steps.push_back({dst});
    schedule.exchanges.push_back(
        {.dst = dst, .send = dst, .src = wrap(rank - i, size), .recv = rank});
  }
  schedule.steps.push_back({rank});
  return schedule;
}

bool uses_one_shot(int64_t bytes, int size) {
  constexpr int64_t kMaxOneShotBytesFourRanks = 512 << 10;
  constexpr int64_t kMaxOneShotBytes = 256 << 10;
  return size <= 2 || bytes <= (size <= 4 ? kMaxOneShotBytesFourRanks : kMaxOneShotBytes);
}

std::vector<IndexRange> pieces(int64_t total, int64_t count, int64_t multiple) {
  const int64_t length = round_up(ceil_div(total, std::max<int64_t>(count, 1)), multiple);
  std::vector<IndexRange> found;
  for (int64_t begin = 0; begin < total; begin += length) {
    found.push_back({begin, std::min(length, total - begin)});
  }
  return found;
}

std::vector<PipelineStep> pipeline_order(int count, bool overlap_first_gemm) {
  std::vector<PipelineStep> order;
  const int ahead = overlap_first_gemm ? 1 : 0;
  for (int i = 0; i < count + ahead; ++i) {
    if (i < count) order.push_back({true, i});
    if (i >= ahead) order.push_back({false, i - ahead});
  }
  return order;
}

}  // namespace torch_overlap
