#include <algorithm>
#include <unordered_map>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/mesh/propagate.h"
#include "torch_overlap/mesh/propagate_search.h"

namespace torch_overlap::mesh {
namespace {

// Marks the factors that share a dimension with others: they must be split evenly.
std::vector<bool> factors_cut_evenly(const OpRule& rule) {
  std::vector<bool> out(rule.factors.size(), false);
  for (const auto* operands : {&rule.inputs, &rule.outputs}) {
    for (const Operand& operand : *operands) {
      for (const auto& dim : operand.dims) {
        if (dim.size() < 2) continue;
        for (const int32_t f : dim) out[static_cast<size_t>(f)] = true;
      }
    }
  }
  return out;
}

class Search {
 public:
  Search(const OpRule& rule, const std::vector<Layout>& inputs,
         const std::vector<int64_t>& element_sizes, const CostModel& cost,
         const PropagateOptions& options)
      : rule_(rule),
        inputs_(inputs),
        element_sizes_(element_sizes),
        cost_(cost),
        options_(options),
        must_be_even_(factors_cut_evenly(rule)) {
    collect_units();
    collect_roles();
    collect_orders();
  }

  // Returns all valid combinations, cheapest first.
  std::vector<Strategy> run() {
    size_t count = 1;
    for (const auto& roles : roles_)
      count = std::min(count * roles.size(), options_.max_strategies + 1);
    std::vector<size_t> choice(units_.size(), 0);
    if (count <= options_.max_strategies) {
      while (true) {
        try_roles(choice);
        size_t u = 0;
        while (u < choice.size() && ++choice[u] == roles_[u].size()) choice[u++] = 0;
        if (u == choice.size()) break;
      }
    } else {
      coordinate_descent();
    }
    sort();
    return std::move(strategies_);
  }

 private:
  // Returns the wanted or suggested layout of an output, or null.
  const Layout* suggested(size_t output) const {
    for (const auto* list : {&options_.wanted, &options_.suggested}) {
      if (output < list->size() && (*list)[output]) return &*(*list)[output];
    }
    return nullptr;
  }

  bool is_free(size_t input) const { return (options_.free_inputs >> input & 1U) != 0; }

  // Collects the units: each is an axis, or a part of one that some operand uses by itself.
  void collect_units() {
    const auto add = [&](const AxisRef& ref) {
      if (std::find(units_.begin(), units_.end(), ref) == units_.end()) {
        units_.push_back(ref);
      }
    };
    const auto add_all = [&](const Layout& layout) {
      for (const AxisList& axes : layout.dims()) std::for_each(axes.begin(), axes.end(), add);
      for (const Partial& p : layout.partial()) add(p.axis);
    };
    for (const Layout& layout : inputs_) add_all(layout);
    for (size_t i = 0; i < rule_.outputs.size(); ++i) {
      if (const Layout* layout = suggested(i)) add_all(*layout);
    }
    if (options_.explore && !inputs_.empty()) {
      for (const Axis& axis : inputs_[0].mesh().axes()) {
        const AxisRef whole = inputs_[0].mesh().axis(axis.name);
        if (whole.size == 1) continue;
        const bool is_cut = std::any_of(units_.begin(), units_.end(),
                                        [&](const AxisRef& unit) { return overlap(unit, whole); });
        if (!is_cut) add(whole);
      }
    }
    std::sort(units_.begin(), units_.end());
  }

  void collect_roles() {
    roles_.resize(units_.size());
    for (size_t u = 0; u < units_.size(); ++u) {
      for (size_t i = 0; i < rule_.outputs.size(); ++i) {
        if (const Layout* layout = suggested(i)) suggest(u, rule_.outputs[i], *layout);
      }
      for (size_t i = 0; i < inputs_.size(); ++i) suggest(u, rule_.inputs[i], inputs_[i]);
      if (options_.explore && units_[u].size > 1) {
        for (size_t f = 0; f < rule_.factors.size(); ++f) {
          const Factor& factor = rule_.factors[f];
          if (factor.kind == FactorKind::kWhole || factor.size % units_[u].size != 0) continue;
          add_role(u, Role{{{static_cast<int32_t>(f), units_[u]}}});
        }
      }
      for (size_t i = 0; i < inputs_.size(); ++i) suggest_partial(u, i);
      add_role(u, Role{});
    }
  }

