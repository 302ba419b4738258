#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>

#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/sm90/tensor_maps.h"
#include "torch_overlap/gemm/sm90/types.h"
#include "torch_overlap/overlap/cuda/fused_all_reduce.h"
#include "torch_overlap/overlap/cuda/fused_host.h"
#include "torch_overlap/overlap/cuda/fused_operands.h"
#include "torch_overlap/overlap/cuda/low_latency_host.h"

namespace torch_overlap::cuda {
namespace {

// Maximum number of bytes that a rank sends to all peers together. Above it, other algorithms send
// less.
constexpr int64_t kMaxSentBytes = int64_t{8} << 20;
// LL is faster than Simple up to this size.
constexpr int64_t kMaxLLBytes = int64_t{3} << 19;

// Limits for use without measurements: rows, and bytes that a rank sends to all peers together.
// Within them the kernel is faster than a product and a collective. Some SMs are left to kernels of
// other streams, which ranks may start in another order.
constexpr int64_t kMaxAutoRows = 128;
constexpr int64_t kMaxAutoSentBytes = int64_t{4} << 20;
constexpr int kSpareSms = 4;

constexpr int64_t kAlignment = 128;

// A kernel and its launch configuration.
struct Plan {
  const FusedAllReduceKernel* kernel = nullptr;
  int blocks = 0;
  bool use_ll = false;

