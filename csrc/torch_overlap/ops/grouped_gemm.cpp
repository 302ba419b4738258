#include "torch_overlap/gemm/grouped.h"

#include <ATen/autocast_mode.h>

#include <algorithm>

#include "torch_overlap/ops/gemm_op.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kGroupedGemm = "grouped_gemm";

struct GroupedOptions {
  int64_t scaling_mode = 0;
  bool lhs_transposed = false;
  bool rhs_transposed = false;
  bool use_split_accumulator = false;
  bool scales_swizzled = false;
  std::optional<at::ScalarType> out_dtype;
};

void check_list(std::string_view what, size_t got, size_t expected, bool may_be_empty) {
  TORCH_OVERLAP_CHECK(got == expected || (may_be_empty && got == 0), kValue, kGroupedGemm,
                      ": expected ", may_be_empty ? "no " : "", what, may_be_empty ? " or" : ",",
                      " one for each of the ", expected, " of lhs, got ", got,
                      ". Pass lists of one length.");
}

void check_scale_list(std::string_view what, size_t got, size_t expected, bool scaled) {
  TORCH_OVERLAP_CHECK(scaled || got == 0, kValue, kGroupedGemm, ": expected no ", what,
                      " for NO_SCALING, got ", got, "; pass a scaling_mode");
  if (scaled) check_list(what, got, expected, false);
}

void check_matrix(std::string_view what, size_t index, const Tensor& matrix) {
  TORCH_OVERLAP_CHECK(matrix.dim() == 2, kValue, kGroupedGemm, ": expected matrices, got ", what,
                      "[", index, "] of shape ", matrix.sym_sizes(), "; flatten it");
}

// Returns the problems of a group as calls of gemm, to share its checks.
std::vector<GemmOp> grouped_calls(at::TensorList lhs, at::TensorList rhs,
                                  const OptionalTensors& biases, at::TensorList lhs_scale_inv,
                                  at::TensorList rhs_scale_inv, const GroupedOptions& options) {
  check_list("rhs", rhs.size(), lhs.size(), false);
  check_list("biases", biases.size(), lhs.size(), true);
  const bool scaled = scaling_mode(kGroupedGemm, options.scaling_mode) != ScalingMode::NO_SCALING;
  check_scale_list("lhs_scale_inv", lhs_scale_inv.size(), lhs.size(), scaled);
  check_scale_list("rhs_scale_inv", rhs_scale_inv.size(), lhs.size(), scaled);
  TORCH_OVERLAP_CHECK(!options.out_dtype || c10::elementSize(*options.out_dtype) > 1, kType,
                      kGroupedGemm, ": expected out_dtype of more than 8 bits, got ",
                      *options.out_dtype, "; use gemm for each, which takes their factors");
  std::vector<GemmOp> calls(lhs.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    check_matrix("lhs", i, lhs[i]);
    check_matrix("rhs", i, rhs[i]);
    calls[i].lhs = lhs[i];
    calls[i].rhs = rhs[i];
    if (scaled) {
      calls[i].lhs_scale_inv = lhs_scale_inv[i];
      calls[i].rhs_scale_inv = rhs_scale_inv[i];
    }
    if (!biases.empty()) calls[i].bias = biases.get(i);
    calls[i].fuse_bias = calls[i].bias.has_value();
    calls[i].scaling_mode = options.scaling_mode;
    calls[i].lhs_transposed = options.lhs_transposed;
    calls[i].rhs_transposed = options.rhs_transposed;
    calls[i].use_split_accumulator = options.use_split_accumulator;
    calls[i].scales_swizzled = options.scales_swizzled;
    calls[i].out_dtype = options.out_dtype;
  }
  return calls;
}

std::vector<Tensor> grouped_gemm_kernel(at::TensorList lhs, at::TensorList rhs,
                                        const OptionalTensors& biases, at::TensorList lhs_scale_inv,
                                        at::TensorList rhs_scale_inv, int64_t mode,
                                        bool lhs_transposed, bool rhs_transposed,
                                        bool use_split_accumulator, bool scales_swizzled,
                                        std::optional<at::ScalarType> out_dtype) {
  const auto calls = grouped_calls(
      lhs, rhs, biases, lhs_scale_inv, rhs_scale_inv,
      {mode, lhs_transposed, rhs_transposed, use_split_accumulator, scales_swizzled, out_dtype});
  std::vector<Tensor> outputs;
  std::vector<GemmArgs> group;
  for (const auto& call : calls) {
    const auto results = empty_gemm_results(call, kGroupedGemm);
    outputs.push_back(std::get<0>(results));
    group.push_back(gemm_args(call, results, kGroupedGemm));
  }
  torch_overlap::grouped_gemm(kGroupedGemm, group);
  return outputs;
}

