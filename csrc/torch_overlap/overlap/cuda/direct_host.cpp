#include "torch_overlap/overlap/cuda/direct_host.h"

#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

constexpr int64_t kVector = sizeof(uint4);
// Vectors of a block in one turn, by which its number of blocks is chosen.
constexpr int64_t kVectorsOfBlock = 256;

cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

SumType direct_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return SumType::f32;
    case at::kHalf:
      return SumType::f16;
    default:
      return SumType::bf16;
  }
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kVector == 0; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

OperationParams operation_of(const CudaTransport& transport, const Begin& operation) {
  return {.words = transport.words(),
          .busy = transport.busy(),
          .rows = operation.word(),
          .gone = transport.gone_of_all(),
          .control = transport.control()};
}

BegunWords begun_words(const CudaTransport& transport) {
  BegunWords words{};
  const BegunEntriesOfAll begin_of_all = transport.begun_of_all();
  for (int rank = 0; rank < transport.words().size; ++rank) {
    words.tell[rank] = begin_of_all.at[rank];
    words.told[rank] = transport.begun_by(rank);
  }
  return words;
}

bool has_direct_kernel(const DirectSum& sum) {
  const auto dtype = sum.out.scalar_type();
  const int64_t bytes = sum.rows.rows * sum.row_bytes();
  return (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16) &&
         sum.rows.size > 1 && sum.rows.size <= kMostDirectRanks && bytes > 0 &&
         sum.row_bytes() % kVector == 0 && bytes / kVector <= std::numeric_limits<int32_t>::max();
}

void run_direct(CudaTransport& transport, const DirectSum& sum) {
  TORCH_OVERLAP_CHECK(sum.out.is_contiguous(), kValue,
                      "sum: expected a contiguous out, got strides ", sum.out.strides());
  const int rank = transport.words().rank;
  const int size = sum.rows.size;
  const int64_t row = sum.row_bytes() / kVector;
  const int64_t total = sum.rows.rows * row;
  const bool one_shot = sum.in_one_shot();
  auto* const out = static_cast<std::byte*>(sum.out.mutable_data_ptr());
  // What each rank sums; the last ones less, or nothing.
  int64_t part = total;
  int64_t begin = 0;
  int64_t own_at = 0;
  if (!sum.everywhere) {
    part = sum.rows.largest() * row;
    begin = sum.rows.begin(rank) * row;
  } else if (!one_shot) {
    part = ceil_div(total, size);
    begin = std::min(rank * part, total);
    own_at = begin * kVector;
  }
  DirectSumParams params{.operation = operation_of(transport, sum.begin()),
                         .products = {},
                         .begin = static_cast<uint32_t>(begin),
                         .count = static_cast<uint32_t>(std::min(part, total - begin)),
                         .own = out + own_at,
                         .sums = nullptr,
                         .all_sums = {},
                         .slice = static_cast<uint32_t>(part),
                         .total = static_cast<uint32_t>(total),
                         .out = out,
                         .is_aligned = is_aligned(out),
                         .factor = static_cast<float>(sum.factor),
                         .bias = sum.bias.defined() ? sum.bias.const_data_ptr() : nullptr,
                         .columns = static_cast<uint32_t>(row),
                         .flags = {},
                         .type = direct_type(sum.out.scalar_type())};
  for (int peer = 0; peer < size; ++peer) {
    params.products[peer] = static_cast<const uint4*>(transport.data(peer, sum.at));
    params.all_sums[peer] = static_cast<const uint4*>(transport.data(peer, sum.sums_at));
    params.flags[peer] = transport.flag(peer, 0);
  }
  if (!one_shot) params.sums = static_cast<uint4*>(transport.data(rank, sum.sums_at));
  const auto blocks =
      std::clamp<int64_t>(ceil_div(part, kVectorsOfBlock), 1, int64_t{kDirectBlocks});
  check(launch_direct_sum(params, static_cast<int>(blocks), current_stream()), "direct sum");
}

void run_direct(CudaTransport& transport, const DirectGather& gather) {
  const int rank = transport.words().rank;
  const auto bytes = static_cast<int64_t>(gather.own.nbytes());
  DirectGatherParams params{.operation = operation_of(transport, {.rows = gather.rows.rows}),
                            .to = {},
                            .from = bytes == 0 ? nullptr : gather.own.const_data_ptr(),
                            .bytes = static_cast<size_t>(bytes),
                            .begin = transport.begun_of_all(),
                            .begun = transport.begun_by(0),
                            .flag = transport.flag_of_all(rank),
                            .told = transport.flag(rank, 0)};
  const int64_t row = gather.own.size(1) * static_cast<int64_t>(gather.own.element_size());
  for (int peer = 0; peer < gather.rows.size; ++peer) {
    params.to[peer] = transport.data(peer, gather.at + gather.rows.begin(rank) * row);
  }
  check(launch_direct_gather(params, current_stream()), "direct gather");
}

}  // namespace torch_overlap::cuda
