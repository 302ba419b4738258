#include <ATen/ops/gelu_backward.h>

#include <array>

#include "torch_overlap/ops/gemm_op.h"
#include "torch_overlap/ops/operator.h"

namespace torch_overlap::ops {
namespace {

using OptionalTensor = std::optional<Tensor>;

// The arguments of the overload gemm.buffers.
struct WithBuffers {
  template <typename Self>
  static auto fields(Self& self) {
    return std::tie(self.lhs, self.lhs_scale_inv, self.rhs, self.rhs_scale_inv, self.bias,
                    self.gelu_input, self.aux_in, self.lhs_swizzle, self.rhs_swizzle,
                    self.workspace, self.scaling_mode, self.comm_overlap_method, self.comm_type,
                    self.comm_overlap_id, self.lhs_axis_boundary, self.rhs_axis_boundary,
                    self.aux_axis_boundary, self.lhs_transposed, self.rhs_transposed,
                    self.fuse_bias, self.fuse_gelu, self.grad, self.use_split_accumulator,
                    self.scales_swizzled, self.out_dtype, self.out_scale, self.out_amax);
  }
};

// The arguments of gemm, which modifies none of them.
struct WithValues {
  template <typename Self>
  static auto fields(Self& self) {
    return std::tie(self.lhs, self.lhs_scale_inv, self.rhs, self.rhs_scale_inv, self.bias,
                    self.gelu_input, self.aux_in, self.scaling_mode, self.comm_overlap_method,
                    self.comm_type, self.comm_overlap_id, self.lhs_axis_boundary,
                    self.rhs_axis_boundary, self.aux_axis_boundary, self.lhs_transposed,
                    self.rhs_transposed, self.fuse_bias, self.fuse_gelu, self.grad,
                    self.use_split_accumulator, self.scales_swizzled, self.out_dtype,
                    self.out_scale);
  }
};

// One overload: a call of it, and a kernel with its signature.
template <typename Arguments,
          typename Fields = decltype(Arguments::fields(std::declval<const GemmOp&>()))>
class GemmOverload;
template <typename Arguments, typename... Fields>
class GemmOverload<Arguments, std::tuple<const Fields&...>> {
 public:
  GemmOverload(const char* name, const char* overload)
      : handle_(find_op<Signature>(name, overload)) {}

  GemmResults operator()(const GemmOp& call) const {
    return std::apply([this](const Fields&... fields) { return handle_.call(fields...); },
                      Arguments::fields(call));
  }

  template <GemmResults (*kKernel)(const GemmOp&)>
  static GemmResults unpacked(Parameter<Fields>... arguments) {
    GemmOp call;
    Arguments::fields(call) = std::tie(arguments...);
    return kKernel(call);
  }

