#include "torch_overlap/ops/overlapped.h"

#include <array>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::ops {
namespace {

constexpr std::array<std::string_view, 4> kAlgorithms{"sequential", "chunked", "ring", "bulk"};

// Below this many rows a chunk's product takes less time than issuing its transfer.
constexpr int64_t kMinChunkRows = 256;

at::Tensor contiguous(const at::Tensor& bias) { return bias.defined() ? bias.contiguous() : bias; }

int64_t element(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

std::string quicker_computed(std::string_view what, int64_t rows) {
  return concat(what, " of ", rows, " rows are quicker computed than sent; ", kMinChunkRows,
                " are worth it");
}

// A channel as it is needed: made, or only looked for.
enum class Need { make, look };

// Why the channels of a communicator cannot be used; empty if they can.
std::string obstacle(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                     at::ScalarType dtype, int64_t gather_bytes, int64_t scatter_bytes, Need need) {
  if (!is_channel_dtype(dtype)) return concat("products of ", dtype, " are torch's");
  if (comm->backend_name() == "fake") return "the communicator has no peers";
  for (const auto& [which, bytes] : {std::pair(OperatorChannel::gather, gather_bytes),
                                     std::pair(OperatorChannel::scatter, scatter_bytes)}) {
    if (bytes == 0) continue;
    const auto channel = need == Need::make ? operator_channel(op, comm, which, bytes)
                                            : existing_operator_channel(*comm, which);
    if (need == Need::make && !channel) {
      return "no memory can be shared during a capture; call the operator once before it";
    }
    if (channel && !channel->transport().is_direct()) return channel->obstacle();
    if (channel && channel->is_broken()) return "an earlier operation ended half way";
  }
  return {};
}

Choice choose(std::string_view op, std::string_view algorithm,
              const std::shared_ptr<TorchComm>& comm, at::ScalarType dtype, int64_t chunk_rows,
              int64_t gather_bytes, int64_t scatter_bytes, Need need) {
  check_algorithm(op, algorithm);
  if (algorithm == "sequential") return {Algorithm::sequential, "asked for"};
  if (algorithm == "chunked") return {Algorithm::chunked, "asked for"};
  if (algorithm == "ring" || algorithm == "bulk") {
    const auto why = obstacle(op, comm, dtype, gather_bytes, scatter_bytes, need);
    TORCH_OVERLAP_CHECK(why.empty(), kUnsupported, op, ": expected what algorithm '", algorithm,
                        "' needs, got: ", why);
    return {algorithm == "ring" ? Algorithm::ring : Algorithm::bulk, "asked for"};
  }
  if (comm->size() == 1) return {Algorithm::sequential, "one rank"};
  if (!is_worth_chunks(chunk_rows)) {
    return {Algorithm::sequential, quicker_computed("chunks", chunk_rows)};
  }
  // On a CPU nothing runs beside a product but the communicator's threads.
  if (comm->device().is_cpu()) return {Algorithm::chunked, "a CPU"};
  const auto why = obstacle(op, comm, dtype, gather_bytes, scatter_bytes, need);
  if (!why.empty()) return {Algorithm::chunked, why};
  return {Algorithm::ring, "ranks reach each other's memory"};
}

// Where a scatter of the problem happens.
struct ScatterPlace {
  std::shared_ptr<OverlapChannel> channel;
  RowShare rows;
  int64_t columns;
  at::Tensor partial;
  int64_t received_at;
};

ScatterPlace place_of(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                      const ScatterMultiply& problem) {
  const RowShare rows{problem.inputs.at(0).size(0), comm->size()};
  const int64_t columns = problem.weights.at(0).size(1);
  const auto dtype = problem.out.scalar_type();
  const auto channel = operator_channel(op, comm, OperatorChannel::scatter,
                                        scatter_bytes(*comm, rows.rows, columns, dtype));
  return {.channel = channel,
          .rows = rows,
          .columns = columns,
          .partial = channel->data(0, {rows.rows, columns}, dtype),
          .received_at = rows.rows * columns * element(dtype)};
}

std::vector<GemmArgs> partial_products(const ScatterMultiply& problem, const at::Tensor& partial) {
  std::vector<GemmArgs> products;
  for (size_t i = 0; i < problem.inputs.size(); ++i) {
    GemmArgs args;
    args.lhs = operand(problem.inputs[i]);
    args.rhs = operand(problem.weights[i]);
    args.out = partial;
    args.accumulate = i > 0 || problem.start.defined();
    products.push_back(std::move(args));
  }
  return products;
}

}  // namespace

std::string_view to_string(Algorithm algorithm) {
  return kAlgorithms.at(static_cast<size_t>(algorithm));
}

void check_algorithm(std::string_view op, std::string_view algorithm) {
  for (const auto known : kAlgorithms) {
    if (algorithm == known) return;
  }
  TORCH_OVERLAP_CHECK(algorithm == "auto", kValue, op,
                      ": expected algorithm to be one of auto, sequential, chunked, ring, bulk, "
                      "got '",
                      algorithm, "'");
}

Choice choose_algorithm(std::string_view op, std::string_view algorithm,
                        const std::shared_ptr<TorchComm>& comm, at::ScalarType dtype,
                        int64_t chunk_rows, int64_t gather_bytes, int64_t scatter_bytes) {
  return choose(op, algorithm, comm, dtype, chunk_rows, gather_bytes, scatter_bytes, Need::make);
}

Choice explain_algorithm(std::string_view op, std::string_view algorithm,
                         const std::shared_ptr<TorchComm>& comm, at::ScalarType dtype,
                         int64_t chunk_rows, int64_t gather_bytes, int64_t scatter_bytes) {
  return choose(op, algorithm, comm, dtype, chunk_rows, gather_bytes, scatter_bytes, Need::look);
}

Choice choose_all_reduce(const TorchComm& comm, std::string_view algorithm, int64_t rows) {
  check_algorithm("matmul_all_reduce", algorithm);
  if (algorithm == "ring") return {Algorithm::ring, "asked for"};
  if (algorithm == "chunked") return {Algorithm::chunked, "asked for"};
  if (algorithm != "auto") return {Algorithm::sequential, "asked for"};
  if (comm.size() == 1) return {Algorithm::sequential, "one rank"};
  const int64_t chunk_rows = rows / kAllReduceChunks;
  if (is_worth_chunks(chunk_rows)) {
    return {Algorithm::chunked, concat("pieces of ", chunk_rows, " rows")};
  }
  return {Algorithm::sequential, quicker_computed("pieces", chunk_rows)};
}

bool is_channel_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

bool is_worth_chunks(int64_t rows) { return rows >= kMinChunkRows; }

GemmOperand operand(const at::Tensor& x) {
  if (x.stride(1) == 1) return {.data = x};
  if (x.stride(0) == 1) return {.data = x.t(), .transposed = true};
  return {.data = x.contiguous()};
}

int64_t gather_bytes(const TorchComm& comm, const at::Tensor& own) {
  return comm.size() * static_cast<int64_t>(own.nbytes());
}

int64_t scatter_bytes(const TorchComm& comm, int64_t rows, int64_t columns, at::ScalarType dtype) {
  // The products of all rows, and a part of this rank's from each.
  const RowShare share{rows, comm.size()};
  return (rows + share.size * share.largest()) * columns * element(dtype);
}

void ring_gather_multiply(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                          const at::Tensor& own, at::TensorList weights,
                          const std::vector<at::Tensor>& biases,
                          const std::vector<at::Tensor>& products, const at::Tensor& gathered) {
  std::vector<GemmArgs> gemms(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    gemms[i].rhs = operand(weights[i].t());
    gemms[i].out = products[i];
    gemms[i].epilogue.bias = contiguous(biases[i]);
  }
  ring_gather_gemms(op, comm, own, std::move(gemms), gathered);
}

void ring_gather_gemms(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                       const at::Tensor& own, std::vector<GemmArgs> gemms,
                       const at::Tensor& gathered) {
  const auto channel =
      operator_channel(op, comm, OperatorChannel::gather, gather_bytes(*comm, own));
  const RowShare rows{own.size(0) * comm->size(), comm->size()};
  GatherGemm problem{.gemms = std::move(gemms),
                     .rows = rows,
                     .own = own,
                     .gathered = channel->data(0, {rows.rows, own.size(1)}, own.scalar_type()),
                     .copy = gathered,
                     .order = GatherOrder::direct};
  for (auto& args : problem.gemms) args.lhs.data = problem.gathered;
  run_gather_gemm(op, *channel, problem);
}

ChannelGather::ChannelGather(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                             const at::Tensor& own, int64_t all_rows) {
  const RowShare rows{all_rows > 0 ? all_rows : own.size(0) * comm->size(), comm->size()};
  channel_ = operator_channel(op, comm, OperatorChannel::gather,
                              rows.rows * own.size(1) * element(own.scalar_type()));
  use_.emplace(*channel_);
  rows_ = channel_->data(0, {rows.rows, own.size(1)}, own.scalar_type());
  gather_.emplace(op, *channel_, rows, own, rows_);
}

void ring_multiply_scatter(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           const ScatterMultiply& problem) {
  const ScatterPlace place = place_of(op, comm, problem);
  const OverlapChannel::Use use(*place.channel);
  if (problem.start.defined()) place.partial.copy_(problem.start);
  run_scatter_gemm(op, *place.channel,
                   {.gemms = partial_products(problem, place.partial),
                    .rows = place.rows,
                    .partial = place.partial,
                    .at = place.received_at,
                    .out = problem.out,
                    .scale_inv = {},
                    .factor = problem.mean ? 1.0 / comm->size() : 1.0,
                    .bias = contiguous(problem.bias)});
}

void bulk_multiply_scatter(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           const ScatterMultiply& problem, const std::function<void()>& before_sum,
                           const std::vector<GemmArgs>& beside) {
  const ScatterPlace place = place_of(op, comm, problem);
  const OverlapChannel::Use use(*place.channel);
  if (problem.start.defined()) place.partial.copy_(problem.start);
  for (const auto& args : partial_products(problem, place.partial)) gemm(op, args);
  before_sum();
  run_bulk_gemm(op, *place.channel,
                {.gemms = beside,
                 .rows = place.rows,
                 .columns = place.columns,
                 .dtype = problem.out.scalar_type(),
                 .gathers = false,
                 .out = problem.out,
                 .scale_inv = {},
                 .blocks = kBulkBlocks});
}

}  // namespace torch_overlap::ops
