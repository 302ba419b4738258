// Operators that move elements: reshape, transpose, broadcast, concat, slice, take.

#include <algorithm>
#include <numeric>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/mesh/rule_builder.h"

namespace torch_overlap::mesh {

size_t normal_dim(std::string_view op, int64_t dim, size_t rank) {
  const auto size = static_cast<int64_t>(rank);
  TORCH_OVERLAP_CHECK(dim >= -size && dim < size, kValue, op, ": expected a dimension from ", -size,
                      " to ", size - 1, ", got ", dim);
  return static_cast<size_t>(dim < 0 ? dim + size : dim);
}

std::string dim_name(size_t dim) {
  std::string name(1, static_cast<char>('a' + dim % 26));
  return dim < 26 ? name : concat(name, dim / 26);
}

Shape broadcast_shape(std::string_view op, const std::vector<Shape>& shapes) {
  size_t rank = 0;
  for (const Shape& shape : shapes) rank = std::max(rank, shape.size());
  Shape out(rank, 1);
  for (const Shape& shape : shapes) {
    for (size_t i = 0; i < shape.size(); ++i) {
      int64_t& size = out[rank - shape.size() + i];
      TORCH_OVERLAP_CHECK(size == 1 || shape[i] == 1 || size == shape[i], kValue, op,
                          ": expected shapes that broadcast, got ", list_string(shape), " beside ",
                          size, " in dimension ", rank - shape.size() + i);
      if (shape[i] != 1) size = shape[i];
    }
  }
  return out;
}

std::vector<std::vector<int32_t>> broadcast_dims(const Shape& from, const Shape& to,
                                                 const std::vector<std::vector<int32_t>>& dims) {
  std::vector<std::vector<int32_t>> in;
  const size_t skip = to.size() - from.size();
  for (size_t d = 0; d < from.size(); ++d) {
    in.push_back(from[d] == to[d + skip] ? dims[d + skip] : std::vector<int32_t>());
  }
  return in;
}

OpRule reshape_rule(const Shape& from, const Shape& to) {
  TORCH_OVERLAP_CHECK(num_elements(from) == num_elements(to), kValue, "reshape: expected ",
                      num_elements(from), " elements, got the shape ", list_string(to));
  RuleBuilder builder("reshape");
  std::vector<std::vector<int32_t>> in(from.size());
  std::vector<std::vector<int32_t>> out(to.size());
  int next_name = 0;
  const auto name = [&] { return dim_name(static_cast<size_t>(next_name++)); };
  const auto whole = [&](std::vector<int32_t>& dim, int64_t size) {
    if (size != 1) dim.push_back(builder.factor(name(), size, FactorKind::kWhole));
  };
  // Both sides are split into common factors, major first. If there is no common factor, the
  // dimensions stay whole up to where both sides have equal numbers of elements left.
  size_t i = 0;
  size_t j = 0;
  int64_t unmatched_in = 1;   // rest of dimension i - 1
  int64_t unmatched_out = 1;  // rest of dimension j - 1
  const bool is_empty = num_elements(from) == 0;
  while (!is_empty) {
    while (unmatched_in == 1 && i < from.size()) unmatched_in = from[i++];
    while (unmatched_out == 1 && j < to.size()) unmatched_out = to[j++];
    if (unmatched_in == 1 || unmatched_out == 1) break;
    const int64_t common = std::gcd(unmatched_in, unmatched_out);
    if (common > 1) {
      const int32_t factor = builder.factor(name(), common);
      in[i - 1].push_back(factor);
      out[j - 1].push_back(factor);
      unmatched_in /= common;
      unmatched_out /= common;
      if (unmatched_in == 1 || unmatched_out == 1) continue;
    }
    int64_t remaining_in = unmatched_in;
    int64_t remaining_out = unmatched_out;
    whole(in[i - 1], unmatched_in);
    whole(out[j - 1], unmatched_out);
    while (remaining_in != remaining_out) {
      if (remaining_in < remaining_out) {
        whole(in[i], from[i]);
        remaining_in *= from[i++];
      } else {
        whole(out[j], to[j]);
        remaining_out *= to[j++];
      }
    }
    unmatched_in = unmatched_out = 1;
  }
  if (is_empty) {
    for (size_t d = 0; d < from.size(); ++d) whole(in[d], from[d]);
    for (size_t d = 0; d < to.size(); ++d) whole(out[d], to[d]);
  }
  builder.input(from, std::move(in));
  builder.output(to, std::move(out));
  return builder.take_move();
}

OpRule transpose_rule(const Shape& x, const std::vector<int64_t>& order) {
  RuleBuilder builder("transpose");
  std::vector<std::vector<int32_t>> in;
  for (size_t d = 0; d < x.size(); ++d) in.push_back(builder.dim(dim_name(d), x[d]));
  std::vector<std::vector<int32_t>> out;
  Shape shape;
  std::vector<bool> seen(x.size(), false);
  for (const int64_t item : order) {
    const size_t d = normal_dim("transpose", item, x.size());
    TORCH_OVERLAP_CHECK(!seen[d], kValue, "transpose: expected every dimension once, got ",
                        list_string(order));
    seen[d] = true;
    out.push_back(in[d]);
    shape.push_back(x[d]);
  }
  TORCH_OVERLAP_CHECK(order.size() == x.size(), kValue, "transpose: expected every dimension of ",
                      list_string(x), ", got ", list_string(order));
  builder.input(x, std::move(in));
  builder.output(std::move(shape), std::move(out));
  return builder.take_move();
}

OpRule broadcast_rule(const Shape& from, const Shape& to) {
  TORCH_OVERLAP_CHECK(from.size() <= to.size() && broadcast_shape("broadcast", {from, to}) == to,
                      kValue, "broadcast: expected a shape that ", list_string(from),
                      " broadcasts to, got ", list_string(to));
  RuleBuilder builder("broadcast");
  std::vector<std::vector<int32_t>> out;
  for (size_t d = 0; d < to.size(); ++d) out.push_back(builder.dim(dim_name(d), to[d]));
  builder.input(from, broadcast_dims(from, to, out));
  builder.output(to, std::move(out));
  return builder.take_move();
}

OpRule concat_rule(const std::vector<Shape>& inputs, int64_t dim) {
  TORCH_OVERLAP_CHECK(!inputs.empty() && inputs.size() <= 64, kValue,
                      "concat: expected 1 to 64 inputs, got ", inputs.size());
  const size_t at = normal_dim("concat", dim, inputs[0].size());
  RuleBuilder builder("concat");
  std::vector<std::vector<int32_t>> dims;
  for (size_t d = 0; d < inputs[0].size(); ++d) {
    dims.push_back(d == at ? std::vector<int32_t>() : builder.dim(dim_name(d), inputs[0][d]));
  }
  Shape shape = inputs[0];
  shape[at] = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Shape others = inputs[i];
    TORCH_OVERLAP_CHECK(others.size() == shape.size(), kValue, "concat: expected ", shape.size(),
                        " dimensions, got ", list_string(inputs[i]), " as input ", i);
    shape[at] += others[at];
    others[at] = shape[at];
    TORCH_OVERLAP_CHECK(others == shape, kValue, "concat: expected sizes of ",
                        list_string(inputs[0]), " outside dimension ", at, ", got ",
                        list_string(inputs[i]), " as input ", i);
    dims[at] = builder.dim(concat(dim_name(at), i), inputs[i][at], FactorKind::kWhole);
    builder.input(inputs[i], dims);
  }
  dims[at] = builder.dim(dim_name(at), shape[at], FactorKind::kWhole);
  builder.output(shape, dims);
  builder.pattern(inputs.size() == 64 ? ~uint64_t{0} : (uint64_t{1} << inputs.size()) - 1,
                  kAllKinds);
  return builder.take();
}