  // Returns the number of bytes that all ranks send to one.
  int64_t received_bytes(int size) const {
    return int64_t{size} * blocks * (use_ll ? kernel->ll_bytes : kernel->simple_bytes);
  }
};

struct Problem {
  int64_t m;
  int64_t n;
  int64_t k;
  int size;
  int sms;
  int64_t out_element;
};

int64_t sent_bytes(const Problem& problem) {
  return problem.m * problem.n * problem.out_element * (problem.size - 1);
}

int64_t num_blocks(const FusedAllReduceKernel& kernel, int64_t n) {
  return ceil_div(n, kernel.features) * kernel.cluster;
}

// Returns a plan without a kernel if no kernel supports the problem.
Plan plan_of(const KernelKey& key, const Problem& problem) {
  const int64_t sent = sent_bytes(problem);
  if (problem.size < 2 || sent > kMaxSentBytes) return {};
  const FusedAllReduceKernel* best = nullptr;
  int64_t min_time = std::numeric_limits<int64_t>::max();
  for (const FusedAllReduceKernel& kernel : fused_all_reduce_kernels(key)) {
    if (kernel.rows < problem.m || ceil_div(problem.k, kernel.depth) < kernel.cluster) continue;
    if (best != nullptr && kernel.rows > best->rows) break;
    // Estimates the time by the data that a block reads, wave by wave.
    const int64_t waves = ceil_div(num_blocks(kernel, problem.n), problem.sms);
    const int64_t time = waves * (kernel.features + kernel.rows) / kernel.cluster;
    if (time >= min_time) continue;
    min_time = time;
    best = &kernel;
  }
  if (best == nullptr || num_blocks(*best, problem.n) > kMaxTileFlags) return {};
  return {best, static_cast<int>(num_blocks(*best, problem.n)),
          best->ll_bytes > 0 && sent <= kMaxLLBytes};
}

// One quarter of a channel each for LL and Simple, and for even and odd operations. The layout
// depends on nothing else, so no operation writes memory from which the previous one may still
// read.
struct SlotLayout {
  int64_t quarter;
  explicit SlotLayout(int64_t bytes) : quarter(bytes / 4 / kAlignment * kAlignment) {}
  int64_t even(bool use_ll) const { return use_ll ? 0 : 2 * quarter; }
  int64_t odd_epoch_offset() const { return quarter; }
};

int64_t required_channel_bytes(const Plan& plan, int size) {
  if (plan.kernel == nullptr) return 0;
  return 4 * ceil_div(plan.received_bytes(size), kAlignment) * kAlignment;
}

CUtensorMap weight_map(const Operands& operands, const FusedAllReduceKernel& kernel) {
  return operands.is_rhs_k_major ? sm90::make_tensor_map(operands.rhs, kernel.features)
                                 : sm90::make_tensor_map(operands.rhs, kernel.depth);
}

// Values that are the same on all ranks.
struct SharedPlan {
  Problem problem;
  Plan plan;
};

SharedPlan plan_of(const FusedShape& shape) {
  // The plan is the same for a weight of the other layout, which has kernels with the same tiles.
  const KernelKey key{.lhs = sm90::operand_type(shape.types.lhs),
                      .rhs = sm90::operand_type(shape.types.rhs),
                      .out = sm90::element_type(shape.types.out),
                      .is_rhs_k_major = true,
                      .rows = 0,
                      .columns = 0};
  const Problem problem{.m = shape.rows.rows,
                        .n = shape.n,
                        .k = shape.k,
                        .size = shape.rows.size,
                        .sms = sm_count(shape.device),
                        .out_element = static_cast<int64_t>(c10::elementSize(shape.types.out))};
  return {problem, fused_unsupported_reason(shape).empty() ? plan_of(key, problem) : Plan{}};
}

}  // namespace

int64_t required_fused_allreduce_bytes(const FusedShape& shape) {
  return required_channel_bytes(plan_of(shape).plan, shape.rows.size);
}

bool should_fuse_allreduce(const FusedShape& shape, int sms) {
  const auto [problem, plan] = plan_of(shape);
  return plan.kernel != nullptr && problem.m <= kMaxAutoRows &&
         sent_bytes(problem) <= kMaxAutoSentBytes && plan.blocks <= sms - kSpareSms;
}

void run_fused(CudaTransport& transport, const FusedAllReduce& problem) {
  TORCH_OVERLAP_CHECK(problem.out.is_contiguous(), kValue,
                      "product and all-reduce: expected a contiguous out, got strides ",
                      problem.out.strides());
  const int rank = transport.words().rank;
  const int size = problem.rows.size;
  const auto device = problem.out.device();
  const Operands operands =
      operands_of(problem.gemm, plain_lhs(problem.gemm.lhs), problem.out.scalar_type());
  const int64_t m = operands.lhs.size(0);
  const int64_t k = operands.lhs.size(1);
  const int64_t n = operands.rhs.size(operands.is_rhs_k_major ? 0 : 1);
  const Plan plan = plan_of(key_of(operands), {.m = m,
                                               .n = n,
                                               .k = k,
                                               .size = size,
                                               .sms = sm_count(device),
                                               .out_element = problem.out.element_size()});
  TORCH_OVERLAP_CHECK(plan.kernel != nullptr && required_channel_bytes(plan, size) <= problem.bytes,
                      kRuntime, "product and all-reduce: expected a kernel, and a channel of ",
                      required_channel_bytes(plan, size), " bytes, got one of ", problem.bytes);
  const FusedAllReduceKernel& kernel = *plan.kernel;
  const at::Tensor out = mappable_out(problem.out);
  FusedAllReduceParams params{};
  params.operation = operation_of(transport, {.rows = problem.rows.rows});
  params.product = {.weight = weight_map(operands, kernel),
                    .rows = sm90::make_tensor_map(operands.lhs, kernel.rows),
                    .m = static_cast<int>(m),
                    .n = static_cast<int>(n),
                    .stages = static_cast<int>(ceil_div(k, kernel.depth))};
  if (sm90::is_8_bit(operands.lhs.scalar_type())) {
    params.rows_scale = operands.lhs_scale.const_data_ptr<float>();
    params.weight_scale = operands.rhs_scale.const_data_ptr<float>();
    params.scaled_by_row = operands.scaled_by_row;
  }
  params.out = out.mutable_data_ptr();
  params.factor = static_cast<float>(problem.factor);
  params.bias = problem.bias.defined() ? problem.bias.const_data_ptr() : nullptr;
  params.use_ll = plan.use_ll;
  const SlotLayout places(problem.bytes);
  params.odd_epoch_offset = places.odd_epoch_offset();
  const PeerEntryFlags begin = transport.peer_entry_flags();
  for (int peer = 0; peer < size; ++peer) {
    params.slots[peer] = static_cast<char*>(transport.data(peer, places.even(plan.use_ll)));
    params.peer_flags[peer] = transport.tile_flags(peer, rank);
    params.notified[peer] = transport.tile_flags(rank, peer);
    params.begin[peer] = begin.at[peer];
    params.entry_flags[peer] = transport.entry_flags_from(peer);
  }
  check(launch_fused_all_reduce(kernel, params, plan.blocks,
                                c10::cuda::getCurrentCUDAStream(device.index())),
        "fused product and all-reduce");
  if (!out.is_same(problem.out)) problem.out.copy_(out);
}

void load_fused_all_reduce_kernels() {
  using enum sm90::OperandType;
  using sm90::ElementType;
  for (const auto& [lhs, rhs] : {std::pair(bf16, bf16), std::pair(f16, f16), std::pair(e4m3, e4m3),
                                 std::pair(e4m3, e5m2), std::pair(e5m2, e4m3)}) {
    for (const auto out : {ElementType::bf16, ElementType::f16}) {
      for (const bool is_k_major : {true, false}) {
        for (const FusedAllReduceKernel& kernel :
             fused_all_reduce_kernels({.lhs = lhs,
                                       .rhs = rhs,
                                       .out = out,
                                       .is_rhs_k_major = is_k_major,
                                       .rows = 0,
                                       .columns = 0})) {
          check(cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     kernel.shared_bytes),
                "overlap: loading fused kernels");
        }
      }
    }
  }
}

}  // namespace torch_overlap::cuda
