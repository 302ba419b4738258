#include "torch_overlap/comm/backends/nccl/custom_call.h"

#include <algorithm>
#include <optional>

#include "torch_overlap/comm/backends/nccl/aligned_parts.h"
#include "torch_overlap/comm/backends/nccl/reduction.h"
#include "torch_overlap/comm/rms_norm.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap {
namespace {

using cuda::CollectiveParams;
using cuda::LaunchConfig;
using cuda::NormParams;
using cuda::ReductionOp;
using cuda::ReductionType;
using cuda::WindowPlacement;

struct KernelReduction {
  ReductionType type;
  ReductionOp op;
};

std::optional<ReductionType> reduction_type(ncclDataType_t type) {
  switch (type) {
    case ncclInt32:
      return ReductionType::i32;
    case ncclInt64:
      return ReductionType::i64;
    case ncclFloat16:
      return ReductionType::f16;
    case ncclBfloat16:
      return ReductionType::bf16;
    case ncclFloat32:
      return ReductionType::f32;
    case ncclFloat64:
      return ReductionType::f64;
    default:
      return std::nullopt;
  }
}

// Returns an empty value if NCCL or a composition runs the reduction.
std::optional<KernelReduction> kernel_reduction(at::ScalarType dtype, const ReduceOp& op) {
  if (op.type() == RedOpType::PREMUL_SUM) return std::nullopt;
  const auto native = native_reduction(dtype, op);
  if (!native) return std::nullopt;
  const auto type = reduction_type(native->dtype);
  if (!type) return std::nullopt;
  switch (native->op) {
    case ncclSum:
      return KernelReduction{*type, ReductionOp::sum};
    case ncclProd:
      return KernelReduction{*type, ReductionOp::product};
    case ncclMin:
      return KernelReduction{*type, ReductionOp::min};
    case ncclMax:
      return KernelReduction{*type, ReductionOp::max};
    case ncclAvg:
      if (*type == ReductionType::i32 || *type == ReductionType::i64) return std::nullopt;
      return KernelReduction{*type, ReductionOp::average};
    default:
      return std::nullopt;
  }
}

bool is_reduction(Primitive primitive) {
  return primitive == Primitive::all_reduce || primitive == Primitive::reduce_scatter;
}

size_t ll_data_bytes(ReductionType type) {
  return type == ReductionType::i64 || type == ReductionType::f64 ? 8 : 12;
}

struct Part {
  char* data;
  size_t bytes;
};

// Return the part of `rank`, to read from or to write to.
Part part_to_read(const RankTensors& blocks, int rank, int size) {
  if (!blocks.parts.empty()) {
    const at::Tensor& part = blocks.parts[rank];
    return {static_cast<char*>(const_cast<void*>(part.const_data_ptr())), part.nbytes()};
  }
  const size_t bytes = blocks.flat.nbytes() / size;
  auto* data = static_cast<char*>(const_cast<void*>(blocks.flat.const_data_ptr()));
  return {data + rank * bytes, bytes};
}

Part part_to_write(const RankTensors& blocks, int rank, int size) {
  if (!blocks.parts.empty()) {
    const at::Tensor& part = blocks.parts[rank];
    return {static_cast<char*>(part.mutable_data_ptr()), part.nbytes()};
  }
  const size_t bytes = blocks.flat.nbytes() / size;
  return {static_cast<char*>(blocks.flat.mutable_data_ptr()) + rank * bytes, bytes};
}

void set_send_all(CollectiveParams& params, const char* data, size_t bytes) {
  params.has_single_source = true;
  for (int r = 0; r < params.size; ++r) {
    params.send[r] = data;
    params.send_bytes[r] = bytes;
  }
}

void set_recv(CollectiveParams& params, int rank, Part part) {
  params.recv[rank] = part.data;
  params.recv_bytes[rank] = part.bytes;
}

NormParams norm_params(const RmsNorm& norm) {
  const auto read = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<const char*>(tensor.const_data_ptr()) : nullptr;
  };
  const auto write = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
  };
  const RmsNorm::Quantization& quantization = norm.quantization;
  return {.residual = read(norm.residual),
          .residual_out = static_cast<char*>(norm.residual_out.mutable_data_ptr()),
          .weight = read(norm.weight),
          .bias = read(norm.bias),
          .eps = static_cast<float>(norm.eps),
          .inverse_elements = 1.0F / static_cast<float>(norm.weight.numel()),
          .row_bytes = norm.weight.nbytes(),
          .rows = static_cast<uint64_t>(norm.residual_out.numel() / norm.weight.numel()),
          .row_blocks = 1,
          .scaling = quantization.scaling,
          .keeps_rows = quantization.keeps_rows,
          .scale = reinterpret_cast<const float*>(read(quantization.scale)),
          .quantized = static_cast<uint8_t*>(write(quantization.data)),
          .scale_inv = static_cast<float*>(write(quantization.scale_inv))};
}

