#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/sm90/maps.h"
#include "torch_overlap/gemm/sm90/types.h"
#include "torch_overlap/overlap/cuda/direct_host.h"
#include "torch_overlap/overlap/cuda/fused_host.h"
#include "torch_overlap/overlap/cuda/fused_operands.h"
#include "torch_overlap/overlap/cuda/fused_reduce.h"

namespace torch_overlap::cuda {
namespace {

// What a rank sends to all others together, at most: of more, other ways send less.
constexpr int64_t kMostSent = int64_t{8} << 20;
// Up to so much lines are quicker than vectors and a flag.
constexpr int64_t kMostByLines = int64_t{3} << 19;

// Where nothing was measured, up to so many rows, and so much to all others together, it is quicker
// than a product and a collective; and some SMs are left to kernels of other streams, which ranks
// may start in another order.
constexpr int64_t kMostRowsByRule = 128;
constexpr int64_t kMostSentByRule = int64_t{4} << 20;
constexpr int kSpareSms = 4;

constexpr int64_t kAlignment = 128;

// A kernel, and how it goes through a product.
struct Plan {
  const FusedReduceKernel* kernel = nullptr;
  int blocks = 0;
  bool by_lines = false;

  // What all ranks send to one.
  int64_t received_bytes(int size) const {
    return int64_t{size} * blocks * (by_lines ? kernel->line_bytes : kernel->vector_bytes);
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

int64_t sent_by(const Problem& problem) {
  return problem.m * problem.n * problem.out_element * (problem.size - 1);
}

int64_t blocks_of(const FusedReduceKernel& kernel, int64_t n) {
  return ceil_div(n, kernel.features) * kernel.cluster;
}

// Without a kernel where there is none for it.
Plan plan_of(const KernelKey& key, const Problem& problem) {
  const int64_t sent = sent_by(problem);
  if (problem.size < 2 || sent > kMostSent) return {};
  const FusedReduceKernel* best = nullptr;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const FusedReduceKernel& kernel : fused_reduce_kernels(key)) {
    if (kernel.rows < problem.m || ceil_div(problem.k, kernel.depth) < kernel.cluster) continue;
    if (best != nullptr && kernel.rows > best->rows) break;
    // What a block reads, wave by wave.
    const int64_t waves = ceil_div(blocks_of(kernel, problem.n), problem.sms);
    const int64_t time = waves * (kernel.features + kernel.rows) / kernel.cluster;
    if (time >= least) continue;
    least = time;
    best = &kernel;
  }
  if (best == nullptr || blocks_of(*best, problem.n) > kMostTiles) return {};
  return {best, static_cast<int>(blocks_of(*best, problem.n)),
          best->line_bytes > 0 && sent <= kMostByLines};
}

// A quarter of a channel for lines and vectors, of even and odd operations each: it depends on
// nothing else, so that nothing of one operation lies where the one before may still be read.
struct Places {
  int64_t quarter;
  explicit Places(int64_t bytes) : quarter(bytes / 4 / kAlignment * kAlignment) {}
  int64_t even(bool by_lines) const { return by_lines ? 0 : 2 * quarter; }
  int64_t odd_behind_even() const { return quarter; }
};

int64_t room_of(const Plan& plan, int size) {
  if (plan.kernel == nullptr) return 0;
  return 4 * ceil_div(plan.received_bytes(size), kAlignment) * kAlignment;
}

CUtensorMap weight_map(const Operands& operands, const FusedReduceKernel& kernel) {
  return operands.rhs_along_k ? sm90::matrix_map(operands.rhs, kernel.features)
                              : sm90::matrix_map(operands.rhs, kernel.depth);
}

// What is the same on all ranks.
struct SharedPlan {
  Problem problem;
  Plan plan;
};

SharedPlan plan_of(const FusedShape& shape) {
  // The same for a weight that lies the other way, which has kernels of the same tiles.
  const KernelKey key{.lhs = sm90::operand_type(shape.types.lhs),
                      .rhs = sm90::operand_type(shape.types.rhs),
                      .out = sm90::vector_type(shape.types.out),
                      .rhs_along_k = true,
                      .rows = 0,
                      .columns = 0};
  const Problem problem{.m = shape.rows.rows,
                        .n = shape.n,
                        .k = shape.k,
                        .size = shape.rows.size,
                        .sms = sm_count(shape.device),
                        .out_element = static_cast<int64_t>(c10::elementSize(shape.types.out))};
  return {problem, fused_obstacle(shape).empty() ? plan_of(key, problem) : Plan{}};
}

}  // namespace

int64_t reduce_room(const FusedShape& shape) {
  return room_of(plan_of(shape).plan, shape.rows.size);
}

bool reduce_pays(const FusedShape& shape, int sms) {
  const auto [problem, plan] = plan_of(shape);
  return plan.kernel != nullptr && problem.m <= kMostRowsByRule &&
         sent_by(problem) <= kMostSentByRule && plan.blocks <= sms - kSpareSms;
}

void run_fused(CudaTransport& transport, const FusedReduce& problem) {
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
  const int64_t n = operands.rhs.size(operands.rhs_along_k ? 0 : 1);
  const Plan plan = plan_of(key_of(operands), {.m = m,
                                               .n = n,
                                               .k = k,
                                               .size = size,
                                               .sms = sm_count(device),
                                               .out_element = problem.out.element_size()});
  TORCH_OVERLAP_CHECK(plan.kernel != nullptr && room_of(plan, size) <= problem.bytes, kRuntime,
                      "product and all-reduce: expected a kernel, and a channel of ",
                      room_of(plan, size), " bytes, got one of ", problem.bytes);
  const FusedReduceKernel& kernel = *plan.kernel;
  const at::Tensor out = mappable_out(problem.out);
  FusedReduceParams params{};
  params.operation = operation_of(transport, {.rows = problem.rows.rows});
  params.product = {.weight = weight_map(operands, kernel),
                    .rows = sm90::matrix_map(operands.lhs, kernel.rows),
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
  params.by_lines = plan.by_lines;
  const Places places(problem.bytes);
  params.odd_at = places.odd_behind_even();
  const BegunEntriesOfAll begin = transport.begun_of_all();
  for (int peer = 0; peer < size; ++peer) {
    params.slots[peer] = static_cast<char*>(transport.data(peer, places.even(plan.by_lines)));
    params.tell[peer] = transport.tile_word(peer, rank);
    params.told[peer] = transport.tile_word(rank, peer);
    params.begin[peer] = begin.at[peer];
    params.begun[peer] = transport.begun_by(peer);
  }
  check(launch_fused_reduce(kernel, params, plan.blocks,
                            c10::cuda::getCurrentCUDAStream(device.index())),
        "fused product and all-reduce");
  if (!out.is_same(problem.out)) problem.out.copy_(out);
}

void load_fused_reduce_kernels() {
  using enum sm90::OperandType;
  using sm90::VectorType;
  for (const auto& [lhs, rhs] : {std::pair(bf16, bf16), std::pair(f16, f16), std::pair(e4m3, e4m3),
                                 std::pair(e4m3, e5m2), std::pair(e5m2, e4m3)}) {
    for (const auto out : {VectorType::bf16, VectorType::f16}) {
      for (const bool along_k : {true, false}) {
        for (const FusedReduceKernel& kernel : fused_reduce_kernels({.lhs = lhs,
                                                                     .rhs = rhs,
                                                                     .out = out,
                                                                     .rhs_along_k = along_k,
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
