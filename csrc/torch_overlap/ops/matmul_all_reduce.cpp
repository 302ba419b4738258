#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"
#include "torch_overlap/overlap/execute_parts.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kMatmulAllReduce = "matmul_all_reduce";

// Into how many blocks of rows channels cut it: of some waves of tiles each, and few, as a product
// pays for each block.
int64_t block_count(int64_t rows, int64_t features) {
  constexpr int64_t kElements = int64_t{1} << 24;
  constexpr int64_t kMost = 4;
  return std::clamp<int64_t>(rows * features / kElements, 1, kMost);
}

// Of so many rows. Channels, which hold the largest block, are not taken unasked: over them each
// element moves twice.
}  // namespace

OverlapProblem matmul_all_reduce_problem(const TorchComm& comm, int64_t rows, int64_t features,
                                         int64_t local_k, at::ScalarType dtype) {
  const int64_t blocks = block_count(rows, features);
  const int64_t block = (rows + blocks - 1) / blocks;
  return {.op = kMatmulAllReduce,
          .dtype = dtype,
          .m = rows,
          .n = features,
          .k = local_k * comm.size(),
          .chunk_rows = rows / kAllReduceChunks,
          .gather_bytes = std::max<int64_t>(
              block * features * static_cast<int64_t>(c10::elementSize(dtype)), 1),
          .scatter_bytes = scatter_bytes(comm, block, features, dtype),
          .local_n = features,
          .local_k = local_k,
          .local_m = block,
          .prefers_channels = false};
}

namespace {

// Blocks of rows: the sums of each at their owners, then all of them everywhere beside the products
// of the next block. Of reductions of 8- and 16-bit floats this is the one that accumulates in
// fp32, in rank order.
class BlockwiseAllReduce {
 public:
  BlockwiseAllReduce(std::shared_ptr<TorchComm> comm, Tensor out, std::optional<Tensor> bias)
      : comm_(std::move(comm)), out_(std::move(out)), bias_(std::move(bias)) {}

  // out = the sum (or mean) of all ranks' inputs weight^T, plus bias.
  void run(const Tensor& inputs, const Tensor& weight, bool mean, bool fused) {
    for (const RowRange& block :
         row_chunks(out_.size(0), block_count(out_.size(0), out_.size(1)))) {
      const auto rows = out_.narrow(0, block.begin, block.length);
      const RowShare share{block.length, comm_->size()};
      const auto own = rows_of_rank(rows, share, comm_->rank());
      ring_multiply_scatter(
          kMatmulAllReduce, comm_,
          {.inputs = {inputs.narrow(0, block.begin, block.length)},
           .weights = {weight.t()},
           .sum = {.start = {}, .bias = {}, .mean = mean, .out = own, .fused = fused}});
      take();
      under_way_ = Block{rows, share};
      gather_.emplace(kMatmulAllReduce, comm_, own, share, /*with_own=*/false);
    }
    take();
  }

 private:
  struct Block {
    Tensor rows;
    RowShare share;
  };

  // What was gathered goes where it belongs.
  void take() {
    if (!gather_) return;
    gather_->finish();
    const auto& [rows, share] = under_way_;
    const int rank = comm_->rank();
    const int64_t begin = share.begin(rank);
    const int64_t end = begin + share.length(rank);
    for (const auto& [first, last] : {std::pair(int64_t{0}, begin), std::pair(end, share.rows)}) {
      if (last > first)
        put(rows.narrow(0, first, last - first), gather_->rows().narrow(0, first, last - first));
    }
    // Every rank adds its own bias, as in the other algorithms: to its rows when all have got them.
    if (bias_) rows_of_rank(rows, share, rank).add_(*bias_);
    gather_.reset();
  }

  void put(Tensor to, const Tensor& from) const {
    if (bias_) {
      at::add_out(to, from, *bias_);
    } else {
      to.copy_(from);
    }
  }