uint32_t chunks_of(size_t bytes, size_t unit, uint32_t chunk) {
  const size_t units = (bytes + unit - 1) / unit;
  return static_cast<uint32_t>((units + chunk - 1) / chunk);
}

// Returns one thread per unit of a chunk, rounded up to a warp, at most kThreads. LL128: one warp
// per unit.
unsigned int threads_of(const CollectivePlan& plan) {
  constexpr uint32_t kWarp = 32;
  const uint32_t warps =
      plan.protocol == Protocol::ll128 ? plan.chunk : (plan.chunk + kWarp - 1) / kWarp;
  return std::min<uint32_t>(warps * kWarp, CollectiveGeometry::kThreads);
}

// Returns the bytes of data in one unit, in which a plan's chunks are counted.
size_t unit_of(const CollectivePlan& plan, const std::optional<KernelReduction>& reduction) {
  switch (plan.protocol) {
    case Protocol::ll:
      return reduction ? ll_data_bytes(reduction->type) : 12;
    case Protocol::ll128:
      return CollectiveGeometry::kLL128UnitData;
    default:
      return CollectiveGeometry::kVectorBytes;
  }
}

// Returns the bytes of each rank's slice of an all_reduce: whole units, except in the last slices.
size_t compute_slice_bytes(const CollectiveParams& params, size_t unit) {
  const size_t even = (params.send_bytes[0] + params.size - 1) / params.size;
  return (even + unit - 1) / unit * unit;
}

void cut_into_slices(CollectiveParams& params, size_t unit) {
  const size_t bytes = params.send_bytes[0];
  const size_t max_bytes = compute_slice_bytes(params, unit);
  const char* const from = params.send[0];
  char* const to = params.recv[0];
  for (int r = 0; r < params.size; ++r) {
    const size_t begin = std::min(r * max_bytes, bytes);
    params.send[r] = from + begin;
    params.recv[r] = to + begin;
    params.send_bytes[r] = params.recv_bytes[r] = std::min(max_bytes, bytes - begin);
  }
  params.has_single_source = false;
}

// In a reduction, and in an operation with slices, all pairs of ranks exchange equally many chunks.
void set_chunks(CollectiveParams& params, const Call& call, bool is_two_shot, size_t unit) {
  params.slice_bytes = is_two_shot ? compute_slice_bytes(params, unit) : 0;
  const size_t common_bytes = is_two_shot ? params.slice_bytes : params.send_bytes[0];
  for (int r = 0; r < params.size; ++r) {
    if (r == params.rank) continue;
    const size_t bytes = is_reduction(call.primitive)
                             ? common_bytes
                             : std::max(params.send_bytes[r], params.recv_bytes[r]);
    params.chunks[r] = chunks_of(bytes, unit, params.chunk);
    params.max_chunks = std::max(params.max_chunks, params.chunks[r]);
  }
  // The rank's own part is copied in the same steps.
  if (call.primitive == Primitive::all_to_all) {
    params.max_chunks =
        std::max(params.max_chunks, chunks_of(params.recv_bytes[params.rank], unit, params.chunk));
  }
}

cudaError_t launch_norm_kernel(const Call& call, const CollectivePlan& plan,
                               CollectiveParams params, ReductionType type,
                               const LaunchConfig& launch) {
  NormParams norm = norm_params(*call.norm);
  norm.row_blocks = plan.row_blocks;
  if (const at::Tensor& terms = call.norm->terms; terms.defined()) {
    set_send_all(params, static_cast<const char*>(terms.const_data_ptr()), terms.nbytes());
  }
  params.max_chunks = norm.rows * norm.row_blocks;
  std::fill_n(params.chunks, params.size, params.max_chunks);
  switch (plan.protocol) {
    case Protocol::ll:
      return launch_ll_norm(type, params, norm, launch);
    case Protocol::ll128:
      return launch_ll128_norm(type, params, norm, launch);
    default:
      return launch_simple_norm(type, params, norm, launch);
  }
}

cudaError_t launch_copy(const CollectivePlan& plan, const CollectiveParams& params,
                        const WindowPlacement& window, const LaunchConfig& launch) {
  if (plan.zero_copy) return launch_zero_copy(params, window, launch);
  switch (plan.protocol) {
    case Protocol::ll:
      return launch_ll_copy(params, launch);
    case Protocol::ll128:
      return launch_ll128_copy(params, launch);
    case Protocol::bulk:
      return launch_bulk_copy(params, launch);
    default:
      return launch_simple_copy(params, launch);
  }
}

