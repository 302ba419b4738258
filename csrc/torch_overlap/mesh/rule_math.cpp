// Operators that compute: elementwise, products, reductions, softmax, norms, conv, attention.

#include <set>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/mesh/rule_builder.h"

namespace torch_overlap::mesh {
namespace {

constexpr uint64_t bit(size_t i) { return uint64_t{1} << i; }

std::set<size_t> normal_dims(std::string_view op, const std::vector<int64_t>& dims, size_t rank) {
  std::set<size_t> out;
  for (const int64_t dim : dims) {
    TORCH_OVERLAP_CHECK(out.insert(normal_dim(op, dim, rank)).second, kValue, op,
                        ": expected every dimension once, got ", list_string(dims));
  }
  return out;
}

void product(OpRule& rule, std::vector<int32_t> batch, std::vector<int32_t> rows,
             std::vector<int32_t> columns, std::vector<int32_t> inner) {
  rule.compute = Compute::kProduct;
  rule.batch = std::move(batch);
  rule.rows = std::move(rows);
  rule.columns = std::move(columns);
  rule.inner = std::move(inner);
}

ReduceKind kind_of(std::string_view op) {
  if (op == "sum" || op == "mean") return ReduceKind::kSum;
  if (op == "amax" || op == "max") return ReduceKind::kMax;
  if (op == "amin" || op == "min") return ReduceKind::kMin;
  if (op == "prod") return ReduceKind::kProduct;
  fail(ErrorKind::kValue, "reduction: expected sum, mean, amax, amin or prod, got '", op, "'");
}

}  // namespace

OpRule elementwise_rule(std::string_view op, const std::vector<Shape>& inputs, Elementwise how) {
  TORCH_OVERLAP_CHECK(!inputs.empty() && inputs.size() <= 64, kValue, op,
                      ": expected 1 to 64 inputs, got ", inputs.size());
  RuleBuilder builder{std::string(op)};
  const Shape shape = broadcast_shape(op, inputs);
  std::vector<std::vector<int32_t>> out;
  // A dimension of size 1 has a factor, too: if it is sharded, one rank has the element and
  // computes it.
  for (size_t d = 0; d < shape.size(); ++d) out.push_back({builder.factor(dim_name(d), shape[d])});
  for (const Shape& input : inputs) builder.input(input, broadcast_dims(input, shape, out));
  builder.output(shape, std::move(out));
  const uint64_t all = inputs.size() == 64 ? ~uint64_t{0} : bit(inputs.size()) - 1;
  switch (how) {
    case Elementwise::kNonlinear:
      break;
    case Elementwise::kMove:
      builder.pattern(all, kAllKinds);
      break;
    case Elementwise::kLinear:
    case Elementwise::kAdd:
      builder.pattern(all, kLinearKinds);
      break;
    case Elementwise::kMultiply:
      for (size_t i = 0; i < inputs.size(); ++i) builder.pattern(bit(i), kLinearKinds);
      break;
    case Elementwise::kDivide:
      builder.pattern(bit(0), kLinearKinds);
      break;
  }
  return builder.take();
}

OpRule matmul_rule(const Shape& a, const Shape& b) {
  TORCH_OVERLAP_CHECK(!a.empty() && !b.empty(), kValue,
                      "matmul: expected at least one dimension, got ", list_string(a), " and ",
                      list_string(b));
  const int64_t inner = a.back();
  const int64_t other = b.size() == 1 ? b[0] : b[b.size() - 2];
  TORCH_OVERLAP_CHECK(inner == other, kValue, "matmul: expected ", inner,
                      " rows in the second input, got ", list_string(b));
  RuleBuilder builder("matmul");
  const Shape a_batch(a.begin(), a.end() - (a.size() > 1 ? 2 : 1));
  const Shape b_batch(b.begin(), b.end() - (b.size() > 1 ? 2 : 1));
  const Shape batch = broadcast_shape("matmul", {a_batch, b_batch});
  std::vector<std::vector<int32_t>> out;
  std::vector<int32_t> batch_factors;
  std::vector<int32_t> row_factors;
  for (size_t d = 0; d < batch.size(); ++d) {
    out.push_back(builder.dim(concat("b", d), batch[d]));
    // A batch dimension that the second input does not have adds rows to one product.
    const size_t missing = batch.size() - b_batch.size();
    const bool shared = d >= missing && b_batch[d - missing] != 1;
    auto& list = shared ? batch_factors : row_factors;
    list.insert(list.end(), out.back().begin(), out.back().end());
  }
  const std::vector<int32_t> k = builder.dim("k", inner, FactorKind::kReduced);
  auto a_dims = broadcast_dims(a_batch, batch, out);
  auto b_dims = broadcast_dims(b_batch, batch, out);
  Shape shape = batch;
  std::vector<int32_t> n;
  if (a.size() > 1) {
    const std::vector<int32_t> m = builder.dim("m", a[a.size() - 2]);
    a_dims.push_back(m);
    out.push_back(m);
    shape.push_back(a[a.size() - 2]);
    row_factors.insert(row_factors.end(), m.begin(), m.end());
  }
  a_dims.push_back(k);
  b_dims.push_back(k);
  if (b.size() > 1) {
    n = builder.dim("n", b.back());
    b_dims.push_back(n);
    out.push_back(n);
    shape.push_back(b.back());
  }
  builder.input(a, std::move(a_dims));
  builder.input(b, std::move(b_dims));
  builder.output(std::move(shape), std::move(out));
  builder.pattern(1, kLinearKinds);
  builder.pattern(2, kLinearKinds);
  product(builder.rule(), batch_factors, row_factors, n, k);
  return builder.take();
}

OpRule linear_rule(const Shape& x, const Shape& weight, bool has_bias) {
  TORCH_OVERLAP_CHECK(!x.empty() && weight.size() == 2 && x.back() == weight[1], kValue,
                      "linear: expected a weight of [out, ", x.empty() ? 0 : x.back(), "], got ",
                      list_string(weight), " for an input of ", list_string(x));
  RuleBuilder builder("linear");
  std::vector<std::vector<int32_t>> in;
  std::vector<int32_t> rows;
  for (size_t d = 0; d + 1 < x.size(); ++d) {
    in.push_back(builder.dim(dim_name(d), x[d]));
    rows.insert(rows.end(), in.back().begin(), in.back().end());
  }
  std::vector<std::vector<int32_t>> out = in;
  const std::vector<int32_t> k = builder.dim("k", x.back(), FactorKind::kReduced);
  const std::vector<int32_t> n = builder.dim("n", weight[0]);
  in.push_back(k);
  out.push_back(n);
  Shape shape = x;
  shape.back() = weight[0];
  builder.input(x, std::move(in));
  builder.input(weight, {n, k});
  uint64_t bias = 0;
  if (has_bias) {
    builder.input({weight[0]}, {n});
    bias = bit(2);
    builder.rule().addend_inputs = bias;
  }
  builder.output(std::move(shape), std::move(out));
  builder.pattern(bit(0) | bias, kLinearKinds);
  builder.pattern(bit(1) | bias, kLinearKinds);
  product(builder.rule(), {}, rows, n, k);
  return builder.take();
}

OpRule reduction_rule(std::string_view op, const Shape& x, std::vector<int64_t> dims,
                      bool keepdim) {
  const ReduceKind kind = kind_of(op);
  std::set<size_t> over = normal_dims(op, dims, x.size());
  if (dims.empty()) {
    for (size_t d = 0; d < x.size(); ++d) over.insert(d);
  }
  RuleBuilder builder{std::string(op)};
  std::vector<std::vector<int32_t>> in;
  std::vector<std::vector<int32_t>> out;
  Shape shape;
  for (size_t d = 0; d < x.size(); ++d) {
    const bool is_reduced = over.count(d) != 0;
    in.push_back(builder.dim(dim_name(d), x[d],
                             is_reduced ? FactorKind::kReduced : FactorKind::kParallel, kind));
    if (is_reduced && !keepdim) continue;
    out.push_back(is_reduced ? std::vector<int32_t>() : in.back());
    shape.push_back(is_reduced ? 1 : x[d]);
  }
  builder.input(x, std::move(in));
  builder.output(std::move(shape), std::move(out));
  if (kind == ReduceKind::kSum) {
    builder.pattern(1, kLinearKinds);
  } else {
    builder.pattern(1, 1U << static_cast<unsigned>(kind));
  }
  if (op == "mean") {
    builder.rule().note = "a sum over the own part, divided by the global number of elements";
  }
  return builder.take();
}

OpRule along_rule(std::string_view op, const Shape& x, std::vector<int64_t> dims,
                  const std::vector<Shape>& outputs) {
  const std::set<size_t> whole = normal_dims(op, dims, x.size());
  RuleBuilder builder{std::string(op)};
  std::vector<std::vector<int32_t>> all;
  for (size_t d = 0; d < x.size(); ++d) {
    all.push_back(builder.dim(dim_name(d), x[d],
                              whole.count(d) != 0 ? FactorKind::kWhole : FactorKind::kParallel));
  }
  builder.input(x, all);
  if (outputs.empty()) builder.output(x, all);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Shape& output = outputs[i];
    auto of_output = all;
    for (size_t d = 0; d < x.size(); ++d) {
      TORCH_OVERLAP_CHECK(output.size() == x.size() && (whole.count(d) != 0 || output[d] == x[d]),
                          kValue, op, ": expected outputs of the shape ", list_string(x),
                          " but for dimensions ", list_string(dims), ", got ", list_string(output));
      if (whole.count(d) == 0) continue;
      of_output[d] = builder.dim(concat(dim_name(d), i), output[d], FactorKind::kWhole);
    }
    builder.output(output, std::move(of_output));
  }
  if (op == "flip") builder.pattern(1, kAllKinds);
  if (op == "cumsum") builder.pattern(1, kLinearKinds);
  return builder.take();
}

