#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "torch_overlap/gemm/quantize.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"

// Fused products of 8-bit floats: value = data * scale_inv, one factor for a tensor.
namespace torch_overlap::ops {
namespace {

constexpr std::string_view kScaledGather = "scaled_all_gather_matmul";
constexpr std::string_view kScaledScatter = "scaled_matmul_reduce_scatter";
constexpr std::string_view kScaledAlgorithms = "auto sequential chunked ring";

void check_quantized(std::string_view op, std::string_view what, const Tensor& data,
                     const Tensor& scale_inv) {
  TORCH_OVERLAP_CHECK(
      data.scalar_type() == at::kFloat8_e4m3fn || data.scalar_type() == at::kFloat8_e5m2, kType, op,
      ": expected ", what, " of dtype float8_e4m3fn or float8_e5m2, got ", data.scalar_type(),
      "; use quantize");
  check_scale(op, data, scale_inv);
}

// x, one of its weights, and a bias; all that all_gather_matmul checks of them but dtypes of 16
// bits.
void check_scaled(std::string_view op, const Tensor& x, const Tensor& weight,
                  const Tensor& weight_scale_inv, const std::optional<Tensor>& bias,
                  at::ScalarType out_dtype) {
  check_quantized(op, "a weight", weight, weight_scale_inv);
  TORCH_OVERLAP_CHECK(weight.dim() == 2, kValue, op,
                      ": expected a weight [out_features, in_features], got shape ",
                      weight.sym_sizes());
  TORCH_OVERLAP_CHECK(weight.device() == x.device(), kType, op, ": expected a weight on device ",
                      x.device(), " as x, got ", weight.device(), "; move one of them");
  check_size(op, "in_features of the weight to be those of x,", x.sym_size(-1), weight.sym_size(1));
  if (!bias) return;
  TORCH_OVERLAP_CHECK(bias->dim() == 1, kValue, op, ": expected a bias [out_features], got shape ",
                      bias->sym_sizes());
  TORCH_OVERLAP_CHECK(bias->scalar_type() == out_dtype, kType, op, ": expected a bias of dtype ",
                      out_dtype, ", that of the result, got ", bias->scalar_type(), "; convert it");
  TORCH_OVERLAP_CHECK(bias->device() == x.device(), kType, op, ": expected a bias on device ",
                      x.device(), " as x, got ", bias->device(), "; move one of them");
  check_size(op, "as many bias entries as out_features,", weight.sym_size(0), bias->sym_size(0));
}

// What both check first; the dimension of rows that is gathered or scattered.
int64_t check_scaled_x(std::string_view op, const Tensor& x, const Tensor& x_scale_inv,
                       int64_t group_size, int64_t dim, std::string_view what,
                       at::ScalarType out_dtype, std::string_view algorithm) {
  check_group_size(op, group_size);
  check_choice(op, "algorithm", kScaledAlgorithms, algorithm);
  TORCH_OVERLAP_CHECK(x.dim() >= 2, kValue, op,
                      ": expected x of two or more dimensions, got shape ", x.sym_sizes(),
                      "; use x.unsqueeze(0)");
  check_quantized(op, "x", x, x_scale_inv);
  TORCH_OVERLAP_CHECK(
      out_dtype == at::kFloat || out_dtype == at::kHalf || out_dtype == at::kBFloat16, kType, op,
      ": expected out_dtype float32, float16 or bfloat16, got ", out_dtype);
  const int64_t wrapped = wrap_dim(op, x, dim, what);
  TORCH_OVERLAP_CHECK(wrapped + 1 < x.dim(), kValue, op, ": expected ", what,
                      " to be a dimension of rows, got ", dim, ", the features of shape ",
                      x.sym_sizes());
  return wrapped;
}

GemmOperand scaled_operand(const Tensor& data, const Tensor& scale_inv, bool transposed) {
  GemmOperand operand;
  operand.data = !data.defined() || data.stride(1) == 1 ? data : data.contiguous();
  operand.transposed = transposed;
  operand.scaling = ScalingMode::CURRENT_TENSOR_SCALING;
  operand.scale_inv = scale_inv;
  return operand;
}

// out = x weight^T. Without `out` and the data of x, which differ by step.
GemmArgs scaled_product(const Tensor& x_scale_inv, const Tensor& weight,
                        const Tensor& weight_scale_inv, bool use_split_accumulator) {
  GemmArgs args;
  args.lhs = scaled_operand({}, x_scale_inv, /*transposed=*/false);
  args.rhs = scaled_operand(weight, weight_scale_inv, /*transposed=*/true);
  args.use_split_accumulator = use_split_accumulator;
  return args;
}

// --- all-gather, products

std::vector<Tensor> scaled_all_gather_matmul_out(const Tensor& x, const Tensor& x_scale_inv,
                                                 at::TensorList weights,
                                                 at::TensorList weights_scale_inv,
                                                 const OptionalTensors& biases, int64_t group_size,
                                                 int64_t gather_dim, at::ScalarType out_dtype,
                                                 std::string_view algorithm) {
  const int64_t dim = check_scaled_x(kScaledGather, x, x_scale_inv, group_size, gather_dim,
                                     "gather_dim", out_dtype, algorithm);
  TORCH_OVERLAP_CHECK(!weights.empty(), kValue, kScaledGather,
                      ": expected one or more weights, got none");
  TORCH_OVERLAP_CHECK(weights_scale_inv.size() == weights.size(), kValue, kScaledGather,
                      ": expected one scale_inv for each of the ", weights.size(), " weights, got ",
                      weights_scale_inv.size());
  TORCH_OVERLAP_CHECK(biases.empty() || biases.size() == weights.size(), kValue, kScaledGather,
                      ": expected no biases or one entry for each of the ", weights.size(),
                      " weights, got ", biases.size(), "; None stands for no bias");
  auto sizes = x.sym_sizes().vec();
  sizes[dim] *= group_size;
  std::vector<Tensor> out;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_scaled(kScaledGather, x, weights[i], weights_scale_inv[i],
                 biases.empty() ? std::nullopt : biases.get(i), out_dtype);
    sizes.back() = weights[i].sym_size(0);
    out.push_back(at::empty_symint(sizes, x.options().dtype(out_dtype)));
  }
  return out;
}

std::vector<Tensor> scaled_all_gather_matmul_kernel(
    const Tensor& x, const Tensor& x_scale_inv, at::TensorList weights,
    at::TensorList weights_scale_inv, const OptionalTensors& biases, std::string_view comm,
    int64_t group_size, int64_t gather_dim, at::ScalarType out_dtype, bool use_split_accumulator,
    std::string_view algorithm) {
  auto out = scaled_all_gather_matmul_out(x, x_scale_inv, weights, weights_scale_inv, biases,
                                          group_size, gather_dim, out_dtype, algorithm);
  const auto communicator = find_comm(kScaledGather, comm, group_size);
  const int64_t dim = wrap_dim(kScaledGather, x, gather_dim, "gather_dim");
  const auto own = to_rows(x, dim);
  const int64_t rows = own.size(0);
  std::vector<Tensor> products;
  std::vector<GemmArgs> gemms;
  for (size_t i = 0; i < weights.size(); ++i) {
    products.push_back(rows_of(out[i], dim));
    gemms.push_back(
        scaled_product(x_scale_inv, weights[i], weights_scale_inv[i], use_split_accumulator));
    gemms[i].out = products[i];
    if (!biases.empty()) {
      gemms[i].epilogue.bias = std::optional<Tensor>(biases.get(i)).value_or(Tensor());
    }
  }
  const auto product_of = [&](size_t i, const Tensor& input, int64_t begin) {
    GemmArgs part = gemms[i];
    part.lhs.data = input;
    part.out = products[i].narrow(0, begin, input.size(0));
    return part;
  };
  const auto multiply = [&](const Tensor& input, int64_t begin) {
    for (size_t i = 0; i < gemms.size(); ++i) gemm(kScaledGather, product_of(i, input, begin));
  };
  // Before anything is sent: what 8-bit products ask of sizes.
  for (size_t i = 0; i < gemms.size(); ++i) check_gemm(kScaledGather, product_of(i, own, 0));
  // Bytes travel: not every backend knows 8-bit floats.
  const auto bytes = own.view(at::kByte);
  const auto chosen = choose_algorithm(kScaledGather, algorithm, communicator, out_dtype, rows,
                                       gather_bytes(*communicator, own), 0)
                          .algorithm;
  if (chosen == Algorithm::ring) {
    ring_gather_gemms(kScaledGather, communicator, own, std::move(gemms), {});
  } else if (chosen == Algorithm::chunked) {
    GatherPipeline gather(*communicator, bytes, std::nullopt);
    for (size_t step = 0; step < gather.steps(); ++step) {
      const auto input = gather.wait(step).view(x.scalar_type());
      const Span span("chunk_gemm", step);
      multiply(input, gather.chunk(step) * rows);
    }
  } else {
    const auto gathered = at::empty({group_size * rows, own.size(1)}, bytes.options());
    communicator->all_gather_single(gathered, bytes, /*async_op=*/false);
    multiply(gathered.view(x.scalar_type()), 0);
  }
  for (size_t i = 0; i < out.size(); ++i) put_rows(products[i], out[i], dim);
  return out;
}

std::vector<Tensor> scaled_all_gather_matmul_meta(const Tensor& x, const Tensor& x_scale_inv,
                                                  at::TensorList weights,
                                                  at::TensorList weights_scale_inv,
                                                  const OptionalTensors& biases, std::string_view,
                                                  int64_t group_size, int64_t gather_dim,
                                                  at::ScalarType out_dtype, bool,
                                                  std::string_view algorithm) {
  return scaled_all_gather_matmul_out(x, x_scale_inv, weights, weights_scale_inv, biases,
                                      group_size, gather_dim, out_dtype, algorithm);
}

// --- product, reduce-scatter

Tensor scaled_matmul_reduce_scatter_out(const Tensor& x, const Tensor& x_scale_inv,
                                        const Tensor& weight, const Tensor& weight_scale_inv,
                                        const std::optional<Tensor>& bias, int64_t group_size,
                                        int64_t scatter_dim, std::string_view op,
                                        at::ScalarType out_dtype, std::string_view algorithm) {
  const int64_t dim = check_scaled_x(kScaledScatter, x, x_scale_inv, group_size, scatter_dim,
                                     "scatter_dim", out_dtype, algorithm);
  check_choice(kScaledScatter, "op", "sum avg", op);
  check_divisible(kScaledScatter, x, dim, group_size);
  check_scaled(kScaledScatter, x, weight, weight_scale_inv, bias, out_dtype);
  auto sizes = x.sym_sizes().vec();
  sizes[dim] = sizes[dim] / group_size;
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options().dtype(out_dtype));
}