cudaError_t launch_reduce(Primitive primitive, ReductionType type, const CollectivePlan& plan,
                          const CollectiveParams& params, const WindowPlacement& window,
                          const LaunchConfig& launch) {
  if (plan.zero_copy) {
    return primitive == Primitive::reduce_scatter
               ? launch_zero_copy_reduce(type, params, window, launch)
               : launch_zero_copy_all_reduce(type, params, window, launch);
  }
  switch (plan.protocol) {
    case Protocol::ll:
      return launch_ll_reduce(type, params, launch);
    case Protocol::ll128:
      return plan.is_two_shot ? launch_ll128_two_shot(type, params, launch)
                              : launch_ll128_reduce(type, params, launch);
    case Protocol::two_shot:
      return launch_two_shot(type, params, launch);
    case Protocol::bulk:
      return plan.is_two_shot ? launch_bulk_two_shot(type, params, launch)
                              : launch_bulk_reduce(type, params, launch);
    default:
      return launch_simple_reduce(type, params, launch);
  }
}

// Returns the parameters of one kernel: at most `max_bytes` of every part, from byte `at` on.
CollectiveParams sub_range(CollectiveParams params, size_t at, size_t max_bytes) {
  const auto advance = [&](auto*& part, uint64_t& bytes) {
    bytes = at < bytes ? std::min<uint64_t>(bytes - at, max_bytes) : 0;
    if (bytes > 0) part += at;
  };
  for (int r = 0; r < params.size; ++r) {
    advance(params.send[r], params.send_bytes[r]);
    advance(params.recv[r], params.recv_bytes[r]);
  }
  return params;
}

}  // namespace

std::optional<CollectiveKind> collective_kind(Primitive primitive) {
  switch (primitive) {
    case Primitive::all_reduce:
      return CollectiveKind::all_reduce;
    case Primitive::all_gather:
      return CollectiveKind::all_gather;
    case Primitive::reduce_scatter:
      return CollectiveKind::reduce_scatter;
    case Primitive::all_to_all:
      return CollectiveKind::all_to_all;
    case Primitive::broadcast:
      return CollectiveKind::broadcast;
    default:
      return std::nullopt;
  }
}

std::optional<CollectiveProblem> collective_problem(const Call& call, int size) {
  const auto kind = collective_kind(call.primitive);
  if (!kind || !is_supported_collective(*kind, size)) return std::nullopt;
  CollectiveProblem problem{.kind = *kind, .size = size, .bytes = 0, .ll_data_bytes = 12};
  switch (call.name) {
    case OpName::all_reduce:
    case OpName::all_reduce_rms_norm:
    case OpName::reduce_scatter:
    case OpName::reduce_scatter_single: {
      const auto reduction = kernel_reduction(call.tensor.scalar_type(), call.reduce_op);
      if (!reduction) return std::nullopt;
      problem.ll_data_bytes = ll_data_bytes(reduction->type);
      if (call.norm) {
        problem.row_bytes = call.norm->weight.nbytes();
        problem.norm_scaling = call.norm->quantization.scaling;
      }
      problem.bytes = call.tensor.nbytes();
      return problem;
    }
    case OpName::all_gather:
    case OpName::all_gather_single:
    case OpName::broadcast:
      problem.bytes = call.tensor.nbytes();
      return problem;
    case OpName::all_to_all_single:
      problem.bytes = call.in.flat.nbytes() / size;
      return problem;
    case OpName::all_to_all:
    case OpName::all_to_all_v_single:
      problem.is_uniform = false;
      return problem;
    default:
      return std::nullopt;
  }
}

void set_parts(CollectiveParams& params, const Call& call) {
  const int size = params.size;
  switch (call.primitive) {
    case Primitive::all_reduce: {
      auto* data = static_cast<char*>(call.tensor.mutable_data_ptr());
      set_send_all(params, data, call.tensor.nbytes());
      return set_recv(params, 0, {data, call.tensor.nbytes()});
    }
    case Primitive::reduce_scatter:
      set_recv(params, 0,
               {static_cast<char*>(call.tensor.mutable_data_ptr()), call.tensor.nbytes()});
      for (int r = 0; r < size; ++r) {
        const Part part = part_to_read(call.in, r, size);
        params.send[r] = part.data;
        params.send_bytes[r] = part.bytes;
      }
      return;
    case Primitive::all_gather:
      set_send_all(params, static_cast<const char*>(call.tensor.const_data_ptr()),
                   call.tensor.nbytes());
      for (int r = 0; r < size; ++r) set_recv(params, r, part_to_write(call.out, r, size));
      return;
    case Primitive::all_to_all:
      for (int r = 0; r < size; ++r) {
        const Part part = part_to_read(call.in, r, size);
        params.send[r] = part.data;
        params.send_bytes[r] = part.bytes;
        set_recv(params, r, part_to_write(call.out, r, size));
      }
      return;
    default:  // broadcast
      if (params.rank == call.root) {
        return set_send_all(params, static_cast<const char*>(call.tensor.const_data_ptr()),
                            call.tensor.nbytes());
      }
      return set_recv(params, call.root,
                      {static_cast<char*>(call.tensor.mutable_data_ptr()), call.tensor.nbytes()});
  }
}

