#include "torch_overlap/comm/backends/nccl/direct_call.h"

#include <algorithm>
#include <optional>

#include "torch_overlap/comm/backends/nccl/aligned_parts.h"
#include "torch_overlap/comm/backends/nccl/reduction.h"
#include "torch_overlap/comm/rms_norm.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap {
namespace {

using cuda::DirectLaunch;
using cuda::DirectOp;
using cuda::DirectParams;
using cuda::DirectType;
using cuda::DirectWindow;
using cuda::NormParams;

struct DirectReduction {
  DirectType type;
  DirectOp op;
};

std::optional<DirectType> direct_type(ncclDataType_t type) {
  switch (type) {
    case ncclInt32:
      return DirectType::i32;
    case ncclInt64:
      return DirectType::i64;
    case ncclFloat16:
      return DirectType::f16;
    case ncclBfloat16:
      return DirectType::bf16;
    case ncclFloat32:
      return DirectType::f32;
    case ncclFloat64:
      return DirectType::f64;
    default:
      return std::nullopt;
  }
}

// Empty where NCCL or a composition does it.
std::optional<DirectReduction> direct_reduction(at::ScalarType dtype, const ReduceOp& op) {
  if (op.type() == RedOpType::PREMUL_SUM) return std::nullopt;
  const auto native = native_reduction(dtype, op);
  if (!native) return std::nullopt;
  const auto type = direct_type(native->dtype);
  if (!type) return std::nullopt;
  switch (native->op) {
    case ncclSum:
      return DirectReduction{*type, DirectOp::sum};
    case ncclProd:
      return DirectReduction{*type, DirectOp::product};
    case ncclMin:
      return DirectReduction{*type, DirectOp::min};
    case ncclMax:
      return DirectReduction{*type, DirectOp::max};
    case ncclAvg:
      if (*type == DirectType::i32 || *type == DirectType::i64) return std::nullopt;
      return DirectReduction{*type, DirectOp::average};
    default:
      return std::nullopt;
  }
}

bool is_reduction(Primitive primitive) {
  return primitive == Primitive::all_reduce || primitive == Primitive::reduce_scatter;
}

size_t line_data(DirectType type) {
  return type == DirectType::i64 || type == DirectType::f64 ? 8 : 12;
}

struct Part {
  char* data;
  size_t bytes;
};

// The part of `rank`: to read from, and to write to.
Part part_to_read(const Blocks& blocks, int rank, int size) {
  if (!blocks.parts.empty()) {
    const at::Tensor& part = blocks.parts[rank];
    return {static_cast<char*>(const_cast<void*>(part.const_data_ptr())), part.nbytes()};
  }
  const size_t bytes = blocks.flat.nbytes() / size;
  auto* data = static_cast<char*>(const_cast<void*>(blocks.flat.const_data_ptr()));
  return {data + rank * bytes, bytes};
}

Part part_to_write(const Blocks& blocks, int rank, int size) {
  if (!blocks.parts.empty()) {
    const at::Tensor& part = blocks.parts[rank];
    return {static_cast<char*>(part.mutable_data_ptr()), part.nbytes()};
  }
  const size_t bytes = blocks.flat.nbytes() / size;
  return {static_cast<char*>(blocks.flat.mutable_data_ptr()) + rank * bytes, bytes};
}

void send_to_all(DirectParams& params, const char* data, size_t bytes) {
  params.one_source = true;
  for (int r = 0; r < params.size; ++r) {
    params.send[r] = data;
    params.send_bytes[r] = bytes;
  }
}

void receive(DirectParams& params, int rank, Part part) {
  params.recv[rank] = part.data;
  params.recv_bytes[rank] = part.bytes;
}

NormParams norm_params(const RmsNorm& norm) {
  const auto read = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<const char*>(tensor.const_data_ptr()) : nullptr;
  };
  return {.residual = read(norm.residual),
          .residual_out = static_cast<char*>(norm.residual_out.mutable_data_ptr()),
          .weight = read(norm.weight),
          .bias = read(norm.bias),
          .eps = static_cast<float>(norm.eps),
          .row_bytes = norm.weight.nbytes(),
          .row_blocks = 1};
}

uint32_t chunks_of(size_t bytes, size_t unit, uint32_t chunk) {
  const size_t units = (bytes + unit - 1) / unit;
  return static_cast<uint32_t>((units + chunk - 1) / chunk);
}

// One for each unit of a chunk, in whole warps; of wide lines, a warp for each.
unsigned int threads_of(const DirectPlan& plan) {
  constexpr uint32_t kWarp = 32;
  const uint32_t warps =
      plan.protocol == DirectProtocol::ll128 ? plan.chunk : (plan.chunk + kWarp - 1) / kWarp;
  return std::min<uint32_t>(warps * kWarp, DirectGeometry::kThreads);
}

// What a plan's chunks are counted in, in bytes of data.
size_t unit_of(const DirectPlan& plan, const std::optional<DirectReduction>& reduction) {
  switch (plan.protocol) {
    case DirectProtocol::ll:
      return reduction ? line_data(reduction->type) : 12;
    case DirectProtocol::ll128:
      return DirectGeometry::kWideUnitData;
    default:
      return DirectGeometry::kVectorBytes;
  }
}

