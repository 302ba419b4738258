#include "torch_overlap/mesh/propagate.h"

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/mesh/propagate_search.h"

namespace torch_overlap::mesh {
namespace {

void check(const OpRule& rule, const std::vector<Layout>& inputs,
           const std::vector<int64_t>& element_sizes, const PropagateOptions& options) {
  TORCH_OVERLAP_CHECK(!inputs.empty() && inputs.size() == rule.inputs.size(), kValue, rule.op,
                      ": expected ", rule.inputs.size(), " input layouts, got ", inputs.size());
  TORCH_OVERLAP_CHECK(inputs.size() <= 64, kUnsupported, rule.op,
                      ": expected at most 64 inputs, got ", inputs.size());
  TORCH_OVERLAP_CHECK(element_sizes.size() == rule.inputs.size() + rule.outputs.size(), kValue,
                      rule.op, ": expected ", rule.inputs.size() + rule.outputs.size(),
                      " element sizes, inputs first, got ", element_sizes.size());
  for (const auto* list : {&options.wanted, &options.suggested}) {
    TORCH_OVERLAP_CHECK(list->empty() || list->size() == rule.outputs.size(), kValue, rule.op,
                        ": expected ", rule.outputs.size(),
                        " wanted or suggested layouts, or none, got ", list->size());
  }
  const auto check_one = [&](const Layout& layout, const Operand& operand) {
    TORCH_OVERLAP_CHECK(layout.mesh() == inputs[0].mesh(), kValue, rule.op,
                        ": expected operands on one mesh, got ", inputs[0].mesh().str(), " and ",
                        layout.mesh().str());
    check_shape(rule.op, layout, operand.shape);
  };
  for (size_t i = 0; i < inputs.size(); ++i) check_one(inputs[i], rule.inputs[i]);
  for (const auto* list : {&options.wanted, &options.suggested}) {
    for (size_t i = 0; i < list->size(); ++i) {
      if ((*list)[i]) check_one(*(*list)[i], rule.outputs[i]);
    }
  }
}

}  // namespace

double local_seconds(const OpRule& rule, const std::vector<AxisList>& by_factor,
                     const std::vector<int64_t>& element_sizes, const CostModel& cost) {
  const auto local = [&](const std::vector<int32_t>& factors) {
    double product = 1;
    for (const int32_t f : factors) {
      const auto i = static_cast<size_t>(f);
      product *= static_cast<double>(largest_chunk(rule.factors[i].size, by_factor[i]));
    }
    return product;
  };
  if (rule.compute == Compute::kNone) return 0;
  if (rule.compute == Compute::kProduct) {
    const double batch = local(rule.batch);
    return rule.products * cost.matmul(batch * local(rule.rows), local(rule.columns),
                                       local(rule.inner), element_sizes[0]);
  }
  double bytes = 0;
  size_t at = 0;
  for (const auto* operands : {&rule.inputs, &rule.outputs}) {
    for (const Operand& operand : *operands) {
      double elements = 1;
      for (const auto& dim : operand.dims) elements *= local(dim);
      bytes += elements * static_cast<double>(element_sizes[at++]);
    }
  }
  return cost.elementwise(bytes);
}

Propagation propagate(const OpRule& rule, const std::vector<Layout>& inputs,
                      const std::vector<int64_t>& element_sizes, const CostModel& cost,
                      const PropagateOptions& options) {
  check(rule, inputs, element_sizes, options);
  std::vector<Strategy> strategies = find_strategies(rule, inputs, element_sizes, cost, options);
  Propagation out{strategies.front(), {}, std::move(strategies), rule.str()};
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto plan = [&](const Layout& from) {
      return plan_reshard(from, out.chosen.inputs[i], rule.inputs[i].shape, element_sizes[i], cost);
    };
    const bool is_free = (options.free_inputs >> i & 1U) != 0;
    Plan best = plan(is_free ? out.chosen.inputs[i] : inputs[i]);
    if (!is_free && i < options.also.size()) {
      for (const Layout& other : options.also[i]) {
        Plan from_other = plan(other);
        if (from_other.seconds() < best.seconds()) best = std::move(from_other);
      }
    }
    out.plans.push_back(std::move(best));
  }
  return out;
}

std::string Propagation::explain() const {
  std::string out = concat(rule, ": ", chosen.roles, ", ", show_seconds(seconds()), "\n");
  for (size_t i = 0; i < plans.size(); ++i) {
    if (!plans[i].steps.empty()) out += concat("  input ", i, ": ", plans[i].explain());
  }
  constexpr size_t kMaxShown = 6;
  for (size_t i = 0; i < std::min(strategies.size(), kMaxShown); ++i) {
    const Strategy& s = strategies[i];
    out += concat(i == 0 ? "  chosen " : "  over   ", s.roles, ": ", show_seconds(s.seconds()),
                  " (inputs ", show_seconds(s.reshard), ", operator ", show_seconds(s.compute),
                  ", outputs ", show_seconds(s.after), ")\n");
  }
  if (strategies.size() > kMaxShown) {
    out += concat("  and ", strategies.size() - kMaxShown, " more\n");
  }
  return out;
}

}  // namespace torch_overlap::mesh
