#include "torch_overlap/ops/overlapped.h"

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/operand.h"
#include "torch_overlap/overlap/op_channels.h"

namespace torch_overlap::ops {
namespace {

// Alignment in bytes of scales that are stored after the rows that they belong to.
constexpr int64_t kScalesAlignment = 256;

at::Tensor contiguous(const at::Tensor& bias) { return bias.defined() ? bias.contiguous() : bias; }

int64_t element_bytes(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// True if the copy of one rank's chunk of such rows takes less time than the host needs to set up
// lanes.
bool is_small_transfer(const RowShare& share, const at::Tensor& rows) {
  constexpr int64_t kBytes = 512 << 10;
  const int64_t bytes = share.largest() * rows.size(1) * element_bytes(rows.scalar_type());
  return !is_worth_chunks(share.largest()) && bytes <= kBytes;
}

int64_t scales_offset_bytes(const TorchComm& comm, const at::Tensor& own) {
  const int64_t bytes = comm.size() * static_cast<int64_t>(own.nbytes());
  return (bytes + kScalesAlignment - 1) / kScalesAlignment * kScalesAlignment;
}

// The buffers of a scatter.
struct ScatterBuffers {
  std::shared_ptr<OverlapChannel> channel;
  RowShare rows;
  at::Tensor partial;  // [rows, columns]
  int64_t received_offset_bytes;
};

ScatterBuffers make_scatter_buffers(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                                    int64_t all_rows, const ScatterSum& sum) {
  const RowShare rows{all_rows, comm->size(), sum.row_unit};
  const at::Tensor& out = sum.out;
  const int64_t columns = out.size(1);
  const auto dtype = out.scalar_type();
  const auto channel =
      operator_channel(op, comm, OperatorChannel::scatter,
                       scatter_bytes(*comm, all_rows, columns, dtype, sum.row_unit));
  return {.channel = channel,
          .rows = rows,
          .partial = channel->data(0, {rows.rows, columns}, dtype),
          .received_offset_bytes = rows.rows * columns * element_bytes(dtype)};
}

std::vector<GemmArgs> products_of(const ScatterMultiply& problem) {
  std::vector<GemmArgs> products;
  for (size_t i = 0; i < problem.inputs.size(); ++i) {
    GemmArgs args;
    args.lhs = operand(problem.inputs[i]);
    args.rhs = operand(problem.weights[i]);
    args.overlaps_communication = true;
    products.push_back(std::move(args));
  }
  return products;
}

// Computes the sum of the products and `start` in the buffer from which the scatter reads.
void accumulate_into(const ScatterBuffers& buffers, const at::Tensor& start,
                     std::vector<GemmArgs>& gemms) {
  if (start.defined()) buffers.partial.copy_(start);
  for (size_t i = 0; i < gemms.size(); ++i) {
    gemms[i].out = buffers.partial;
    gemms[i].accumulate = i > 0 || start.defined();
  }
}

FusedTypes fused_types(const GemmArgs& args) {
  return {.lhs = args.lhs.data.scalar_type(),
          .rhs = args.rhs.data.scalar_type(),
          .out = args.out.scalar_type(),
          .scaling = args.rhs.scaling,
          .use_split_accumulator = args.use_split_accumulator};
}

FusedShape fused_shape(const GemmArgs& args, const RowShare& rows, c10::Device device) {
  const GemmShape shape = gemm_shape(args);
  return {.device = device, .types = fused_types(args), .rows = rows, .n = shape.n, .k = shape.k};
}

// True if fused kernels support everything that the product asks for.
bool supports_fused(const OverlapChannel& channel, const GemmArgs& args, const RowShare& rows) {
  const GemmEpilogue& epilogue = args.epilogue;
  if (!channel.transport().is_peer_mapped() || args.accumulate || args.sm_target != 0 ||
      args.out_scale.defined() || args.out_amax.defined() || epilogue.gelu ||
      epilogue.pre_gelu_out.defined() || epilogue.gelu_input.defined() ||
      epilogue.bias_grad.defined() || epilogue.residual.defined()) {
    return false;
  }
  return channel.device()
      .fused_unsupported_reason(fused_shape(args, rows, channel.group().device()))
      .empty();
}

}  // namespace

GemmOperand operand(const at::Tensor& x) {
  if (has_contiguous_rows(x)) return {.data = x};
  if (has_contiguous_rows(x.t())) return {.data = x.t(), .transposed = true};
  return {.data = x.contiguous()};
}

GemmOperand transposed_operand(const at::Tensor& x) {
  GemmOperand transposed = operand(x);
  transposed.transposed = !transposed.transposed;
  return transposed;
}

int64_t gather_bytes(const TorchComm& comm, const at::Tensor& own, const at::Tensor& scales) {
  const int64_t bytes = scales.defined() ? scales_offset_bytes(comm, own) +
                                               comm.size() * static_cast<int64_t>(scales.nbytes())
                                         : comm.size() * static_cast<int64_t>(own.nbytes());
  return std::max<int64_t>(bytes, 1);
}

int64_t scatter_bytes(const TorchComm& comm, int64_t rows, int64_t columns, at::ScalarType dtype,
                      int64_t row_unit) {
  // The products of all rows, and each rank's part of this rank's rows.
  const RowShare share{rows, comm.size(), row_unit};
  return std::max<int64_t>((rows + share.size * share.largest()) * columns * element_bytes(dtype),
                           1);
}

int64_t low_latency_bytes(const TorchComm& comm, int64_t rows, int64_t columns,
                          at::ScalarType dtype) {
  return std::max<int64_t>(
      low_latency_sum_bytes({rows, comm.size()}, columns * element_bytes(dtype)), 1);
}

void channel_gather_linear(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           const GatherInput& input, at::TensorList weights,
                           const std::vector<at::Tensor>& biases,
                           const std::vector<at::Tensor>& products) {
  std::vector<GemmArgs> gemms(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    gemms[i].rhs = transposed_operand(weights[i]);
    gemms[i].out = products[i];
    gemms[i].epilogue.bias = contiguous(biases[i]);
  }
  channel_gather_gemms(op, comm, input, std::move(gemms));
}

void channel_gather_gemms(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                          const GatherInput& input, std::vector<GemmArgs> gemms) {
  const auto channel = operator_channel(op, comm, OperatorChannel::gather,
                                        gather_bytes(*comm, input.own, input.scales));
  const RowShare rows{input.own.size(0) * comm->size(), comm->size()};
  const auto gathered = [&](const at::Tensor& own, int64_t at, const at::Tensor& copy) {
    return GatheredRows{.own = own,
                        .all = channel->data(at, {rows.rows, own.size(1)}, own.scalar_type()),
                        .copy = copy};
  };
  GatherGemm problem{.gemms = std::move(gemms),
                     .rows = rows,
                     .data = gathered(input.own, 0, input.gathered),
                     .scales = {},
                     .order = GatherOrder::all_pairs};
  if (input.scales.defined()) {
    problem.scales =
        gathered(input.scales, scales_offset_bytes(*comm, input.own), input.gathered_scales);
  }
  for (auto& args : problem.gemms) {
    args.lhs.data = problem.data.all;
    if (input.scales.defined()) args.lhs.scale_inv = problem.scales.all;
  }
  problem.single_lane = is_small_transfer(rows, input.own);
  problem.method = input.method;
  if (problem.method == GatherMethod::fused &&
      !std::all_of(problem.gemms.begin(), problem.gemms.end(),
                   [&](const auto& args) { return supports_fused(*channel, args, rows); })) {
    problem.method = GatherMethod::p2p;
  }
  run_gather_gemm(op, *channel, problem);
}

ChannelGather::ChannelGather(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                             const at::Tensor& own, const RowShare& share, bool with_own) {
  channel_ = operator_channel(op, comm, OperatorChannel::gather,
                              share.rows * own.size(1) * element_bytes(own.scalar_type()));
  use_.emplace(*channel_);
  rows_ = channel_->data(0, {share.rows, own.size(1)}, own.scalar_type());
  gather_.emplace(op, *channel_, share, own, rows_, with_own, is_small_transfer(share, own));
}

void channel_scatter_gemms(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           std::vector<GemmArgs> gemms, const ScatterSum& sum) {
  const auto all_rows = gemm_shape(gemms.at(0)).m;
  const ScatterBuffers buffers = make_scatter_buffers(op, comm, all_rows, sum);
  const OverlapChannel::Use use(*buffers.channel);
  accumulate_into(buffers, sum.start, gemms);
  const bool fused = sum.fused && gemms.size() == 1 && !sum.start.defined() &&
                     supports_fused(*buffers.channel, gemms[0], buffers.rows);
  run_scatter_gemm(op, *buffers.channel,
                   {.gemms = std::move(gemms),
                    .rows = buffers.rows,
                    .partial = buffers.partial,
                    .at = buffers.received_offset_bytes,
                    .out = sum.out,
                    .scale_inv = {},
                    .factor = sum.mean ? 1.0 / comm->size() : 1.0,
                    .bias = contiguous(sum.bias),
                    .ranks_share_k = sum.ranks_share_k,
                    .fused = fused,
                    .single_lane = is_small_transfer(buffers.rows, sum.out)});
}

void low_latency_sum_gemm(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                          ReduceProduct problem) {
  const at::Tensor& out = problem.out;
  const auto channel =
      operator_channel(op, comm, OperatorChannel::sum,
                       low_latency_bytes(*comm, problem.rows, out.size(1), out.scalar_type()));
  run_low_latency_sum(op, *channel,
                      {.gemm = std::move(problem.product),
                       .rows = {problem.rows, comm->size()},
                       .everywhere = problem.everywhere,
                       .out = out,
                       .factor = problem.mean ? 1.0 / comm->size() : 1.0,
                       .bias = contiguous(problem.bias)});
}

bool try_fused_all_reduce_gemm(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                               const ReduceProduct& problem) {
  GemmArgs args = problem.product;
  args.out = problem.out;
  const RowShare rows{problem.rows, comm->size()};
  const c10::Device device = comm->device();
  const int64_t required_bytes =
      overlap_device(op, device.type()).max_fused_allreduce_bytes(fused_shape(args, rows, device));
  if (required_bytes == 0) return false;
  const auto channel = operator_channel(op, comm, OperatorChannel::reduce, required_bytes);
  if (!supports_fused(*channel, args, rows)) return false;
  run_fused_reduce(op, *channel,
                   {.gemm = std::move(args),
                    .rows = rows,
                    .everywhere = true,
                    .out = problem.out,
                    .factor = problem.mean ? 1.0 / comm->size() : 1.0,
                    .bias = contiguous(problem.bias)});
  return true;
}

void channel_scatter_matmul(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                            const ScatterMultiply& problem) {
  channel_scatter_gemms(op, comm, products_of(problem), problem.sum);
}

void bulk_scatter_matmul(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                         const ScatterMultiply& problem,
                         const std::function<void()>& before_reduction,
                         const std::vector<GemmArgs>& concurrent_gemms) {
  const ScatterSum& sum = problem.sum;
  const ScatterBuffers buffers = make_scatter_buffers(op, comm, problem.inputs.at(0).size(0), sum);
  const OverlapChannel::Use use(*buffers.channel);
  auto products = products_of(problem);
  accumulate_into(buffers, sum.start, products);
  for (const auto& args : products) gemm(op, args);
  before_reduction();
  run_bulk_gemm(op, *buffers.channel,
                {.gemms = concurrent_gemms,
                 .rows = buffers.rows,
                 .columns = sum.out.size(1),
                 .dtype = sum.out.scalar_type(),
                 .gathers = false,
                 .out = sum.out,
                 .scale_inv = {},
                 .blocks = kBulkBlocks});
}

}  // namespace torch_overlap::ops