  void add_role(size_t unit, Role role) {
    auto& roles = roles_[unit];
    if (std::find(roles.begin(), roles.end(), role) == roles.end())
      roles.push_back(std::move(role));
  }

  void suggest(size_t unit, const Operand& operand, const Layout& layout) {
    for (size_t d = 0; d < layout.num_dims(); ++d) {
      const AxisList& axes = layout.dims()[d];
      if (std::find(axes.begin(), axes.end(), units_[unit]) == axes.end()) continue;
      Role role;
      for (const auto& [factor, ref] : axes_on_factors(rule_, operand.dims[d], axes)) {
        const AxisRef& unit_ref = units_[unit];
        if (ref.axis == unit_ref.axis && ref.pre >= unit_ref.pre &&
            int64_t{ref.pre} * ref.size <= int64_t{unit_ref.pre} * unit_ref.size) {
          role.factors.emplace_back(factor, ref);
        }
      }
      if (!role.factors.empty()) add_role(unit, std::move(role));
      // The axis by itself may fit where it does not fit after the axes before it.
      Role alone{axes_on_factors(rule_, operand.dims[d], {units_[unit]})};
      if (!alone.factors.empty()) add_role(unit, std::move(alone));
      for (const int32_t f : operand.dims[d]) suggest_major(unit, f);
    }
  }

  // A factor that is not the first of a joined dimension is rarely useful; suggests the first one,
  // too.
  void suggest_major(size_t unit, int32_t factor) {
    for (const auto* operands : {&rule_.inputs, &rule_.outputs}) {
      for (const Operand& operand : *operands) {
        for (const auto& dim : operand.dims) {
          if (dim.size() < 2 || dim[0] == factor) continue;
          if (std::find(dim.begin(), dim.end(), factor) == dim.end()) continue;
          const Factor& major = rule_.factors[static_cast<size_t>(dim[0])];
          if (major.kind == FactorKind::kWhole || major.size % units_[unit].size != 0) continue;
          add_role(unit, Role{{{dim[0], units_[unit]}}});
        }
      }
    }
  }

  void suggest_partial(size_t unit, size_t input) {
    for (const Partial& p : inputs_[input].partial()) {
      if (!(p.axis == units_[unit])) continue;
      for (size_t i = 0; i < rule_.patterns.size(); ++i) {
        const PartialPattern& pattern = rule_.patterns[i];
        if ((pattern.inputs >> input & 1U) == 0) continue;
        if ((pattern.kinds >> static_cast<unsigned>(p.kind) & 1U) == 0) continue;
        add_role(unit, Role{{}, static_cast<int32_t>(i), p.kind});
      }
    }
  }

  // Axes that share a factor keep the order that they have in an operand.
  void collect_orders() {
    order_.resize(rule_.factors.size());
    const auto read = [&](const Operand& operand, const Layout& layout) {
      for (size_t d = 0; d < layout.num_dims(); ++d) {
        for (const auto& [factor, ref] :
             axes_on_factors(rule_, operand.dims[d], layout.dims()[d])) {
          AxisList& order = order_[static_cast<size_t>(factor)];
          if (std::find(order.begin(), order.end(), ref) == order.end()) order.push_back(ref);
        }
      }
    };
    for (size_t i = 0; i < rule_.outputs.size(); ++i) {
      if (const Layout* layout = suggested(i)) read(rule_.outputs[i], *layout);
    }
    std::vector<size_t> by_size(inputs_.size());
    for (size_t i = 0; i < by_size.size(); ++i) by_size[i] = i;
    std::stable_sort(by_size.begin(), by_size.end(), [&](size_t a, size_t b) {
      return num_elements(rule_.inputs[a].shape) * element_sizes_[a] >
             num_elements(rule_.inputs[b].shape) * element_sizes_[b];
    });
    for (const size_t i : by_size) read(rule_.inputs[i], inputs_[i]);
  }