OpRule norm_rule(const Shape& x, int64_t normalized_dims, int64_t num_weights) {
  const auto rank = static_cast<int64_t>(x.size());
  TORCH_OVERLAP_CHECK(normalized_dims >= 1 && normalized_dims <= rank, kValue,
                      "norm: expected 1 to ", rank, " normalized dimensions, got ",
                      normalized_dims);
  RuleBuilder builder("norm");
  std::vector<std::vector<int32_t>> all;
  std::vector<std::vector<int32_t>> last;
  Shape weight;
  for (size_t d = 0; d < x.size(); ++d) {
    const bool is_last = static_cast<int64_t>(d) >= rank - normalized_dims;
    all.push_back(
        builder.dim(dim_name(d), x[d], is_last ? FactorKind::kWhole : FactorKind::kParallel));
    if (!is_last) continue;
    last.push_back(all.back());
    weight.push_back(x[d]);
  }
  builder.input(x, all);
  for (int64_t i = 0; i < num_weights; ++i) builder.input(weight, last);
  builder.output(x, all);
  return builder.take();
}

OpRule conv_rule(const Shape& x, const Shape& weight, const Shape& output, int64_t groups,
                 bool has_bias) {
  const bool fits = x.size() >= 3 && weight.size() == x.size() && output.size() == x.size() &&
                    groups >= 1 && x[1] == weight[1] * groups && output[1] == weight[0] &&
                    output[0] == x[0] && weight[0] % groups == 0;
  TORCH_OVERLAP_CHECK(fits, kValue, "conv: expected [batch, in, ...], [out, in / ", groups,
                      ", ...] and [batch, out, ...], got ", list_string(x), ", ",
                      list_string(weight), " and ", list_string(output));
  RuleBuilder builder("conv");
  const std::vector<int32_t> batch = builder.dim("b", x[0]);
  const std::vector<int32_t> group = builder.dim("g", groups);
  const std::vector<int32_t> in = builder.dim("i", weight[1], FactorKind::kReduced);
  const std::vector<int32_t> out = builder.dim("o", weight[0] / groups);
  const auto with_group = [&](const std::vector<int32_t>& channels) {
    std::vector<int32_t> both = group;
    both.insert(both.end(), channels.begin(), channels.end());
    return both;
  };
  std::vector<std::vector<int32_t>> x_dims{batch, with_group(in)};
  std::vector<std::vector<int32_t>> w_dims{with_group(out), in};
  std::vector<std::vector<int32_t>> y_dims{batch, with_group(out)};
  std::vector<int32_t> rows = batch;
  std::vector<int32_t> inner = in;
  for (size_t d = 2; d < x.size(); ++d) {
    // A part of an image would need its neighbours' borders.
    x_dims.push_back(builder.dim(concat("x", d - 2), x[d], FactorKind::kWhole));
    w_dims.push_back(builder.dim(concat("w", d - 2), weight[d], FactorKind::kWhole));
    y_dims.push_back(builder.dim(concat("y", d - 2), output[d], FactorKind::kWhole));
    inner.insert(inner.end(), w_dims.back().begin(), w_dims.back().end());
    rows.insert(rows.end(), y_dims.back().begin(), y_dims.back().end());
  }
  builder.input(x, std::move(x_dims));
  builder.input(weight, std::move(w_dims));
  uint64_t bias = 0;
  if (has_bias) {
    builder.input({weight[0]}, {with_group(out)});
    bias = bit(2);
    builder.rule().addend_inputs = bias;
  }
  builder.output(output, std::move(y_dims));
  builder.pattern(bit(0) | bias, kLinearKinds);
  builder.pattern(bit(1) | bias, kLinearKinds);
  product(builder.rule(), group, rows, out, inner);
  return builder.take();
}