  const std::shared_ptr<TorchComm> comm_;
  const Tensor out_;  // [rows, features], contiguous
  const std::optional<Tensor> bias_;
  Block under_way_;
  std::optional<ChannelGather> gather_;
};

// The sum (or mean) of all ranks' x weight^T, plus bias, on every rank.
Tensor matmul_all_reduce_out(const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias, int64_t group_size,
                             std::string_view op, std::string_view algorithm) {
  check_group_size(kMatmulAllReduce, group_size);
  check_algorithm(kMatmulAllReduce, algorithm);
  check_choice(kMatmulAllReduce, "op", "sum avg", op);
  TORCH_OVERLAP_CHECK(x.dim() >= 2, kValue, kMatmulAllReduce,
                      ": expected x of two or more dimensions, got shape ", x.sym_sizes(),
                      "; use x.unsqueeze(0)");
  check_weight(kMatmulAllReduce, x, weight);
  if (bias) check_bias(kMatmulAllReduce, x, *bias, weight);
  auto sizes = x.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

Tensor matmul_all_reduce_kernel(const Tensor& x, const Tensor& weight,
                                const std::optional<Tensor>& bias, std::string_view comm,
                                int64_t group_size, std::string_view op,
                                std::string_view algorithm) {
  auto out = matmul_all_reduce_out(x, weight, bias, group_size, op, algorithm);
  const auto communicator = find_comm(kMatmulAllReduce, comm, group_size);
  const auto inputs = to_rows(x, 0);
  const auto rows = out.flatten(0, -2);
  const RedOpType reduction = op == "avg" ? RedOpType::AVG : RedOpType::SUM;
  const auto chosen = matmul_all_reduce_algorithm(communicator, inputs, weight.size(0), algorithm);
  if (chosen == Algorithm::ring || chosen == Algorithm::fused) {
    BlockwiseAllReduce(communicator, rows, bias)
        .run(inputs, weight, op == "avg", chosen == Algorithm::fused);
    return out;
  }
  if (chosen == Algorithm::sequential) {
    linear_out(kMatmulAllReduce, rows, inputs, weight, std::nullopt);
    communicator->all_reduce(rows, reduction, /*async_op=*/false);
  } else {
    const auto chunks = row_chunks(inputs.size(0), kAllReduceChunks);
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const auto [begin, length] = chunks[i];
      const auto chunk = rows.narrow(0, begin, length);
      {
        const Span span("chunk_gemm", i);
        linear_out(kMatmulAllReduce, chunk, inputs.narrow(0, begin, length), weight, std::nullopt);
      }
      const Span span("chunk_comm", i);
      works.push_back(communicator->all_reduce(chunk, reduction, /*async_op=*/true));
    }
    for (size_t i = 0; i < works.size(); ++i) {
      const Span span("chunk_wait", i);
      works[i]->wait();
    }
  }
  if (bias) out.add_(*bias);
  return out;
}

Tensor matmul_all_reduce_meta(const Tensor& x, const Tensor& weight,
                              const std::optional<Tensor>& bias, std::string_view,
                              int64_t group_size, std::string_view op, std::string_view algorithm) {
  return matmul_all_reduce_out(x, weight, bias, group_size, op, algorithm);
}

// The gradient, P -> R.
//
// With g the gradient and A = all_reduce(g):  x: A weight    weight: A^T x    bias: g summed over
// rows Chunked, the pieces of g are all reduced in the background while the rows of x's gradient
// follow.

bool gradient_goes_chunked(const std::shared_ptr<TorchComm>& comm, const Tensor& sum,
                           std::string_view algorithm) {
  // What is summed is there before the product: nothing for channels.
  const bool is_channels = algorithm == "ring" || algorithm == "fused";
  const auto without_channels = is_channels ? "chunked" : forward_algorithm(algorithm);
  return choose_algorithm({.op = kMatmulAllReduce,
                           .dtype = sum.scalar_type(),
                           .chunk_rows = sum.size(0) / kAllReduceChunks,
                           .prefers_channels = false},
                          without_channels, comm)
             .algorithm != Algorithm::sequential;
}

std::tuple<Tensor, Tensor> gradients_out(const Tensor& x, const Tensor& weight, bool x_wanted,
                                         bool weight_wanted) {
  return {x_wanted ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options()),
          weight_wanted ? at::empty_symint(weight.sym_sizes(), x.options())
                        : at::empty({0}, x.options())};
}

std::tuple<Tensor, Tensor> gradients_kernel(const Tensor& grad, const Tensor& x,
                                            const Tensor& weight, bool x_wanted, bool weight_wanted,
                                            std::string_view comm, int64_t group_size,
                                            std::string_view op, std::string_view algorithm) {
  auto [x_grad, weight_grad] = gradients_out(x, weight, x_wanted, weight_wanted);
  const auto communicator = find_comm(kMatmulAllReduce, comm, group_size);
  const RedOpType reduction = op == "avg" ? RedOpType::AVG : RedOpType::SUM;
  const auto sum = grad.flatten(0, -2).clone(at::MemoryFormat::Contiguous);
  Tensor x_rows = x_wanted ? x_grad.flatten(0, -2) : Tensor();
  if (!gradient_goes_chunked(communicator, sum, algorithm)) {
    communicator->all_reduce(sum, reduction, /*async_op=*/false);
    if (x_wanted) at::mm_out(x_rows, sum, weight);
  } else {
    const auto chunks = row_chunks(sum.size(0), kAllReduceChunks);
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const Span span("chunk_comm", i);
      works.push_back(communicator->all_reduce(sum.narrow(0, chunks[i].begin, chunks[i].length),
                                               reduction, /*async_op=*/true));
    }
    for (size_t i = 0; i < chunks.size(); ++i) {
      {
        const Span span("chunk_wait", i);
        works[i]->wait();
      }
      if (!x_wanted) continue;
      const Span span("chunk_gemm", i);
      auto chunk = x_rows.narrow(0, chunks[i].begin, chunks[i].length);
      at::mm_out(chunk, sum.narrow(0, chunks[i].begin, chunks[i].length), weight);
    }
  }
  if (weight_wanted) at::mm_out(weight_grad, sum.t(), to_rows(x, 0));
  return {std::move(x_grad), std::move(weight_grad)};
}

