#include "torch_overlap/gemm/grouped.h"

#include <algorithm>

#include "torch_overlap/ops/gemm_op.h"
#include "torch_overlap/ops/operator.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kGroupedGemm = "grouped_gemm";

struct GroupedCall {
  using Result = std::vector<Tensor>;
  static constexpr const char* kName = kGroupedGemm.data();
  at::TensorList lhs{};
  at::TensorList rhs{};
  OptionalTensors biases{};
  at::TensorList lhs_scale_inv{};
  at::TensorList rhs_scale_inv{};
  int64_t scaling_mode = 0;
  bool lhs_transposed = false;
  bool rhs_transposed = false;
  bool use_split_accumulator = false;
  bool scales_swizzled = false;
  std::optional<at::ScalarType> out_dtype{};
  TORCH_OVERLAP_FIELDS(lhs, rhs, biases, lhs_scale_inv, rhs_scale_inv, scaling_mode, lhs_transposed,
                       rhs_transposed, use_split_accumulator, scales_swizzled, out_dtype);
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
std::vector<GemmOp> grouped_calls(const GroupedCall& group) {
  const size_t count = group.lhs.size();
  check_list("rhs", group.rhs.size(), count, false);
  check_list("biases", group.biases.size(), count, true);
  const bool scaled = scaling_mode(kGroupedGemm, group.scaling_mode) != ScalingMode::NO_SCALING;
  check_scale_list("lhs_scale_inv", group.lhs_scale_inv.size(), count, scaled);
  check_scale_list("rhs_scale_inv", group.rhs_scale_inv.size(), count, scaled);
  TORCH_OVERLAP_CHECK(!group.out_dtype || c10::elementSize(*group.out_dtype) > 1, kType,
                      kGroupedGemm, ": expected out_dtype of more than 8 bits, got ",
                      *group.out_dtype, "; use gemm for each, which takes their factors");
  std::vector<GemmOp> calls(count);
  for (size_t i = 0; i < count; ++i) {
    check_matrix("lhs", i, group.lhs[i]);
    check_matrix("rhs", i, group.rhs[i]);
    calls[i].lhs = group.lhs[i];
    calls[i].rhs = group.rhs[i];
    if (scaled) {
      calls[i].lhs_scale_inv = group.lhs_scale_inv[i];
      calls[i].rhs_scale_inv = group.rhs_scale_inv[i];
    }
    if (!group.biases.empty()) calls[i].bias = group.biases.get(i);
    calls[i].fuse_bias = calls[i].bias.has_value();
    calls[i].scaling_mode = group.scaling_mode;
    calls[i].lhs_transposed = group.lhs_transposed;
    calls[i].rhs_transposed = group.rhs_transposed;
    calls[i].use_split_accumulator = group.use_split_accumulator;
    calls[i].scales_swizzled = group.scales_swizzled;
    calls[i].out_dtype = group.out_dtype;
  }
  return calls;
}

std::vector<Tensor> grouped_gemm_kernel(const GroupedCall& group) {
  const bool is_meta = std::any_of(group.lhs.begin(), group.lhs.end(),
                                   [](const Tensor& lhs) { return lhs.is_meta(); });
  std::vector<Tensor> outputs;
  std::vector<GemmArgs> products;
  for (const auto& call : grouped_calls(group)) {
    const auto results = empty_gemm_results(call, kGroupedGemm);
    outputs.push_back(std::get<0>(results));
    if (!is_meta) products.push_back(gemm_args(call, results, kGroupedGemm));
  }
  if (!is_meta) torch_overlap::grouped_gemm(kGroupedGemm, products);
  return outputs;
}

std::vector<Tensor> grouped_product(at::TensorList lhs, bool lhs_transposed, at::TensorList rhs,
                                    bool rhs_transposed) {
  return Operator<GroupedCall>::dispatch(
      {.lhs = lhs, .rhs = rhs, .lhs_transposed = lhs_transposed, .rhs_transposed = rhs_transposed});
}

// The gradients of unscaled groups are groups, with the formulas of gemm.
class GroupedGemm : public Function<GroupedGemm> {
 public:
  static constexpr bool is_traceable = true;