OpRule attention_rule(const Shape& query, const Shape& key, const Shape& value, bool is_causal) {
  const size_t rank = query.size();
  const bool fits = rank >= 3 && key.size() == rank && value.size() == rank &&
                    query[rank - 1] == key[rank - 1] && key[rank - 2] == value[rank - 2] &&
                    key[rank - 3] == value[rank - 3] && key[rank - 3] > 0 &&
                    query[rank - 3] % key[rank - 3] == 0;
  TORCH_OVERLAP_CHECK(fits, kValue, "attention: expected [..., heads, length, depth] whose heads ",
                      "divide those of the query, got ", list_string(query), ", ", list_string(key),
                      " and ", list_string(value));
  RuleBuilder builder("attention");
  std::vector<std::vector<int32_t>> q;
  std::vector<int32_t> batch;
  for (size_t d = 0; d + 3 < rank; ++d) {
    TORCH_OVERLAP_CHECK(query[d] == key[d] && query[d] == value[d], kValue,
                        "attention: expected equal batches, got ", list_string(query), ", ",
                        list_string(key), " and ", list_string(value));
    q.push_back(builder.dim(concat("b", d), query[d]));
    batch.insert(batch.end(), q.back().begin(), q.back().end());
  }
  std::vector<std::vector<int32_t>> k = q;
  const std::vector<int32_t> kv_heads = builder.dim("h", key[rank - 3]);
  std::vector<int32_t> heads = kv_heads;
  for (const int32_t f : builder.dim("r", query[rank - 3] / key[rank - 3])) heads.push_back(f);
  batch.insert(batch.end(), heads.begin(), heads.end());
  q.push_back(heads);
  k.push_back(kv_heads);
  std::vector<std::vector<int32_t>> v = k;
  std::vector<std::vector<int32_t>> out = q;
  const auto queries =
      builder.dim("s", query[rank - 2], is_causal ? FactorKind::kWhole : FactorKind::kParallel);
  const auto keys = builder.dim("t", key[rank - 2], FactorKind::kWhole);
  const auto depth = builder.dim("d", query[rank - 1], FactorKind::kWhole);
  const auto columns = builder.dim("e", value[rank - 1]);
  q.push_back(queries);
  q.push_back(depth);
  k.push_back(keys);
  k.push_back(depth);
  v.push_back(keys);
  v.push_back(columns);
  out.push_back(queries);
  out.push_back(columns);
  Shape shape = query;
  shape.back() = value.back();
  builder.input(query, std::move(q));
  builder.input(key, std::move(k));
  builder.input(value, std::move(v));
  builder.output(std::move(shape), std::move(out));
  product(builder.rule(), batch, queries, keys, depth);
  builder.rule().products = is_causal ? 1 : 2;  // scores and values; a causal mask halves both
  return builder.take();
}

}  // namespace torch_overlap::mesh