std::tuple<Tensor, Tensor> gradients_meta(const Tensor&, const Tensor& x, const Tensor& weight,
                                          bool x_wanted, bool weight_wanted, std::string_view,
                                          int64_t, std::string_view, std::string_view) {
  return gradients_out(x, weight, x_wanted, weight_wanted);
}

class MatmulAllReduce : public Function<MatmulAllReduce> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias, std::string_view comm,
                        int64_t group_size, std::string_view op, std::string_view algorithm) {
    const BelowAutograd guard;
    auto out = ops::matmul_all_reduce(x, weight, bias, comm, group_size, op, algorithm);
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["op"] = std::string(op);
    ctx->saved_data["algorithm"] = std::string(algorithm);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    variable_list result(7);
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) {
      result[2] = grads[0].flatten(0, -2).sum(0);
    }
    const bool x_wanted = ctx->needs_input_grad(0);
    const bool weight_wanted = ctx->needs_input_grad(1);
    if (!x_wanted && !weight_wanted) return result;
    const auto& comm = ctx->saved_data["comm"].toStringRef();
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    const auto& op = ctx->saved_data["op"].toStringRef();
    if (at::GradMode::is_enabled()) {  // a gradient of this gradient may be asked
      const auto sum = ops::all_reduce(grads[0], op, comm, group_size);
      if (x_wanted) result[0] = sum.matmul(saved[1]);
      if (weight_wanted) result[1] = sum.flatten(0, -2).t().mm(saved[0].flatten(0, -2));
      return result;
    }
    static const auto gradients =
        find_op<decltype(gradients_kernel)>("_matmul_all_reduce_backward");
    auto [x_grad, weight_grad] =
        gradients.call(grads[0], saved[0], saved[1], x_wanted, weight_wanted, comm, group_size, op,
                       ctx->saved_data["algorithm"].toStringRef());
    if (x_wanted) result[0] = std::move(x_grad);
    if (weight_wanted) result[1] = std::move(weight_grad);
    return result;
  }
};

Tensor matmul_all_reduce_autograd(const Tensor& x, const Tensor& weight,
                                  const std::optional<Tensor>& bias, std::string_view comm,
                                  int64_t group_size, std::string_view op,
                                  std::string_view algorithm) {
  const auto present = bias && bias->defined() ? bias : std::nullopt;
  if (needs_autograd(x) || needs_autograd(weight) || (present && needs_autograd(*present))) {
    return MatmulAllReduce::apply(x, weight, present, comm, group_size, op, algorithm);
  }
  const BelowAutograd guard;
  return ops::matmul_all_reduce(x, weight, present, comm, group_size, op, algorithm);
}

}  // namespace

Algorithm matmul_all_reduce_algorithm(const std::shared_ptr<TorchComm>& comm, const Tensor& rows,
                                      int64_t features, std::string_view asked) {
  const auto problem =
      matmul_all_reduce_problem(*comm, rows.size(0), features, rows.size(1), rows.scalar_type());
  return choose_algorithm(problem, forward_algorithm(asked), comm).algorithm;
}

Tensor matmul_all_reduce(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                         std::string_view comm, int64_t group_size, std::string_view op,
                         std::string_view algorithm) {
  static const auto handle = find_op<decltype(matmul_all_reduce_kernel)>("matmul_all_reduce");
  return handle.call(x, weight, bias, comm, group_size, op, algorithm);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "matmul_all_reduce(Tensor x, Tensor weight, Tensor? bias, str comm, int group_size,"
      " str op=\"sum\", str algorithm=\"auto\") -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_matmul_all_reduce_backward(Tensor grad, Tensor x, Tensor weight, bool x_wanted,"
      " bool weight_wanted, str comm, int group_size, str op, str algorithm) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("matmul_all_reduce", torch_overlap::ops::matmul_all_reduce_kernel);
  m.impl("_matmul_all_reduce_backward", torch_overlap::ops::gradients_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("matmul_all_reduce", torch_overlap::ops::matmul_all_reduce_meta);
  m.impl("_matmul_all_reduce_backward", torch_overlap::ops::gradients_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("matmul_all_reduce", torch_overlap::ops::matmul_all_reduce_autograd);
}
