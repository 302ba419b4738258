#include "torch_overlap/ops/gemm_op.h"

#include <ATen/ops/empty.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/below_dispatch_guard.h"
#include "torch_overlap/jax/call.h"
#include "torch_overlap/jax/stream.h"
#include "torch_overlap/jax/tensors.h"
#include "torch_overlap/overlap/registry.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(torch_overlap::ScalingMode);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(torch_overlap::CommOverlapMethod);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(torch_overlap::CommOverlapType);

// The handler of Transformer Engine's JAX extension: a GEMM with epilogues and scales, alone or
// over a communication buffer.
namespace torch_overlap::jax {
namespace {

using Input = ffi::AnyBuffer;
using Output = ffi::Result<ffi::AnyBuffer>;

constexpr std::string_view kGemm = "gemm";

// Programs have one shape for all ranks, so a result of rows that the ranks cannot share equally
// has the largest part's. Returns this rank's rows of it, after setting the others to 0.
at::Tensor own_rows(const at::Tensor& result, int64_t all_rows, int64_t first_size, int rank,
                    int ranks) {
  if (!result.defined() || result.numel() == 0 || first_size % ranks == 0) return result;
  const RowPartition parts{.rows = first_size, .size = ranks};
  const int64_t largest = parts.largest();
  TORCH_OVERLAP_CHECK(result.size(0) == largest, kValue, kGemm, ": expected a result of ", largest,
                      " in its first dimension, the largest part of ", first_size, " (", all_rows,
                      " rows) for ", ranks, " ranks, got ", result.size(0), ". Allocate it so.");
  const int64_t own = parts.length(rank);
  if (own < largest) result.narrow(0, own, largest - own).zero_();
  return result.narrow(0, 0, own);
}

// Cuts the result that a reduce-scatter writes to this rank's rows.
void cut_scattered(const ops::GemmOp& call, ops::GemmResults& results,
                   const CommOverlapCore& buffer) {
  if (call.comm_type != static_cast<int64_t>(CommOverlapType::RS)) return;
  const int ranks = buffer.get_tp_size();
  if (buffer.config().method == CommOverlapMethod::BULK) {
    if (!call.aux_in || call.aux_in->dim() == 0) return;
    auto& result = std::get<3>(results);
    result = own_rows(result, 0, call.aux_in->size(0), buffer.rank(), ranks);
    return;
  }
  const auto shape = ops::gemm_result_shape(call);
  if (shape.sizes.empty()) return;
  auto& result = std::get<0>(results);
  result =
      own_rows(result, shape.m.expect_int(), shape.sizes[0].expect_int(), buffer.rank(), ranks);
}

ffi::Future gemm(ffi::Context context, Instance* instance, int32_t ordinal, Input lhs,
                 Input lhs_scale_inv, Input rhs, Input rhs_scale_inv, Input bias, Input gelu_input,
                 Input aux_in, Output output, Output bias_grad, Output pre_gelu_out, Output aux_out,
                 Output lhs_swizzle, Output rhs_swizzle, Output workspace, ScalingMode scaling_mode,
                 CommOverlapMethod comm_overlap_method, CommOverlapType comm_type,
                 int64_t comm_overlap_id, int64_t lhs_axis_boundary, int64_t rhs_axis_boundary,
                 int64_t aux_axis_boundary, bool lhs_transposed, bool rhs_transposed,
                 bool fuse_bias, bool fuse_gelu, bool grad, bool use_split_accumulator) {
  return guarded([&] {
    const Caller caller{context, instance, ordinal};
    DeviceRank rank;
    std::shared_ptr<CommOverlapCore> buffer;
    c10::Device device = stream_device(context, ordinal);
    if (comm_type != CommOverlapType::NONE) {
      const DeviceBuffer found = find_buffer(kGemm, comm_overlap_id, ordinal);
      rank = found.rank;
      device = rank.comm->device();
      buffer = find_comm_overlap_buffer(kGemm, found.core_id);
      comm_overlap_id = found.core_id;
    }
    const auto optional = [&](std::string_view what, const Input& operand) {
      return as_optional(kGemm, what, operand, device);
    };
    const auto result = [&](std::string_view what, const Output& of) {
      return as_tensor(kGemm, what, *of, device);
    };
    ops::GemmOp call{.lhs = as_tensor(kGemm, "lhs", lhs, device),
                     .lhs_scale_inv = optional("lhs_scale_inv", lhs_scale_inv),
                     .rhs = as_tensor(kGemm, "rhs", rhs, device),
                     .rhs_scale_inv = optional("rhs_scale_inv", rhs_scale_inv),
                     .bias = optional("bias", bias),
                     .gelu_input = optional("gelu_input", gelu_input),
                     .aux_in = optional("aux_in", aux_in),
                     .lhs_swizzle = optional("lhs_swizzle", *lhs_swizzle),
                     .rhs_swizzle = optional("rhs_swizzle", *rhs_swizzle),
                     .workspace = optional("workspace", *workspace),
                     .scaling_mode = static_cast<int64_t>(scaling_mode),
                     .comm_overlap_method = static_cast<int64_t>(comm_overlap_method),
                     .comm_type = static_cast<int64_t>(comm_type),
                     .comm_overlap_id = comm_overlap_id,
                     .lhs_axis_boundary = lhs_axis_boundary,
                     .rhs_axis_boundary = rhs_axis_boundary,
                     .aux_axis_boundary = aux_axis_boundary,
                     .lhs_transposed = lhs_transposed,
                     .rhs_transposed = rhs_transposed,
                     .fuse_bias = fuse_bias,
                     .fuse_gelu = fuse_gelu,
                     .grad = grad,
                     .use_split_accumulator = use_split_accumulator,
                     .scales_swizzled = false,
                     .out_dtype = scalar_type(kGemm, "output", output->element_type()),
                     .out_scale = std::nullopt,
                     .out_amax = std::nullopt};
    ops::GemmResults results{result("output", output), result("bias_grad", bias_grad),
                             result("pre_gelu_out", pre_gelu_out), result("aux_out", aux_out)};
    if (buffer) {
      return run(caller, rank,
                 [call = std::move(call), results = std::move(results), buffer]() mutable {
                   cut_scattered(call, results, *buffer);
                   ops::gemm_into(call, results);
                 });
    }
    run_on_stream(context, device, [&] {
      const BelowDispatchGuard below;
      ops::gemm_into(call, results);
    });
    ffi::Promise done;
    ffi::Future future(done);
    done.SetAvailable();
    return future;
  });
}

}  // namespace
}  // namespace torch_overlap::jax