  // `biases`: those that exist, of the problems `biased`.
  static variable_list forward(AutogradContext* ctx, at::TensorList lhs, at::TensorList rhs,
                               at::TensorList biases, const std::vector<int64_t>& biased,
                               const GroupedCall& call) {
    const BelowAutograd guard;
    auto outputs = Operator<GroupedCall>::dispatch(call);
    const bool has_gradient = call.scaling_mode == 0;
    ctx->saved_data["has_gradient"] = has_gradient;
    ctx->set_materialize_grads(false);
    if (has_gradient) {
      variable_list saved(lhs.begin(), lhs.end());
      saved.insert(saved.end(), rhs.begin(), rhs.end());
      saved.insert(saved.end(), biases.begin(), biases.end());
      ctx->save_for_backward(std::move(saved));
      ctx->saved_data["count"] = static_cast<int64_t>(lhs.size());
      ctx->saved_data["biased"] = IValue(biased);
      ctx->saved_data["lhs_transposed"] = call.lhs_transposed;
      ctx->saved_data["rhs_transposed"] = call.rhs_transposed;
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
    variable_list result(2 * count + biased.size() + 2);

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

std::vector<Tensor> grouped_gemm_autograd(const GroupedCall& call) {
  const auto any_needs = [](at::TensorList tensors) {
    return std::any_of(tensors.begin(), tensors.end(),
                       [](const Tensor& tensor) { return needs_autograd(tensor); });
  };
  std::vector<Tensor> present;
  std::vector<int64_t> biased;
  for (size_t i = 0; i < call.biases.size(); ++i) {
    const auto bias = optional_at(call.biases, i);
    if (!bias) continue;
    present.push_back(*bias);
    biased.push_back(static_cast<int64_t>(i));
  }
  if (!any_needs(call.lhs) && !any_needs(call.rhs) && !any_needs(present)) {
    const BelowAutograd guard;
    return Operator<GroupedCall>::dispatch(call);
  }
  check_list("biases", call.biases.size(), call.lhs.size(), true);
  return GroupedGemm::apply(call.lhs, call.rhs, at::TensorList(present), biased, call);
}

template <c10::DeviceType kDevice>
std::vector<Tensor> grouped_gemm_autocast(const GroupedCall& call) {
  const Autocast<kDevice> cast;
  auto inner = call;
  std::vector<Tensor> lhs;
  std::vector<Tensor> rhs;
  if (call.scaling_mode == 0) {
    inner.lhs = lhs = cast(call.lhs.vec());
    inner.rhs = rhs = cast(call.rhs.vec());
  } else if (!call.out_dtype) {
    inner.out_dtype = at::autocast::get_autocast_dtype(kDevice);
  }
  inner.biases = cast(call.biases);
  return Operator<GroupedCall>::dispatch(inner);
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) { m.impl<GroupedCall, grouped_gemm_kernel>(); }
TORCH_OVERLAP_AUTOGRAD(GroupedCall, grouped_gemm_autograd)
TORCH_OVERLAP_KERNELS(AutocastCPU, m) { m.impl<GroupedCall, grouped_gemm_autocast<at::kCPU>>(); }
TORCH_OVERLAP_KERNELS(AutocastCUDA, m) { m.impl<GroupedCall, grouped_gemm_autocast<at::kCUDA>>(); }

}  // namespace
}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS(
    "grouped_gemm(Tensor[] lhs, Tensor[] rhs, Tensor?[] biases, Tensor[] lhs_scale_inv,"
    " Tensor[] rhs_scale_inv, int scaling_mode=0, bool lhs_transposed=False,"
    " bool rhs_transposed=False, bool use_split_accumulator=False, bool scales_swizzled=False,"
    " ScalarType? out_dtype=None) -> Tensor[]")