  // Changes one axis at a time, round after round, until nothing improves. Used for meshes of many
  // axes.
  void coordinate_descent() {
    std::vector<size_t> best(units_.size());
    for (size_t u = 0; u < units_.size(); ++u) best[u] = roles_[u].size() - 1;
    double seconds = try_roles(best).value_or(0);
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t u = 0; u < units_.size(); ++u) {
        std::vector<size_t> choice = best;
        for (size_t r = 0; r < roles_[u].size(); ++r) {
          choice[u] = r;
          const std::optional<double> now = try_roles(choice);
          if (now && *now < seconds) {
            seconds = *now;
            best = choice;
            changed = true;
          }
        }
      }
    }
  }

  // Adds the strategy of these roles if they are compatible.
  std::optional<double> try_roles(const std::vector<size_t>& choice) {
    std::vector<AxisList> by_factor(rule_.factors.size());
    std::vector<const Role*> pending(units_.size(), nullptr);
    AxisList used;
    for (size_t u = 0; u < units_.size(); ++u) {
      const Role& role = roles_[u][choice[u]];
      if (role.factors.empty() && role.pattern < 0) continue;
      for (const AxisRef& other : used) {
        if (overlap(other, units_[u])) return std::nullopt;
      }
      used.push_back(units_[u]);
      if (role.pattern >= 0) pending[u] = &role;
      for (const auto& [factor, ref] : role.factors) {
        by_factor[static_cast<size_t>(factor)].push_back(ref);
      }
    }
    for (size_t f = 0; f < by_factor.size(); ++f) {
      if (by_factor[f].empty()) continue;
      if (must_be_even_[f] && rule_.factors[f].size % size_of(by_factor[f]) != 0)
        return std::nullopt;
      const AxisList& order = order_[f];
      const auto place = [&](const AxisRef& ref) {
        return std::find(order.begin(), order.end(), ref) - order.begin();
      };
      std::stable_sort(by_factor[f].begin(), by_factor[f].end(),
                       [&](const AxisRef& a, const AxisRef& b) { return place(a) < place(b); });
    }
    std::vector<Partial> reduced;
    for (size_t f = 0; f < by_factor.size(); ++f) {
      if (rule_.factors[f].kind != FactorKind::kReduced) continue;
      for (const AxisRef& ref : by_factor[f]) reduced.push_back({ref, rule_.factors[f].reduce});
    }
    return add(by_factor, pending, reduced, used, choice);
  }