std::vector<Tensor> grouped_gemm_meta(at::TensorList lhs, at::TensorList rhs,
                                      const OptionalTensors& biases, at::TensorList lhs_scale_inv,
                                      at::TensorList rhs_scale_inv, int64_t mode,
                                      bool lhs_transposed, bool rhs_transposed,
                                      bool use_split_accumulator, bool scales_swizzled,
                                      std::optional<at::ScalarType> out_dtype) {
  std::vector<Tensor> outputs;
  for (const auto& call : grouped_calls(lhs, rhs, biases, lhs_scale_inv, rhs_scale_inv,
                                        {mode, lhs_transposed, rhs_transposed,
                                         use_split_accumulator, scales_swizzled, out_dtype})) {
    outputs.push_back(std::get<0>(empty_gemm_results(call, kGroupedGemm)));
  }
  return outputs;
}

std::vector<Tensor> call_grouped_gemm(at::TensorList lhs, at::TensorList rhs,
                                      const OptionalTensors& biases, at::TensorList lhs_scale_inv,
                                      at::TensorList rhs_scale_inv, const GroupedOptions& options) {
  static const auto handle = find_op<decltype(grouped_gemm_kernel)>("grouped_gemm");
  return handle.call(lhs, rhs, biases, lhs_scale_inv, rhs_scale_inv, options.scaling_mode,
                     options.lhs_transposed, options.rhs_transposed, options.use_split_accumulator,
                     options.scales_swizzled, options.out_dtype);
}

std::vector<Tensor> grouped_product(at::TensorList lhs, bool lhs_transposed, at::TensorList rhs,
                                    bool rhs_transposed) {
  return call_grouped_gemm(
      lhs, rhs, OptionalTensors(), {}, {},
      {.lhs_transposed = lhs_transposed, .rhs_transposed = rhs_transposed, .out_dtype = {}});
}

// The gradients of unscaled groups are groups, with the formulas of gemm.
class GroupedGemm : public Function<GroupedGemm> {
 public:
  static constexpr bool is_traceable = true;

  // `biases`: those that exist, of the problems `biased`.
  static variable_list forward(AutogradContext* ctx, at::TensorList lhs, at::TensorList rhs,
                               at::TensorList biases, const std::vector<int64_t>& biased,
                               const std::vector<Tensor>& lhs_scale_inv,
                               const std::vector<Tensor>& rhs_scale_inv,
                               const GroupedOptions& options) {
    const BelowAutograd guard;
    OptionalTensors optional_biases;
    if (!biased.empty()) optional_biases.resize(lhs.size(), std::nullopt);
    for (size_t i = 0; i < biased.size(); ++i) optional_biases.set(biased[i], biases[i]);
    auto outputs =
        call_grouped_gemm(lhs, rhs, optional_biases, lhs_scale_inv, rhs_scale_inv, options);
    const bool has_gradient = options.scaling_mode == 0;
    ctx->saved_data["has_gradient"] = has_gradient;
    ctx->set_materialize_grads(false);
    if (has_gradient) {
      variable_list saved(lhs.begin(), lhs.end());
      saved.insert(saved.end(), rhs.begin(), rhs.end());
      saved.insert(saved.end(), biases.begin(), biases.end());
      ctx->save_for_backward(std::move(saved));
      ctx->saved_data["count"] = static_cast<int64_t>(lhs.size());
      ctx->saved_data["biased"] = IValue(biased);
      ctx->saved_data["lhs_transposed"] = options.lhs_transposed;
      ctx->saved_data["rhs_transposed"] = options.rhs_transposed;
    }
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    TORCH_OVERLAP_CHECK(ctx->saved_data["has_gradient"].toBool(), kUnsupported, kGroupedGemm,
                        ": expected operands of NO_SCALING where a gradient is asked, got 8-bit "
                        "ones; detach them and write the backward pass with grouped_gemm");
    const auto saved = ctx->get_saved_variables();
    const auto count = static_cast<size_t>(ctx->saved_data["count"].toInt());
    const auto biased = ctx->saved_data["biased"].toIntVector();
    const bool lhs_transposed = ctx->saved_data["lhs_transposed"].toBool();
    const bool rhs_transposed = ctx->saved_data["rhs_transposed"].toBool();
    variable_list result(2 * count + biased.size() + 4);

    // One group computes the gradients of lhs and one those of rhs, for the outputs that were used.
    for (const bool of_lhs : {true, false}) {
      std::vector<size_t> wanted_at;
      std::vector<Tensor> gradients;
      std::vector<Tensor> others;
      for (size_t i = 0; i < count; ++i) {
        const size_t at = of_lhs ? i : count + i;
        if (!grads[i].defined() || !ctx->needs_input_grad(at)) continue;
        wanted_at.push_back(at);
        gradients.push_back(grads[i].to(saved[i].scalar_type()));
        others.push_back(of_lhs ? saved[count + i] : saved[i]);
      }
      if (wanted_at.empty()) continue;
      const auto parts =
          of_lhs ? (lhs_transposed ? grouped_product(others, rhs_transposed, gradients, true)
                                   : grouped_product(gradients, false, others, !rhs_transposed))
                 : (rhs_transposed ? grouped_product(gradients, true, others, lhs_transposed)
                                   : grouped_product(others, !lhs_transposed, gradients, false));
      for (size_t i = 0; i < parts.size(); ++i) result[wanted_at[i]] = parts[i];
    }
    for (size_t i = 0; i < biased.size(); ++i) {
      const auto& grad = grads[static_cast<size_t>(biased[i])];
      const auto& bias = saved[2 * count + i];
      if (grad.defined() && ctx->needs_input_grad(2 * count + i)) {
        result[2 * count + i] = grad.sum(0).to(bias.scalar_type());
      }
    }
    return result;
  }
};