// Of an all_reduce, for each rank: whole units but for the last slices.
size_t bytes_of_slice(const DirectParams& params, size_t unit) {
  const size_t even = (params.send_bytes[0] + params.size - 1) / params.size;
  return (even + unit - 1) / unit * unit;
}

void cut_into_slices(DirectParams& params, size_t unit) {
  const size_t bytes = params.send_bytes[0];
  const size_t most = bytes_of_slice(params, unit);
  const char* const from = params.send[0];
  char* const to = params.recv[0];
  for (int r = 0; r < params.size; ++r) {
    const size_t begin = std::min(r * most, bytes);
    params.send[r] = from + begin;
    params.recv[r] = to + begin;
    params.send_bytes[r] = params.recv_bytes[r] = std::min(most, bytes - begin);
  }
  params.one_source = false;
}

// In a reduction, and in an operation of slices, all ranks talk alike.
void set_chunks(DirectParams& params, const Call& call, bool has_slices, size_t unit) {
  if (has_slices) params.send_bytes[1] = bytes_of_slice(params, unit);
  const size_t alike = has_slices ? params.send_bytes[1] : params.send_bytes[0];
  for (int r = 0; r < params.size; ++r) {
    if (r == params.rank) continue;
    const size_t bytes =
        is_reduction(call.primitive) ? alike : std::max(params.send_bytes[r], params.recv_bytes[r]);
    params.chunks[r] = chunks_of(bytes, unit, params.chunk);
    params.most_chunks = std::max(params.most_chunks, params.chunks[r]);
  }
  // The own part is copied, in the same steps.
  if (call.primitive == Primitive::all_to_all) {
    params.most_chunks =
        std::max(params.most_chunks, chunks_of(params.recv_bytes[params.rank], unit, params.chunk));
  }
}

cudaError_t launch_norm_kernel(const Call& call, const DirectPlan& plan, DirectParams params,
                               DirectType type, const DirectLaunch& launch) {
  NormParams norm = norm_params(*call.norm);
  norm.row_blocks = plan.row_blocks;
  params.most_chunks = call.tensor.nbytes() / norm.row_bytes * norm.row_blocks;
  std::fill_n(params.chunks, params.size, params.most_chunks);
  return plan.protocol == DirectProtocol::ll ? launch_line_norm(type, params, norm, launch)
                                             : launch_push_norm(type, params, norm, launch);
}

cudaError_t launch_copy(const DirectPlan& plan, const DirectParams& params,
                        const DirectWindow& window, const DirectLaunch& launch) {
  if (plan.zero_copy) return launch_zero_copy(params, window, launch);
  switch (plan.protocol) {
    case DirectProtocol::ll:
      return launch_line_copy(params, launch);
    case DirectProtocol::ll128:
      return launch_ll128_copy(params, launch);
    case DirectProtocol::bulk:
      return launch_bulk_copy(params, launch);
    default:
      return launch_push_copy(params, launch);
  }
}

cudaError_t launch_reduce(Primitive primitive, DirectType type, const DirectPlan& plan,
                          const DirectParams& params, const DirectWindow& window,
                          const DirectLaunch& launch) {
  if (plan.zero_copy) {
    return primitive == Primitive::reduce_scatter
               ? launch_zero_copy_reduce(type, params, window, launch)
               : launch_zero_copy_all_reduce(type, params, window, launch);
  }
  switch (plan.protocol) {
    case DirectProtocol::ll:
      return launch_line_reduce(type, params, launch);
    case DirectProtocol::ll128:
      return plan.has_slices ? launch_ll128_two_shot(type, params, launch)
                             : launch_ll128_reduce(type, params, launch);
    case DirectProtocol::two_shot:
      return launch_two_shot(type, params, launch);
    case DirectProtocol::bulk:
      return plan.has_slices ? launch_bulk_two_shot(type, params, launch)
                             : launch_bulk_reduce(type, params, launch);
    default:
      return launch_push_reduce(type, params, launch);
  }
}

// Of every part, the bytes from `at` on that one kernel takes.
DirectParams from_byte(DirectParams params, size_t at, size_t most) {
  const auto advance = [&](auto*& part, uint64_t& bytes) {
    bytes = at < bytes ? std::min<uint64_t>(bytes - at, most) : 0;
    if (bytes > 0) part += at;
  };
  for (int r = 0; r < params.size; ++r) {
    advance(params.send[r], params.send_bytes[r]);
    advance(params.recv[r], params.recv_bytes[r]);
  }
  return params;
}

}  // namespace