OpRule slice_rule(const Shape& x, int64_t dim, const std::vector<Extent>& parts) {
  const size_t at = normal_dim("slice", dim, x.size());
  RuleBuilder builder("slice");
  std::vector<std::vector<int32_t>> dims;
  const bool is_all = parts.size() == 1 && parts[0] == Extent{0, x[at]};
  for (size_t d = 0; d < x.size(); ++d) {
    const bool is_cut = d == at && !is_all;
    dims.push_back(
        builder.dim(dim_name(d), x[d], is_cut ? FactorKind::kWhole : FactorKind::kParallel));
  }
  builder.input(x, dims);
  for (size_t i = 0; i < parts.size(); ++i) {
    TORCH_OVERLAP_CHECK(
        parts[i].offset >= 0 && parts[i].size >= 0 && parts[i].offset + parts[i].size <= x[at],
        kValue, "slice: expected a part of size ", x[at], " in dimension ", at, ", got ",
        parts[i].size, " from ", parts[i].offset);
    Shape shape = x;
    shape[at] = parts[i].size;
    if (!is_all) {
      dims[at] = builder.dim(concat(dim_name(at), i), shape[at], FactorKind::kWhole);
    }
    builder.output(std::move(shape), dims);
  }
  return builder.take_move();
}

OpRule take_rule(const Shape& table, const Shape& index, int64_t dim) {
  const size_t at = normal_dim("take", dim, table.size());
  RuleBuilder builder("take");
  std::vector<std::vector<int32_t>> in;
  std::vector<std::vector<int32_t>> out;
  std::vector<std::vector<int32_t>> indices;
  Shape shape;
  for (size_t i = 0; i < index.size(); ++i) {
    indices.push_back(builder.dim(concat("i", i), index[i]));
  }
  for (size_t d = 0; d < table.size(); ++d) {
    if (d == at) {
      in.push_back(builder.dim(dim_name(d), table[d], FactorKind::kReduced));
      out.insert(out.end(), indices.begin(), indices.end());
      shape.insert(shape.end(), index.begin(), index.end());
    } else {
      in.push_back(builder.dim(dim_name(d), table[d]));
      out.push_back(in.back());
      shape.push_back(table[d]);
    }
  }
  builder.input(table, std::move(in));
  builder.input(index, std::move(indices));
  builder.output(std::move(shape), std::move(out));
  builder.pattern(1, kAllKinds);
  builder.rule().no_gradient_inputs = 2;
  builder.rule().note =
      concat("where dimension ", at,
             " of the table is sharded: indices minus the offset of the own part, zeros for those "
             "outside of it");
  return builder.take();
}

OpRule opaque_rule(std::string_view op, const std::vector<Shape>& inputs,
                   const std::vector<Shape>& outputs) {
  RuleBuilder builder{std::string(op)};
  size_t next = 0;
  const auto dims_of = [&](const Shape& shape) {
    std::vector<std::vector<int32_t>> dims;
    for (const int64_t size : shape) {
      dims.push_back(builder.dim(dim_name(next++), size, FactorKind::kWhole));
    }
    return dims;
  };
  for (const Shape& shape : inputs) builder.input(shape, dims_of(shape));
  for (const Shape& shape : outputs) builder.output(shape, dims_of(shape));
  return builder.take();
}

}  // namespace torch_overlap::mesh