std::vector<Tensor> grouped_gemm_autograd(at::TensorList lhs, at::TensorList rhs,
                                          const OptionalTensors& biases,
                                          at::TensorList lhs_scale_inv,
                                          at::TensorList rhs_scale_inv, int64_t mode,
                                          bool lhs_transposed, bool rhs_transposed,
                                          bool use_split_accumulator, bool scales_swizzled,
                                          std::optional<at::ScalarType> out_dtype) {
  const GroupedOptions options{
      mode, lhs_transposed, rhs_transposed, use_split_accumulator, scales_swizzled, out_dtype};
  const auto any_needs = [](at::TensorList tensors) {
    return std::any_of(tensors.begin(), tensors.end(), needs_autograd);
  };
  std::vector<Tensor> present;
  std::vector<int64_t> biased;
  for (size_t i = 0; i < biases.size(); ++i) {
    const auto bias = biases.get(i);
    if (!bias || !bias->defined()) continue;
    present.push_back(*bias);
    biased.push_back(static_cast<int64_t>(i));
  }
  if (!any_needs(lhs) && !any_needs(rhs) && !any_needs(present)) {
    const BelowAutograd guard;
    return call_grouped_gemm(lhs, rhs, biases, lhs_scale_inv, rhs_scale_inv, options);
  }
  check_list("biases", biases.size(), lhs.size(), true);
  return GroupedGemm::apply(lhs, rhs, at::TensorList(present), biased, lhs_scale_inv.vec(),
                            rhs_scale_inv.vec(), options);
}

template <c10::DeviceType kDevice>
std::vector<Tensor> grouped_gemm_autocast(at::TensorList lhs, at::TensorList rhs,
                                          const OptionalTensors& biases,
                                          at::TensorList lhs_scale_inv,
                                          at::TensorList rhs_scale_inv, int64_t mode,
                                          bool lhs_transposed, bool rhs_transposed,
                                          bool use_split_accumulator, bool scales_swizzled,
                                          std::optional<at::ScalarType> out_dtype) {
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  const c10::impl::ExcludeDispatchKeyGuard below{
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice)};
  const auto cast = [&](const Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, kDevice);
  };
  auto left = lhs.vec();
  auto right = rhs.vec();
  if (mode == 0) {
    std::transform(left.begin(), left.end(), left.begin(), cast);
    std::transform(right.begin(), right.end(), right.begin(), cast);
  } else if (!out_dtype) {
    out_dtype = dtype;
  }
  OptionalTensors cast_biases;
  for (size_t i = 0; i < biases.size(); ++i) {
    const auto bias = biases.get(i);
    cast_biases.push_back(bias ? std::optional(cast(*bias)) : std::nullopt);
  }
  return call_grouped_gemm(
      left, right, cast_biases, lhs_scale_inv, rhs_scale_inv,
      {mode, lhs_transposed, rhs_transposed, use_split_accumulator, scales_swizzled, out_dtype});
}

}  // namespace
}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS(
    "grouped_gemm(Tensor[] lhs, Tensor[] rhs, Tensor?[] biases, Tensor[] lhs_scale_inv,"
    " Tensor[] rhs_scale_inv, int scaling_mode=0, bool lhs_transposed=False,"
    " bool rhs_transposed=False, bool use_split_accumulator=False, bool scales_swizzled=False,"
    " ScalarType? out_dtype=None) -> Tensor[]")

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("grouped_gemm", torch_overlap::ops::grouped_gemm_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) { m.impl("grouped_gemm", torch_overlap::ops::grouped_gemm_meta); }

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("grouped_gemm", torch_overlap::ops::grouped_gemm_autograd);
}

TORCH_OVERLAP_KERNELS(AutocastCPU, m) {
  m.impl("grouped_gemm", torch_overlap::ops::grouped_gemm_autocast<at::kCPU>);
}

TORCH_OVERLAP_KERNELS(AutocastCUDA, m) {
  m.impl("grouped_gemm", torch_overlap::ops::grouped_gemm_autocast<at::kCUDA>);
}