TORCH_OVERLAP_JAX_STAGE(GemmHandler, torch_overlap::jax::gemm,
                        TORCH_OVERLAP_JAX_BIND(kExecute)
                            .Arg<xla::ffi::AnyBuffer>()  // lhs
                            .Arg<xla::ffi::AnyBuffer>()  // lhs_scale_inv
                            .Arg<xla::ffi::AnyBuffer>()  // rhs
                            .Arg<xla::ffi::AnyBuffer>()  // rhs_scale_inv
                            .Arg<xla::ffi::AnyBuffer>()  // bias
                            .Arg<xla::ffi::AnyBuffer>()  // gelu_input
                            .Arg<xla::ffi::AnyBuffer>()  // aux_in
                            .Ret<xla::ffi::AnyBuffer>()  // output
                            .Ret<xla::ffi::AnyBuffer>()  // bias_grad
                            .Ret<xla::ffi::AnyBuffer>()  // pre_gelu_out
                            .Ret<xla::ffi::AnyBuffer>()  // aux_out
                            .Ret<xla::ffi::AnyBuffer>()  // lhs_swizzled
                            .Ret<xla::ffi::AnyBuffer>()  // rhs_swizzled
                            .Ret<xla::ffi::AnyBuffer>()  // workspace
                            .Attr<torch_overlap::ScalingMode>("scaling_mode")
                            .Attr<torch_overlap::CommOverlapMethod>("comm_overlap_method")
                            .Attr<torch_overlap::CommOverlapType>("comm_type")
                            .Attr<int64_t>("comm_overlap_id")
                            .Attr<int64_t>("lhs_axis_boundary")
                            .Attr<int64_t>("rhs_axis_boundary")
                            .Attr<int64_t>("aux_axis_boundary")
                            .Attr<bool>("lhs_transposed")
                            .Attr<bool>("rhs_transposed")
                            .Attr<bool>("fuse_bias")
                            .Attr<bool>("fuse_gelu")
                            .Attr<bool>("grad")
                            .Attr<bool>("use_split_accumulator"))
