#include "torch_overlap/overlap/cuda/low_latency_host.h"

#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/rounding.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

constexpr int64_t kVectorBytes = sizeof(uint4);
// Vectors of a block per iteration, from which the number of blocks is derived.
constexpr int64_t kVectorsPerBlock = 256;

cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

SumType low_latency_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return SumType::f32;
    case at::kHalf:
      return SumType::f16;
    default:
      return SumType::bf16;
  }
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

}  // namespace

OperationParams operation_of(const CudaTransport& transport, const EntryPayload& operation) {
  return {.words = transport.words(),
          .busy = transport.busy(),
          .payload = operation.word(),
          .peer_abort_flags = transport.peer_abort_flags(),
          .control = transport.control()};
}

EntryFlags entry_flags(const CudaTransport& transport) {
  EntryFlags words{};
  const PeerEntryFlags peer_entry_flags = transport.peer_entry_flags();
  for (int rank = 0; rank < transport.words().size; ++rank) {
    words.peer_flags[rank] = peer_entry_flags.at[rank];
    words.notified[rank] = transport.entry_flags_from(rank);
  }
  return words;
}

bool has_low_latency_kernel(const LowLatencySum& sum) {
  const auto dtype = sum.out.scalar_type();
  const int64_t bytes = sum.rows.rows * sum.row_bytes();
  return (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16) &&
         sum.rows.size > 1 && sum.rows.size <= kMaxLowLatencyRanks && bytes > 0 &&
         sum.row_bytes() % kVectorBytes == 0 &&
         bytes / kVectorBytes <= std::numeric_limits<int32_t>::max();
}

void run_low_latency(CudaTransport& transport, const LowLatencySum& sum) {
  TORCH_OVERLAP_CHECK(sum.out.is_contiguous(), kValue,
                      "sum: expected a contiguous out, got strides ", sum.out.strides());
  const int rank = transport.words().rank;
  const int size = sum.rows.size;
  const int64_t row = sum.row_bytes() / kVectorBytes;
  const int64_t total = sum.rows.rows * row;
  const bool one_shot = sum.is_one_shot();
  auto* const out = static_cast<std::byte*>(sum.out.mutable_data_ptr());
  // Number of vectors that each rank sums. The last ranks sum fewer, or none.
  int64_t part = total;
  int64_t begin = 0;
  int64_t own_offset = 0;
  if (!sum.is_all_reduce) {
    part = sum.rows.largest() * row;
    begin = sum.rows.begin(rank) * row;
  } else if (!one_shot) {
    part = ceil_div(total, size);
    begin = std::min(rank * part, total);
    own_offset = begin * kVectorBytes;
  }
  LowLatencySumParams params{.operation = operation_of(transport, sum.entry()),
                             .products = {},
                             .begin = static_cast<uint32_t>(begin),
                             .count = static_cast<uint32_t>(std::min(part, total - begin)),
                             .own = out + own_offset,
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
                             .type = low_latency_type(sum.out.scalar_type())};
  for (int peer = 0; peer < size; ++peer) {
    params.products[peer] = static_cast<const uint4*>(transport.data(peer, sum.at));
    params.all_sums[peer] = static_cast<const uint4*>(transport.data(peer, sum.sums_offset));
    params.flags[peer] = transport.flag(peer, 0);
  }
  if (!one_shot) params.sums = static_cast<uint4*>(transport.data(rank, sum.sums_offset));
  const auto blocks =
      std::clamp<int64_t>(ceil_div(part, kVectorsPerBlock), 1, int64_t{kMaxLowLatencyBlocks});
  check(launch_low_latency_sum(params, static_cast<int>(blocks), current_stream()),
        "low-latency sum");
}

void run_low_latency(CudaTransport& transport, const LowLatencyGather& gather) {
  const int rank = transport.words().rank;
  const auto bytes = static_cast<int64_t>(gather.own.nbytes());
  LowLatencyGatherParams params{.operation = operation_of(transport, {.rows = gather.rows.rows}),
                                .to = {},
                                .from = bytes == 0 ? nullptr : gather.own.const_data_ptr(),
                                .bytes = static_cast<size_t>(bytes),
                                .begin = transport.peer_entry_flags(),
                                .entry_flags = transport.entry_flags_from(0),
                                .flag = transport.peer_flags(rank),
                                .notified = transport.flag(rank, 0)};
  const int64_t row = gather.own.size(1) * static_cast<int64_t>(gather.own.element_size());
  for (int peer = 0; peer < gather.rows.size; ++peer) {
    params.to[peer] = transport.data(peer, gather.at + gather.rows.begin(rank) * row);
  }
  check(launch_low_latency_gather(params, current_stream()), "low-latency gather");
}

}  // namespace torch_overlap::cuda