  std::optional<double> add(const std::vector<AxisList>& by_factor,
                            const std::vector<const Role*>& pending,
                            const std::vector<Partial>& reduced, const AxisList& used,
                            const std::vector<size_t>& choice) {
    Strategy strategy;
    std::vector<Partial> out_partial = reduced;
    for (size_t u = 0; u < units_.size(); ++u) {
      if (pending[u] != nullptr) out_partial.push_back({units_[u], pending[u]->kind});
    }
    if (!commute(out_partial)) return std::nullopt;
    const AxisList invariant = invariant_axes(used);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const auto dims = dims_of(rule_.inputs[i], by_factor);
      if (!dims) return std::nullopt;
      std::vector<Partial> partial;
      for (size_t u = 0; u < units_.size(); ++u) {
        if (pending[u] == nullptr) continue;
        const auto& pattern = rule_.patterns[static_cast<size_t>(pending[u]->pattern)];
        if ((pattern.inputs >> i & 1U) != 0) partial.push_back({units_[u], pending[u]->kind});
      }
      if ((rule_.addend_inputs >> i & 1U) != 0) {
        partial.insert(partial.end(), reduced.begin(), reduced.end());
      }
      strategy.inputs.emplace_back(inputs_[i].mesh(), *dims, std::move(partial), invariant);
    }
    for (const Operand& output : rule_.outputs) {
      const auto dims = dims_of(output, by_factor);
      if (!dims) return std::nullopt;
      strategy.outputs.emplace_back(inputs_[0].mesh(), *dims, out_partial, invariant);
    }
    for (size_t i = 0; i < inputs_.size(); ++i) strategy.reshard += reshard(i, strategy.inputs[i]);
    strategy.compute = local_seconds(rule_, by_factor, element_sizes_, cost_);
    for (size_t i = 0; i < strategy.outputs.size(); ++i) {
      strategy.after += after(i, strategy.outputs[i]);
    }
    for (size_t i = 0; i < inputs_.size(); ++i) {
      strategy.partial_gradient_axes.push_back(
          find_partial_gradient_axes(i, strategy.inputs[i], used));
      strategy.gradients += gradient(i, strategy.inputs[i], strategy.partial_gradient_axes.back());
    }
    strategy.roles = describe(choice);
    strategies_.push_back(std::move(strategy));
    return strategies_.back().seconds(options_.training);
  }

  static bool commute(const std::vector<Partial>& partial) {
    const auto is_linear = [](ReduceKind kind) {
      return (kLinearKinds >> static_cast<unsigned>(kind) & 1U) != 0;
    };
    return std::all_of(partial.begin(), partial.end(), [&](const Partial& p) {
      return p.kind == partial.front().kind ||
             (is_linear(p.kind) && is_linear(partial.front().kind));
    });
  }

  // Returns nullopt if the factors of one dimension are split such that its parts are not
  // contiguous.
  std::optional<std::vector<AxisList>> dims_of(const Operand& operand,
                                               const std::vector<AxisList>& by_factor) const {
    std::vector<AxisList> out(operand.dims.size());
    for (size_t d = 0; d < operand.dims.size(); ++d) {
      bool is_full = true;  // true if all factors before are split into single elements
      for (const int32_t f : operand.dims[d]) {
        const AxisList& axes = by_factor[static_cast<size_t>(f)];
        if (size_of(axes) > 1 && !is_full) return std::nullopt;
        is_full = is_full && size_of(axes) == rule_.factors[static_cast<size_t>(f)].size;
        out[d].insert(out[d].end(), axes.begin(), axes.end());
      }
    }
    return out;
  }

  // An axis that no operand uses is invariant for the outputs if it is invariant for every input.
  // An input that has to be resharded to it (it was sharded or partial) can become what the others
  // are. Otherwise gradients along the axis are partial, and no input stays invariant.
  AxisList invariant_axes(const AxisList& used) const {
    AxisList candidates = units_;
    for (const Layout& input : inputs_) {
      candidates.insert(candidates.end(), input.invariant().begin(), input.invariant().end());
    }
    AxisList out;
    for (const AxisRef& ref : candidates) {
      const auto shares = [&](const AxisRef& other) { return overlap(ref, other); };
      if (std::any_of(used.begin(), used.end(), shares)) continue;
      if (std::any_of(out.begin(), out.end(), shares)) continue;
      const bool everywhere = std::all_of(inputs_.begin(), inputs_.end(), [&](const Layout& input) {
        const AxisList& axes = input.invariant();
        return input.uses(ref) || std::find(axes.begin(), axes.end(), ref) != axes.end();
      });
      if (everywhere) out.push_back(ref);
    }
    return out;
  }

  double reshard(size_t input, const Layout& needed) {
    if (is_free(input) || needed == inputs_[input]) return 0;
    auto& known = reshard_seconds_cache_[input];
    const auto found = known.find(needed.hash());
    if (found != known.end() && found->second.first == needed) return found->second.second;
    const auto from = [&](const Layout& layout) {
      return reshard_seconds(layout, needed, rule_.inputs[input].shape, element_sizes_[input],
                             cost_);
    };
    double seconds = from(inputs_[input]);
    if (input < options_.also.size()) {
      for (const Layout& other : options_.also[input]) seconds = std::min(seconds, from(other));
    }
    known.insert_or_assign(needed.hash(), std::pair(needed, seconds));
    return seconds;
  }

  // Returns the axes along which the gradient of an input is partial: the input was whole, and
  // others were not.
  AxisList find_partial_gradient_axes(size_t input, const Layout& needed,
                                      const AxisList& used) const {
    AxisList pending;
    if ((rule_.no_gradient_inputs >> input & 1U) != 0) return pending;
    for (const AxisRef& ref : used) {
      if (!needed.uses(ref)) pending.push_back(ref);
    }
    return pending;
  }

  double gradient(size_t input, const Layout& needed, AxisList pending) const {
    if (input < options_.reduced_gradient_axes.size()) {
      const AxisList& already_reduced = options_.reduced_gradient_axes[input];
      std::erase_if(pending, [&](const AxisRef& ref) {
        return std::find(already_reduced.begin(), already_reduced.end(), ref) !=
               already_reduced.end();
      });
    }
    if (pending.empty()) return 0;
    const double bytes =
        static_cast<double>(num_elements(largest_local_shape(needed, rule_.inputs[input].shape))) *
        static_cast<double>(element_sizes_[input]);
    return cost_.collective(Collective::kAllReduce, needed.mesh().links(pending), bytes);
  }

  double after(size_t output, const Layout& layout) {
    const bool is_wanted = output < options_.wanted.size() && options_.wanted[output];
    if (!is_wanted && !layout.is_partial()) return 0;
    const Layout target = is_wanted ? *options_.wanted[output] : layout.with_partial({});
    if (target == layout) return 0;
    const double seconds = reshard_seconds(layout, target, rule_.outputs[output].shape,
                                           element_sizes_[inputs_.size() + output], cost_);
    return is_wanted ? seconds : kPartialReduceShare * seconds;
  }

  std::string describe(const std::vector<size_t>& choice) const {
    std::string out;
    const Mesh& mesh = inputs_[0].mesh();
    for (size_t u = 0; u < units_.size(); ++u) {
      const Role& role = roles_[u][choice[u]];
      for (const auto& [factor, ref] : role.factors) {
        out += concat(out.empty() ? "" : ", ", mesh.name(ref), " on ",
                      rule_.factors[static_cast<size_t>(factor)].name);
      }
      if (role.pattern >= 0) {
        out += concat(out.empty() ? "" : ", ", mesh.name(units_[u]), " partial");
      }
    }
    return out.empty() ? "replicated" : out;
  }

  void sort() {
    std::stable_sort(
        strategies_.begin(), strategies_.end(),
        [](const Strategy& a, const Strategy& b) { return a.seconds() < b.seconds(); });
  }

  const OpRule& rule_;
  const std::vector<Layout>& inputs_;
  const std::vector<int64_t>& element_sizes_;
  const CostModel& cost_;
  const PropagateOptions& options_;
  const std::vector<bool> must_be_even_;
  AxisList units_;
  std::vector<std::vector<Role>> roles_;  // per unit
  std::vector<AxisList> order_;           // per factor
  std::unordered_map<size_t, std::unordered_map<size_t, std::pair<Layout, double>>>
      reshard_seconds_cache_;
  std::vector<Strategy> strategies_;
};

}  // namespace