// Over the scatter channel; `product` has no out.
void ring_scaled_scatter(const std::shared_ptr<TorchComm>& comm, GemmArgs product, bool mean,
                         const Tensor& bias, const Tensor& out) {
  const RowShare rows{product.lhs.data.size(0), comm->size()};
  const int64_t columns = out.size(1);
  const auto dtype = out.scalar_type();
  const auto channel = operator_channel(kScaledScatter, comm, OperatorChannel::scatter,
                                        scatter_bytes(*comm, rows.rows, columns, dtype));
  product.out = channel->data(0, {rows.rows, columns}, dtype);
  const auto received_at = static_cast<int64_t>(product.out.nbytes());
  run_scatter_gemm(kScaledScatter, *channel,
                   {.gemms = {product},
                    .rows = rows,
                    .partial = product.out,
                    .at = received_at,
                    .out = out,
                    .scale_inv = {},
                    .factor = mean ? 1.0 / comm->size() : 1.0,
                    .bias = bias.defined() ? bias.contiguous() : bias});
}

Tensor scaled_matmul_reduce_scatter_kernel(const Tensor& x, const Tensor& x_scale_inv,
                                           const Tensor& weight, const Tensor& weight_scale_inv,
                                           const std::optional<Tensor>& bias, std::string_view comm,
                                           int64_t group_size, int64_t scatter_dim,
                                           std::string_view op, at::ScalarType out_dtype,
                                           bool use_split_accumulator, std::string_view algorithm) {
  auto out = scaled_matmul_reduce_scatter_out(x, x_scale_inv, weight, weight_scale_inv, bias,
                                              group_size, scatter_dim, op, out_dtype, algorithm);
  const auto communicator = find_comm(kScaledScatter, comm, group_size);
  const int64_t dim = wrap_dim(kScaledScatter, x, scatter_dim, "scatter_dim");
  const auto inputs = to_rows(x, dim);
  const auto sums = rows_of(out, dim);
  const int64_t rows = sums.size(0);
  const bool mean = op == "avg";
  auto product = scaled_product(x_scale_inv, weight, weight_scale_inv, use_split_accumulator);
  product.lhs.data = inputs.narrow(0, 0, rows);
  product.out = sums;
  check_gemm(kScaledScatter, product);  // before anything is sent
  product.lhs.data = inputs;
  const auto chosen =
      choose_algorithm(kScaledScatter, algorithm, communicator, out_dtype, rows, 0,
                       scatter_bytes(*communicator, inputs.size(0), sums.size(1), out_dtype))
          .algorithm;
  if (chosen == Algorithm::ring) {
    ring_scaled_scatter(communicator, std::move(product), mean, bias.value_or(Tensor()), sums);
    put_rows(sums, out, dim);
    return out;
  }
  if (chosen == Algorithm::chunked) {
    ScatterPipeline scatter(*communicator, rows, sums.size(1), out.options());
    for (size_t step = 0; step < scatter.steps(); ++step) {
      {
        const Span span("chunk_gemm", step);
        product.lhs.data = inputs.narrow(0, scatter.chunk(step) * rows, rows);
        product.out = scatter.partial(step);
        gemm(kScaledScatter, product);
      }
      scatter.send(step);
    }
    scatter.reduce(sums, mean);
  } else {
    product.out = at::empty({inputs.size(0), sums.size(1)}, out.options());
    gemm(kScaledScatter, product);
    communicator->reduce_scatter_single(sums, product.out, mean ? RedOpType::AVG : RedOpType::SUM,
                                        /*async_op=*/false);
  }
  put_rows(sums, out, dim);
  if (bias) out.add_(*bias);
  return out;
}

