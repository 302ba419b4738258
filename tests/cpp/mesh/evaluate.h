#pragma once

#include <functional>
#include <vector>

#include "mesh/draws.h"
#include "torch_overlap/mesh/rule.h"
#include "torch_overlap/mesh/simulate.h"

// Evaluates an operator by its rule only, on whole arrays or on the parts of a rank: the reference
// for propagated layouts.

namespace torch_overlap::mesh::testing {

using Body = std::function<double(const std::vector<double>&)>;  // one element of each input

// out[...] = reduce over the reduced factors of body(inputs[...]). The caller applies `addends` of
// the rule. `sizes` are the sizes of the factors, which may be those of parts.
inline Array evaluate(const OpRule& rule, const std::vector<Array>& inputs, const Body& body,
                      const std::vector<int64_t>& sizes) {
  std::vector<int64_t> at(sizes.size(), 0);
  const auto offset = [&](const Operand& operand) {
    int64_t out = 0;
    for (const auto& dim : operand.dims) {
      int64_t size = 1;
      int64_t place = 0;
      for (const int32_t f : dim) {
        size *= sizes[static_cast<size_t>(f)];
        place = place * sizes[static_cast<size_t>(f)] + at[static_cast<size_t>(f)];
      }
      out = out * size + place;
    }
    return static_cast<size_t>(out);
  };
  Array out;
  int64_t total = 1;
  for (const auto& dim : rule.outputs[0].dims) {
    int64_t size = 1;
    for (const int32_t f : dim) size *= sizes[static_cast<size_t>(f)];
    out.shape.push_back(size);
    total *= size;
  }
  ReduceKind kind = ReduceKind::kSum;
  for (const Factor& factor : rule.factors) {
    if (factor.kind == FactorKind::kReduced) kind = factor.reduce;
  }
  const double neutral = kind == ReduceKind::kMax ? -1e300 : kind == ReduceKind::kProduct ? 1 : 0;
  out.data.assign(static_cast<size_t>(total), neutral);
  for (const int64_t size : sizes) {
    if (size == 0) return out;
  }
  while (true) {
    std::vector<double> values;
    for (size_t i = 0; i < inputs.size(); ++i) {
      values.push_back(inputs[i].data.at(offset(rule.inputs[i])));
    }
    double& result = out.data.at(offset(rule.outputs[0]));
    const double value = body(values);
    if (kind == ReduceKind::kMax) result = std::max(result, value);
    if (kind == ReduceKind::kProduct) result *= value;
    if (kind == ReduceKind::kSum) result += value;
    size_t f = sizes.size();
    while (f > 0 && ++at[f - 1] == sizes[f - 1]) at[--f] = 0;
    if (f == 0) return out;
  }
}

// Returns the sizes of the factors on one rank: those of its parts under these layouts.
inline std::vector<int64_t> local_sizes(const OpRule& rule, const std::vector<Layout>& inputs,
                                        const std::vector<Layout>& outputs, int64_t index) {
  std::vector<int64_t> sizes;
  for (const Factor& factor : rule.factors) sizes.push_back(factor.size);
  const auto read = [&](const Operand& operand, const Layout& layout) {
    for (size_t d = 0; d < operand.dims.size(); ++d) {
      AxisList rest = layout.dims()[d];
      for (const int32_t f : operand.dims[d]) {
        // The leading axes that fill the factor are its axes.
        std::vector<int64_t> cuts;
        std::vector<int64_t> coordinates;
        int64_t filled = 1;
        const bool is_last = f == operand.dims[d].back();
        while (!rest.empty() && (is_last || filled < rule.factors[static_cast<size_t>(f)].size)) {
          cuts.push_back(rest.front().size);
          coordinates.push_back(layout.mesh().coordinate_at(index, rest.front()));
          filled *= rest.front().size;
          rest.erase(rest.begin());
        }
        if (cuts.empty()) continue;
        sizes[static_cast<size_t>(f)] =
            chunk(rule.factors[static_cast<size_t>(f)].size, cuts, coordinates).size;
      }
    }
  };
  for (size_t i = 0; i < inputs.size(); ++i) read(rule.inputs[i], inputs[i]);
  for (size_t i = 0; i < outputs.size(); ++i) read(rule.outputs[i], outputs[i]);
  return sizes;
}

inline Array random_array(Draw& draw, const Shape& shape) {
  Array out{shape, {}};
  for (int64_t i = 0; i < num_elements(shape); ++i) {
    out.data.push_back(static_cast<double>(draw.number(-8, 8)));  // exact in any order
  }
  return out;
}

}  // namespace torch_overlap::mesh::testing