std::vector<std::pair<int32_t, AxisRef>> axes_on_factors(const OpRule& rule,
                                                         const std::vector<int32_t>& dim,
                                                         const AxisList& axes) {
  std::vector<std::pair<int32_t, AxisRef>> out;
  if (dim.empty()) return out;
  const auto factor = [&](size_t i) -> const Factor& {
    return rule.factors[static_cast<size_t>(dim[i])];
  };
  if (dim.size() == 1) {
    if (factor(0).kind == FactorKind::kWhole) return out;
    for (const AxisRef& axis : axes) out.emplace_back(dim[0], axis);
    return out;
  }
  size_t at = 0;
  int64_t left = factor(0).size;
  for (AxisRef axis : axes) {
    if (axis.size == 1) out.emplace_back(dim[at], axis);  // splits nothing
    while (axis.size > 1) {
      while (left == 1 && at + 1 < dim.size()) left = factor(++at).size;
      if (factor(at).kind == FactorKind::kWhole) return out;
      if (left % axis.size == 0) {
        out.emplace_back(dim[at], axis);
        left /= axis.size;
        break;
      }
      if (left <= 1 || axis.size % left != 0) return out;
      out.emplace_back(dim[at], AxisRef{axis.axis, axis.pre, static_cast<int32_t>(left)});
      axis.pre *= static_cast<int32_t>(left);
      axis.size /= static_cast<int32_t>(left);
      left = 1;
    }
  }
  return out;
}

std::vector<Strategy> find_strategies(const OpRule& rule, const std::vector<Layout>& inputs,
                                      const std::vector<int64_t>& element_sizes,
                                      const CostModel& cost, const PropagateOptions& options) {
  return Search(rule, inputs, element_sizes, cost, options).run();
}

}  // namespace torch_overlap::mesh