std::optional<DirectProblem> direct_problem(const Call& call, int size) {
  DirectProblem problem{.primitive = call.primitive, .size = size, .bytes = 0, .line_data = 12};
  switch (call.name) {
    case OpName::all_reduce:
    case OpName::all_reduce_rms_norm:
    case OpName::reduce_scatter:
    case OpName::reduce_scatter_single: {
      const auto reduction = direct_reduction(call.tensor.scalar_type(), call.reduce_op);
      if (!reduction) return std::nullopt;
      problem.line_data = line_data(reduction->type);
      if (call.norm) problem.row_bytes = call.norm->weight.nbytes();
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

void set_parts(DirectParams& params, const Call& call) {
  const int size = params.size;
  switch (call.primitive) {
    case Primitive::all_reduce: {
      auto* data = static_cast<char*>(call.tensor.mutable_data_ptr());
      send_to_all(params, data, call.tensor.nbytes());
      return receive(params, 0, {data, call.tensor.nbytes()});
    }
    case Primitive::reduce_scatter:
      receive(params, 0,
              {static_cast<char*>(call.tensor.mutable_data_ptr()), call.tensor.nbytes()});
      for (int r = 0; r < size; ++r) {
        const Part part = part_to_read(call.in, r, size);
        params.send[r] = part.data;
        params.send_bytes[r] = part.bytes;
      }
      return;
    case Primitive::all_gather:
      send_to_all(params, static_cast<const char*>(call.tensor.const_data_ptr()),
                  call.tensor.nbytes());
      for (int r = 0; r < size; ++r) receive(params, r, part_to_write(call.out, r, size));
      return;
    case Primitive::all_to_all:
      for (int r = 0; r < size; ++r) {
        const Part part = part_to_read(call.in, r, size);
        params.send[r] = part.data;
        params.send_bytes[r] = part.bytes;
        receive(params, r, part_to_write(call.out, r, size));
      }
      return;
    default:  // broadcast
      if (params.rank == call.root) {
        return send_to_all(params, static_cast<const char*>(call.tensor.const_data_ptr()),
                           call.tensor.nbytes());
      }
      return receive(params, call.root,
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

bool is_aligned(const DirectParams& params) {
  uintptr_t bits = 0;
  for (int r = 0; r < params.size; ++r) {
    bits |= reinterpret_cast<uintptr_t>(params.send[r]);
    bits |= reinterpret_cast<uintptr_t>(params.recv[r]);
  }
  return bits % DirectGeometry::kVectorBytes == 0;
}

void launch_plan(const Call& call, const DirectPlan& plan, const DirectParams& all,
                 const DirectWindow& window, bool is_dependent, cudaStream_t stream,
                 bool& has_begun) {
  const DirectLaunch launch{.blocks = static_cast<unsigned int>(plan.blocks),
                            .threads = threads_of(plan),
                            .dependent = is_dependent,
                            .stream = stream,
                            .cluster = static_cast<unsigned int>(plan.row_blocks)};
  std::optional<DirectReduction> reduction;
  if (is_reduction(call.primitive)) {
    reduction = direct_reduction(call.tensor.scalar_type(), call.reduce_op);
  }
  const auto launch_part = [&](DirectParams params) {
    if (reduction) params.op = reduction->op;
    const size_t unit = unit_of(plan, reduction);
    const bool is_cut = plan.has_slices && plan.protocol == DirectProtocol::ll128;
    if (is_cut) cut_into_slices(params, unit);
    set_chunks(params, call, plan.has_slices && !is_cut, unit);
    cudaError_t status = cudaSuccess;
    if (plan.row_blocks > 0) {
      status = launch_norm_kernel(call, plan, params, reduction->type, launch);
    } else if (reduction) {
      status = launch_reduce(call.primitive, reduction->type, plan, params, window, launch);
    } else {
      status = launch_copy(plan, params, window, launch);
    }
    cuda::check(status, [&] { return call.describe(); });
    has_begun = true;
  };
  if (plan.protocol != DirectProtocol::bulk) return launch_part(all);
  // A kernel for so much of each part, on all ranks: what stands in for parts that are not aligned
  // takes no more memory.
  constexpr size_t kMost = size_t{128} << 20;
  const size_t bytes = std::max(*std::max_element(all.send_bytes, all.send_bytes + all.size),
                                *std::max_element(all.recv_bytes, all.recv_bytes + all.size));
  for (size_t at = 0; at < bytes; at += kMost) {
    DirectParams params = from_byte(all, at, kMost);
    const AlignedParts aligned(params, stream);
    launch_part(params);
    aligned.copy_back();
  }
}

void launch_rms_norm(const Call& call, cudaStream_t stream) {
  const RmsNorm& norm = *call.norm;
  if (call.tensor.numel() == 0) return;
  const NormParams params = norm_params(norm);
  const auto reduction = direct_reduction(call.tensor.scalar_type(), call.reduce_op);
  auto* rows = static_cast<char*>(call.tensor.mutable_data_ptr());
  if (!reduction || !cuda::is_norm_possible(reduction->type, params.row_bytes)) {
    return add_rms_norm(call.tensor, norm);
  }
  const auto count = static_cast<uint32_t>(call.tensor.numel() / norm.weight.numel());
  cuda::check(cuda::launch_norm(reduction->type, rows, count, params, stream),
              [&] { return call.describe(); });
}

}  // namespace torch_overlap
