#include "torch_overlap/mesh/rule.h"

#include <map>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/mesh/rule_builder.h"

namespace torch_overlap::mesh {
namespace {

std::string operand_string(const OpRule& rule, const Operand& operand) {
  std::string out;
  for (const auto& dim : operand.dims) {
    if (!out.empty()) out += ' ';
    std::string names;
    for (const int32_t f : dim) {
      const Factor& factor = rule.factors[static_cast<size_t>(f)];
      if (!names.empty()) names += ' ';
      names += factor.name;
      if (factor.kind == FactorKind::kWhole) names += '!';
      if (factor.kind == FactorKind::kReduced) {
        names += '+';
        if (factor.reduce != ReduceKind::kSum) names += to_string(factor.reduce);
      }
    }
    out += dim.empty() ? "1" : dim.size() == 1 ? names : concat("(", names, ")");
  }
  return out.empty() ? "()" : out;
}

// --- The text of an equation --------------------------------------------------------------------

constexpr int64_t kUnknown = -1;  // size of a factor before any shape gives it

struct Name {
  std::string text;
  bool is_whole = false;
};
using Dim = std::vector<Name>;

std::vector<Dim> read_operand(std::string_view op, std::string_view text) {
  std::vector<Dim> dims;
  bool inside = false;
  std::string word;
  const auto finish = [&] {
    if (word.empty()) return;
    Name name{word, word.back() == '!'};
    if (name.is_whole) name.text.pop_back();
    if (!inside) dims.emplace_back();
    if (name.text != "1") dims.back().push_back(name);
    word.clear();
  };
  for (const char c : text) {
    if (c == '(' || c == ')') {
      finish();
      TORCH_OVERLAP_CHECK(inside == (c == ')'), kValue, op, ": expected brackets in pairs, got '",
                          text, "'");
      inside = c == '(';
      if (inside) dims.emplace_back();
    } else if (c == ' ') {
      finish();
    } else {
      word += c;
    }
  }
  finish();
  TORCH_OVERLAP_CHECK(!inside, kValue, op, ": expected brackets in pairs, got '", text, "'");
  return dims;
}

}  // namespace

std::string OpRule::str() const {
  std::string out = concat(op, ": ");
  for (size_t i = 0; i < inputs.size(); ++i) {
    out += concat(i == 0 ? "" : ", ", operand_string(*this, inputs[i]));
  }
  out += " ->";
  for (size_t i = 0; i < outputs.size(); ++i) {
    out += concat(i == 0 ? " " : ", ", operand_string(*this, outputs[i]));
  }
  return out;
}

int32_t RuleBuilder::factor(std::string name, int64_t size, FactorKind kind, ReduceKind reduce) {
  rule_.factors.push_back({std::move(name), size, kind, reduce});
  return static_cast<int32_t>(rule_.factors.size() - 1);
}

std::vector<int32_t> RuleBuilder::dim(std::string name, int64_t size, FactorKind kind,
                                      ReduceKind reduce) {
  if (size == 1) return {};
  return {factor(std::move(name), size, kind, reduce)};
}

OpRule einsum_rule(std::string_view op, std::string_view equation,
                   const std::vector<Shape>& inputs) {
  const size_t arrow = equation.find("->");
  TORCH_OVERLAP_CHECK(arrow != std::string_view::npos, kValue, op,
                      ": expected an equation as in m k, k n -> m n, got '", equation, "'");
  RuleBuilder builder{std::string(op)};
  OpRule& rule = builder.rule();
  std::map<std::string, int32_t> ids;
  const auto id = [&](const Name& name) {
    const auto found = ids.find(name.text);
    if (found != ids.end()) return found->second;
    const int32_t made = builder.factor(name.text, kUnknown,
                                        name.is_whole ? FactorKind::kWhole : FactorKind::kReduced);
    return ids.emplace(name.text, made).first->second;
  };
  const auto read_side = [&](std::string_view text, std::vector<Operand>& operands,
                             bool is_output) {
    for (const std::string& part : split_string(text, ',')) {
      Operand operand;
      for (const Dim& names : read_operand(op, part)) {
        operand.dims.emplace_back();
        for (const Name& name : names) {
          operand.dims.back().push_back(id(name));
          Factor& factor = rule.factors[static_cast<size_t>(operand.dims.back().back())];
          if (name.is_whole) factor.kind = FactorKind::kWhole;
          if (is_output && factor.kind == FactorKind::kReduced) factor.kind = FactorKind::kParallel;
        }
      }
      operands.push_back(std::move(operand));
    }
  };
  read_side(equation.substr(0, arrow), rule.inputs, false);
  read_side(equation.substr(arrow + 2), rule.outputs, true);
  TORCH_OVERLAP_CHECK(rule.inputs.size() == inputs.size(), kValue, op, ": expected ",
                      rule.inputs.size(), " inputs for '", equation, "', got ", inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    Operand& operand = rule.inputs[i];
    operand.shape = inputs[i];
    TORCH_OVERLAP_CHECK(operand.dims.size() == inputs[i].size(), kValue, op, ": expected ",
                        operand.dims.size(), " dimensions in input ", i, " for '", equation,
                        "', got ", list_string(inputs[i]));
    for (size_t d = 0; d < operand.dims.size(); ++d) {
      if (operand.dims[d].size() != 1) continue;
      Factor& factor = rule.factors[static_cast<size_t>(operand.dims[d][0])];
      TORCH_OVERLAP_CHECK(factor.size == kUnknown || factor.size == inputs[i][d], kValue, op,
                          ": expected size ", factor.size, " for '", factor.name, "', got ",
                          list_string(inputs[i]), " as input ", i);
      factor.size = inputs[i][d];
    }
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (size_t d = 0; d < inputs[i].size(); ++d) {
      int64_t product = 1;
      Factor* unknown = nullptr;
      for (const int32_t f : rule.inputs[i].dims[d]) {
        Factor& factor = rule.factors[static_cast<size_t>(f)];
        if (factor.size == kUnknown) {
          TORCH_OVERLAP_CHECK(unknown == nullptr, kValue, op,
                              ": expected at most one unknown size ", "in dimension ", d,
                              " of input ", i, ", got two in '", equation, "'");
          unknown = &factor;
        } else {
          product *= factor.size;
        }
      }
      if (unknown != nullptr) {
        unknown->size = product > 0 ? inputs[i][d] / product : 0;
        product *= unknown->size;
      }
      TORCH_OVERLAP_CHECK(product == inputs[i][d], kValue, op, ": expected size ", product,
                          " in dimension ", d, " of input ", i, " for '", equation, "', got ",
                          list_string(inputs[i]));
    }
  }
  for (Operand& operand : rule.outputs) {
    for (const auto& dim : operand.dims) {
      int64_t product = 1;
      for (const int32_t f : dim) {
        const Factor& factor = rule.factors[static_cast<size_t>(f)];
        TORCH_OVERLAP_CHECK(factor.size != kUnknown, kValue, op, ": expected '", factor.name,
                            "' in an input of '", equation, "'");
        product *= factor.size;
      }
      operand.shape.push_back(product);
    }
  }
  return builder.take();
}

}  // namespace torch_overlap::mesh