Tensor scaled_matmul_reduce_scatter_meta(const Tensor& x, const Tensor& x_scale_inv,
                                         const Tensor& weight, const Tensor& weight_scale_inv,
                                         const std::optional<Tensor>& bias, std::string_view,
                                         int64_t group_size, int64_t scatter_dim,
                                         std::string_view op, at::ScalarType out_dtype, bool,
                                         std::string_view algorithm) {
  return scaled_matmul_reduce_scatter_out(x, x_scale_inv, weight, weight_scale_inv, bias,
                                          group_size, scatter_dim, op, out_dtype, algorithm);
}

}  // namespace
}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "scaled_all_gather_matmul(Tensor x, Tensor x_scale_inv, Tensor[] weights,"
      " Tensor[] weights_scale_inv, Tensor?[] biases, str comm, int group_size, int gather_dim=0,"
      " ScalarType out_dtype=bfloat16, bool use_split_accumulator=False, str algorithm=\"auto\")"
      " -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "scaled_matmul_reduce_scatter(Tensor x, Tensor x_scale_inv, Tensor weight,"
      " Tensor weight_scale_inv, Tensor? bias, str comm, int group_size, int scatter_dim=0,"
      " str op=\"sum\", ScalarType out_dtype=bfloat16, bool use_split_accumulator=False,"
      " str algorithm=\"auto\") -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(torch_overlap, CompositeExplicitAutograd, m) {
  m.impl("scaled_all_gather_matmul", torch_overlap::ops::scaled_all_gather_matmul_kernel);
  m.impl("scaled_matmul_reduce_scatter", torch_overlap::ops::scaled_matmul_reduce_scatter_kernel);
}

TORCH_LIBRARY_IMPL(torch_overlap, Meta, m) {
  m.impl("scaled_all_gather_matmul", torch_overlap::ops::scaled_all_gather_matmul_meta);
  m.impl("scaled_matmul_reduce_scatter", torch_overlap::ops::scaled_matmul_reduce_scatter_meta);
}

// No gradients: it raises when one is asked.
TORCH_LIBRARY_IMPL(torch_overlap, Autograd, m) {
  m.impl("scaled_all_gather_matmul", torch::autograd::autogradNotImplementedFallback());
  m.impl("scaled_matmul_reduce_scatter", torch::autograd::autogradNotImplementedFallback());
}