const at::Tensor& shared_tensor(const Call& call) {
  switch (call.primitive) {
    case Primitive::all_gather:
    case Primitive::all_to_all:
      return call.out.flat;
    case Primitive::reduce_scatter:
      return call.in.flat;
    default:
      return call.tensor;
  }
}

bool is_aligned(const CollectiveParams& params) {
  uintptr_t bits = 0;
  for (int r = 0; r < params.size; ++r) {
    bits |= reinterpret_cast<uintptr_t>(params.send[r]);
    bits |= reinterpret_cast<uintptr_t>(params.recv[r]);
  }
  return bits % CollectiveGeometry::kVectorBytes == 0;
}

void launch_plan(const Call& call, const CollectivePlan& plan, const CollectiveParams& all,
                 const WindowPlacement& window, bool is_dependent, cudaStream_t stream,
                 bool& has_launched) {
  const LaunchConfig launch{.blocks = static_cast<unsigned int>(plan.blocks),
                            .threads = threads_of(plan),
                            .dependent = is_dependent,
                            .stream = stream,
                            .cluster = static_cast<unsigned int>(plan.row_blocks)};
  std::optional<KernelReduction> reduction;
  if (is_reduction(call.primitive)) {
    reduction = kernel_reduction(call.tensor.scalar_type(), call.reduce_op);
  }
  const auto launch_part = [&](CollectiveParams params) {
    if (reduction) params.op = reduction->op;
    const size_t unit = unit_of(plan, reduction);
    // LL128 kernels take one slice per rank as separate parts; Simple and bulk kernels compute the
    // slices from slice_bytes.
    const bool is_cut = plan.is_two_shot && plan.protocol == Protocol::ll128;
    if (is_cut) cut_into_slices(params, unit);
    set_chunks(params, call, plan.is_two_shot && !is_cut, unit);
    cudaError_t status = cudaSuccess;
    if (plan.row_blocks > 0) {
      status = launch_norm_kernel(call, plan, params, reduction->type, launch);
    } else if (reduction) {
      status = launch_reduce(call.primitive, reduction->type, plan, params, window, launch);
    } else {
      status = launch_copy(plan, params, window, launch);
    }
    cuda::check(status, [&] { return call.describe(); });
    has_launched = true;
  };
  if (plan.protocol != Protocol::bulk) return launch_part(all);
  // All ranks launch one kernel per kMaxBytesPerLaunch of each part, which bounds the memory of the
  // staging buffers for parts that are not aligned.
  constexpr size_t kMaxBytesPerLaunch = size_t{128} << 20;
  const size_t bytes = std::max(*std::max_element(all.send_bytes, all.send_bytes + all.size),
                                *std::max_element(all.recv_bytes, all.recv_bytes + all.size));
  for (size_t at = 0; at < bytes; at += kMaxBytesPerLaunch) {
    CollectiveParams params = sub_range(all, at, kMaxBytesPerLaunch);
    const AlignedParts aligned(params, stream);
    launch_part(params);
    aligned.copy_back();
  }
}

bool has_norm_kernels(at::ScalarType dtype, size_t row_bytes) {
  const auto reduction = kernel_reduction(dtype, ReduceOp(RedOpType::SUM));
  return reduction && cuda::supports_rms_norm(reduction->type, row_bytes);
}

void launch_rms_norm(const Call& call, cudaStream_t stream) {
  if (call.tensor.numel() == 0) return;
  const NormParams params = norm_params(*call.norm);
  const auto dtype = call.tensor.scalar_type();
  if (!has_norm_kernels(dtype, params.row_bytes)) return add_rms_norm(call.tensor, *call.norm);
  auto* const rows = static_cast<char*>(call.tensor.mutable_data_ptr());
  cuda::check(
      cuda::launch_norm(kernel_reduction(dtype, call.reduce_op)->type, rows, params, stream),
      [&] { return call.describe(); });
}

}  // namespace torch_overlap