 private:
  using Signature = GemmResults(Parameter<Fields>...);
  c10::TypedOperatorHandle<Signature> handle_;
};

void mark_modified(const OptionalTensor& tensor) {
  if (tensor && !tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
}

GemmResults gemm_kernel(const GemmOp& call) {
  if (call.comm_type != 0) return run_overlapped(call);
  auto results = empty_gemm_results(call);
  auto args = gemm_args(call, results);
  if (call.lhs_swizzle || call.rhs_swizzle) check_gemm("gemm", args);
  swizzle_operands(call, args);
  torch_overlap::gemm("gemm", args);
  for (const auto* written : {&call.lhs_swizzle, &call.rhs_swizzle, &call.out_amax}) {
    mark_modified(*written);
  }
  return results;
}

GemmResults gemm_meta(const GemmOp& call) {
  return call.comm_type != 0 ? run_overlapped(call) : empty_gemm_results(call);
}

// An operator with gemm's schema, and its overload that writes into buffers.
class GemmOperator {
 public:
  explicit GemmOperator(const char* name) : values_(name, ""), buffers_(name, "buffers") {}

  GemmResults operator()(const GemmOp& call) const {
    const bool writes = call.lhs_swizzle || call.rhs_swizzle || call.workspace || call.out_amax;
    return writes ? buffers_(call) : values_(call);
  }

 private:
  GemmOverload<WithValues> values_;
  GemmOverload<WithBuffers> buffers_;
};

// A call that communicates has its own operator below autograd: a compiler may drop or move an
// unused product, but not its part in a collective (torch_overlap/ops/_effects.py).
GemmResults below_autograd(const GemmOp& call) {
  const BelowAutograd guard;
  if (call.comm_type == 0) return gemm(call);
  static const GemmOperator overlapped("_gemm_overlapped");
  return overlapped(call);
}

// The gradient.
//
// With g = d output (after GELU: times its derivative), all as matrices:
//   d op(lhs) = g op(rhs)^T,  d op(rhs) = op(lhs)^T g,  and a transposed operand's gradient is
//   transposed.

Tensor product(const Tensor& lhs, bool lhs_transposed, const Tensor& rhs, bool rhs_transposed) {
  GemmOp call;
  call.lhs = lhs;
  call.rhs = rhs;
  call.lhs_transposed = lhs_transposed;
  call.rhs_transposed = rhs_transposed;
  return std::get<0>(gemm(call));
}

class Gemm : public Function<Gemm> {
 public:
  static constexpr bool is_traceable = true;

  // Takes the tensors of `call` that have gradients, and the whole call.
  static variable_list forward(AutogradContext* ctx, const Tensor& lhs, const Tensor& rhs,
                               const OptionalTensor& bias, const GemmOp& call) {
    auto [output, bias_grad, pre_gelu_out, aux_out] = below_autograd(call);
    const bool has_gradient = call.scaling_mode == 0 && !call.grad && call.comm_type == 0 &&
                              c10::elementSize(output.scalar_type()) > 1;
    ctx->saved_data["has_gradient"] = has_gradient;
    ctx->saved_data["comm_type"] = call.comm_type;
    ctx->mark_non_differentiable({bias_grad, pre_gelu_out, aux_out});
    ctx->set_materialize_grads(false);
    if (has_gradient) {
      ctx->save_for_backward({lhs, rhs, bias ? *bias : Tensor(), pre_gelu_out});
      ctx->saved_data["lhs_boundary"] = call.lhs_axis_boundary;
      ctx->saved_data["rhs_boundary"] = call.rhs_axis_boundary;
      ctx->saved_data["lhs_transposed"] = call.lhs_transposed;
      ctx->saved_data["rhs_transposed"] = call.rhs_transposed;
      ctx->saved_data["gelu"] = call.fuse_gelu;
    }
    return {output, bias_grad, pre_gelu_out, aux_out};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const int64_t comm_type = ctx->saved_data["comm_type"].toInt();
    TORCH_OVERLAP_CHECK(comm_type == 0, kUnsupported,
                        "gemm: expected comm_type NONE (0) where a gradient is asked, got ",
                        comm_type == 1 ? "RS (1)" : "AG (2)",
                        ". Its gradient is another collective over a buffer of its own, which no "
                        "argument names; use all_gather_matmul, matmul_reduce_scatter or "
                        "bulk_overlap_matmul, which have gradients, or detach the operands.");
    TORCH_OVERLAP_CHECK(ctx->saved_data["has_gradient"].toBool(), kUnsupported,
                        "gemm: expected operands of NO_SCALING, an output of 16 or more bits and "
                        "grad=False where a gradient is asked, got others; detach them and call "
                        "gemm with grad=True in a backward pass of your own");
    variable_list result(4);
    if (!grads[0].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const Tensor& lhs = saved[0];
    const Tensor& rhs = saved[1];
    const Tensor& bias = saved[2];
    const bool lhs_transposed = ctx->saved_data["lhs_transposed"].toBool();
    const bool rhs_transposed = ctx->saved_data["rhs_transposed"].toBool();
    const auto as_matrix = [&](std::string_view what, const Tensor& tensor, const char* boundary) {
      const auto sizes = collapse("gemm", what, tensor, ctx->saved_data[boundary].toInt());
      return tensor.reshape_symint({sizes.rows, sizes.cols});
    };
    const auto left = as_matrix("lhs", lhs, "lhs_boundary");
    const auto right = as_matrix("rhs", rhs, "rhs_boundary");
    auto rows = grads[0].reshape_symint(
        {left.sym_size(lhs_transposed ? 1 : 0), right.sym_size(rhs_transposed ? 0 : 1)});
    if (ctx->saved_data["gelu"].toBool()) {
      auto pre_gelu = saved[3];
      if (at::GradMode::is_enabled()) {  // double backward: recompute it differentiably
        pre_gelu = product(left, lhs_transposed, right, rhs_transposed).to(pre_gelu.scalar_type());
        if (bias.defined()) pre_gelu = pre_gelu + bias.reshape(-1);
      }
      rows = at::gelu_backward(rows, pre_gelu.reshape_symint(rows.sym_sizes()), "tanh");
    }
    const auto g = rows.to(lhs.scalar_type());
    if (ctx->needs_input_grad(0)) {
      const auto part = lhs_transposed ? product(right, rhs_transposed, g, true)
                                       : product(g, false, right, !rhs_transposed);
      result[0] = part.reshape_symint(lhs.sym_sizes());
    }
    if (ctx->needs_input_grad(1)) {
      const auto part = rhs_transposed ? product(g, true, left, lhs_transposed)
                                       : product(left, !lhs_transposed, g, false);
      result[1] = part.reshape_symint(rhs.sym_sizes());
    }
    if (bias.defined() && ctx->needs_input_grad(2)) {
      result[2] = rows.sum(0).to(bias.scalar_type()).reshape_symint(bias.sym_sizes());
    }
    return result;
  }
};

GemmResults gemm_autograd(const GemmOp& call) {
  if (needs_autograd(call.lhs) || needs_autograd(call.rhs) ||
      (call.bias && needs_autograd(*call.bias))) {
    const auto results = Gemm::apply(call.lhs, call.rhs, call.bias, call);
    return {results[0], results[1], results[2], results[3]};
  }
  return below_autograd(call);
}

// Operands are cast to the autocast dtype. 8-bit operands keep theirs, and their product gets it.
template <c10::DeviceType kDevice>
GemmResults gemm_autocast(const GemmOp& call) {
  const Autocast<kDevice> cast;
  auto inner = call;
  if (call.scaling_mode == 0) {
    inner.lhs = cast(call.lhs);
    inner.rhs = cast(call.rhs);
  } else if (!call.out_dtype) {
    inner.out_dtype = at::autocast::get_autocast_dtype(kDevice);
  }
  inner.bias = cast(call.bias);
  inner.gelu_input = cast(call.gelu_input);
  return gemm(inner);
}

}  // namespace

GemmResults gemm(const GemmOp& call) {
  static const GemmOperator op("gemm");
  return op(call);
}

void gemm_into(const GemmOp& call, const GemmResults& results) {
  const BelowAutograd guard;
  GemmOp inner = call;
  inner.into = &results;
  gemm_kernel(inner);
}

}  // namespace torch_overlap::ops

namespace {

constexpr const char* kGemmOperands =
    "Tensor lhs, Tensor? lhs_scale_inv, Tensor rhs, Tensor? rhs_scale_inv, Tensor? bias=None,"
    " Tensor? gelu_input=None, Tensor? aux_in=None,";
constexpr const char* kGemmBuffers =
    " Tensor(a!)? lhs_swizzle=None, Tensor(b!)? rhs_swizzle=None, Tensor(c!)? workspace=None,";
constexpr const char* kGemmAttributes =
    " int scaling_mode=0, int comm_overlap_method=0, int comm_type=0, int comm_overlap_id=0,"
    " int lhs_axis_boundary=-1, int rhs_axis_boundary=-1, int aux_axis_boundary=-1,"
    " bool lhs_transposed=False, bool rhs_transposed=False, bool fuse_bias=False,"
    " bool fuse_gelu=False, bool grad=False, bool use_split_accumulator=False,"
    " bool scales_swizzled=False, ScalarType? out_dtype=None, Tensor? out_scale=None";
constexpr const char* kGemmResults =
    " -> (Tensor output, Tensor bias_grad, Tensor pre_gelu_out, Tensor aux_out)";

constexpr std::array<const char*, 2> kGemm{"gemm", "gemm.buffers"};
constexpr std::array<const char*, 2> kGemmOverlapped{"_gemm_overlapped",
                                                     "_gemm_overlapped.buffers"};

template <torch_overlap::ops::GemmResults (*kKernel)(const torch_overlap::ops::GemmOp&)>
void register_gemm(torch_overlap::ops::Kernels m, const std::array<const char*, 2>& names = kGemm) {
  using namespace torch_overlap::ops;
  m.impl(names[0], &GemmOverload<WithValues>::unpacked<kKernel>);
  m.impl(names[1], &GemmOverload<WithBuffers>::unpacked<kKernel>);
}

}  // namespace

// There are two overloads: gemm modifies no argument, so a compiler can treat it as functional.
TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  using torch_overlap::concat;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  for (const auto& names : {kGemm, kGemmOverlapped}) {
    m.def(concat(names[0], "(", kGemmOperands, kGemmAttributes, ")", kGemmResults).c_str(), tags);
    m.def(concat(names[1], "(", kGemmOperands, kGemmBuffers, kGemmAttributes,
                 ", Tensor(d!)? out_amax=None)", kGemmResults)
              .c_str(),
          tags);
  }
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  register_gemm<torch_overlap::ops::gemm_kernel>(m);
  register_gemm<torch_overlap::ops::gemm_kernel>(m, kGemmOverlapped);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  register_gemm<torch_overlap::ops::gemm_meta>(m);
  register_gemm<torch_overlap::ops::gemm_meta>(m, kGemmOverlapped);
}

TORCH_OVERLAP_KERNELS(Autograd, m) { register_gemm<torch_overlap::ops::gemm_autograd>(m); }

TORCH_OVERLAP_KERNELS(AutocastCPU, m) {
  register_gemm<torch_overlap::ops::gemm_autocast<at::kCPU>>(m);
}

TORCH_OVERLAP_KERNELS(AutocastCUDA, m) {
  register_gemm<torch_overlap::ops::gemm_autocast<at::kCUDA>>(m);
}
