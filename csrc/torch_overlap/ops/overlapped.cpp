#include "torch_overlap/ops/overlapped.h"

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/operand.h"
#include "torch_overlap/overlap/op_channels.h"

namespace torch_overlap::ops {
namespace {

// Where scales lie behind the rows that they belong to.
constexpr int64_t kScalesAlignment = 256;

at::Tensor contiguous(const at::Tensor& bias) { return bias.defined() ? bias.contiguous() : bias; }

int64_t element(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// Whether a rank's chunk of such rows is copied in less time than lanes for that cost the host.
bool is_quick(const RowShare& share, const at::Tensor& rows) {
  constexpr int64_t kBytes = 512 << 10;
  const int64_t bytes = share.largest() * rows.size(1) * element(rows.scalar_type());
  return !is_worth_chunks(share.largest()) && bytes <= kBytes;
}

int64_t scales_at(const TorchComm& comm, const at::Tensor& own) {
  const int64_t bytes = comm.size() * static_cast<int64_t>(own.nbytes());
  return (bytes + kScalesAlignment - 1) / kScalesAlignment * kScalesAlignment;
}

// Where a scatter happens.
struct ScatterPlace {
  std::shared_ptr<OverlapChannel> channel;
  RowShare rows;
  at::Tensor partial;  // [rows, columns]
  int64_t received_at;
};

ScatterPlace scatter_place(std::string_view op, const std::shared_ptr<TorchComm>& comm,
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
          .received_at = rows.rows * columns * element(dtype)};
}

std::vector<GemmArgs> products_of(const ScatterMultiply& problem) {
  std::vector<GemmArgs> products;
  for (size_t i = 0; i < problem.inputs.size(); ++i) {
    GemmArgs args;
    args.lhs = operand(problem.inputs[i]);
    args.rhs = operand(problem.weights[i]);
    args.beside_transfers = true;
    products.push_back(std::move(args));
  }
  return products;
}

// Their sum, and `start`, goes to where the scatter takes it from.
void add_up_in(const ScatterPlace& place, const at::Tensor& start, std::vector<GemmArgs>& gemms) {
  if (start.defined()) place.partial.copy_(start);
  for (size_t i = 0; i < gemms.size(); ++i) {
    gemms[i].out = place.partial;
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

// Whether fused kernels do all that is asked of a product.
bool has_fused(const OverlapChannel& channel, const GemmArgs& args, const RowShare& rows) {
  const GemmEpilogue& epilogue = args.epilogue;
  if (!channel.transport().is_direct() || args.accumulate || args.sm_target != 0 ||
      args.out_scale.defined() || args.out_amax.defined() || epilogue.gelu ||
      epilogue.pre_gelu_out.defined() || epilogue.gelu_input.defined() ||
      epilogue.bias_grad.defined() || epilogue.residual.defined()) {
    return false;
  }
  return channel.device().fused_obstacle(fused_shape(args, rows, channel.group().device())).empty();
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
  const int64_t bytes =
      scales.defined() ? scales_at(comm, own) + comm.size() * static_cast<int64_t>(scales.nbytes())
                       : comm.size() * static_cast<int64_t>(own.nbytes());
  return std::max<int64_t>(bytes, 1);
}

int64_t scatter_bytes(const TorchComm& comm, int64_t rows, int64_t columns, at::ScalarType dtype,
                      int64_t row_unit) {
  // The products of all rows, and a part of this rank's from each.
  const RowShare share{rows, comm.size(), row_unit};
  return std::max<int64_t>((rows + share.size * share.largest()) * columns * element(dtype), 1);
}

int64_t direct_bytes(const TorchComm& comm, int64_t rows, int64_t columns, at::ScalarType dtype) {
  return std::max<int64_t>(direct_sum_room({rows, comm.size()}, columns * element(dtype)), 1);
}

void ring_gather_multiply(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                          const GatherInput& input, at::TensorList weights,
                          const std::vector<at::Tensor>& biases,
                          const std::vector<at::Tensor>& products) {
  std::vector<GemmArgs> gemms(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    gemms[i].rhs = transposed_operand(weights[i]);
    gemms[i].out = products[i];
    gemms[i].epilogue.bias = contiguous(biases[i]);
  }
  ring_gather_gemms(op, comm, input, std::move(gemms));
}

void ring_gather_gemms(std::string_view op, const std::shared_ptr<TorchComm>& comm,
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
                     .order = GatherOrder::direct};
  if (input.scales.defined()) {
    problem.scales = gathered(input.scales, scales_at(*comm, input.own), input.gathered_scales);
  }
  for (auto& args : problem.gemms) {
    args.lhs.data = problem.data.all;
    if (input.scales.defined()) args.lhs.scale_inv = problem.scales.all;
  }
  problem.as_one = is_quick(rows, input.own);
  problem.direct = input.direct;
  problem.fused =
      input.fused && std::all_of(problem.gemms.begin(), problem.gemms.end(),
                                 [&](const auto& args) { return has_fused(*channel, args, rows); });
  run_gather_gemm(op, *channel, problem);
}

ChannelGather::ChannelGather(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                             const at::Tensor& own, const RowShare& share, bool with_own) {
  channel_ = operator_channel(op, comm, OperatorChannel::gather,
                              share.rows * own.size(1) * element(own.scalar_type()));
  use_.emplace(*channel_);
  rows_ = channel_->data(0, {share.rows, own.size(1)}, own.scalar_type());
  gather_.emplace(op, *channel_, share, own, rows_, with_own, is_quick(share, own));
}

void ring_scatter_gemms(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                        std::vector<GemmArgs> gemms, const ScatterSum& sum) {
  const auto all_rows = gemm_shape(gemms.at(0)).m;
  const ScatterPlace place = scatter_place(op, comm, all_rows, sum);
  const OverlapChannel::Use use(*place.channel);
  add_up_in(place, sum.start, gemms);
  const bool fused = sum.fused && gemms.size() == 1 && !sum.start.defined() &&
                     has_fused(*place.channel, gemms[0], place.rows);
  run_scatter_gemm(op, *place.channel,
                   {.gemms = std::move(gemms),
                    .rows = place.rows,
                    .partial = place.partial,
                    .at = place.received_at,
                    .out = sum.out,
                    .scale_inv = {},
                    .factor = sum.mean ? 1.0 / comm->size() : 1.0,
                    .bias = contiguous(sum.bias),
                    .ranks_share_k = sum.ranks_share_k,
                    .fused = fused,
                    .as_one = is_quick(place.rows, sum.out)});
}

void direct_sum_gemm(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                     DirectProduct problem) {
  const at::Tensor& out = problem.out;
  const auto channel =
      operator_channel(op, comm, OperatorChannel::sum,
                       direct_bytes(*comm, problem.rows, out.size(1), out.scalar_type()));
  run_direct_sum(op, *channel,
                 {.gemm = std::move(problem.product),
                  .rows = {problem.rows, comm->size()},
                  .everywhere = problem.everywhere,
                  .out = out,
                  .factor = problem.mean ? 1.0 / comm->size() : 1.0,
                  .bias = contiguous(problem.bias)});
}

bool fused_reduce_gemm(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                       const DirectProduct& problem) {
  GemmArgs args = problem.product;
  args.out = problem.out;
  const RowShare rows{problem.rows, comm->size()};
  const c10::Device device = comm->device();
  const int64_t room =
      overlap_device(op, device.type()).reduce_room(fused_shape(args, rows, device));
  if (room == 0) return false;
  const auto channel = operator_channel(op, comm, OperatorChannel::reduce, room);
  if (!has_fused(*channel, args, rows)) return false;
  run_fused_reduce(op, *channel,
                   {.gemm = std::move(args),
                    .rows = rows,
                    .everywhere = true,
                    .out = problem.out,
                    .factor = problem.mean ? 1.0 / comm->size() : 1.0,
                    .bias = contiguous(problem.bias)});
  return true;
}

void ring_multiply_scatter(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           const ScatterMultiply& problem) {
  ring_scatter_gemms(op, comm, products_of(problem), problem.sum);
}

void bulk_multiply_scatter(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           const ScatterMultiply& problem, const std::function<void()>& before_sum,
                           const std::vector<GemmArgs>& beside) {
  const ScatterSum& sum = problem.sum;
  const ScatterPlace place = scatter_place(op, comm, problem.inputs.at(0).size(0), sum);
  const OverlapChannel::Use use(*place.channel);
  auto products = products_of(problem);
  add_up_in(place, sum.start, products);
  for (const auto& args : products) gemm(op, args);
  before_sum();
  run_bulk_gemm(op, *place.channel,
                {.gemms = beside,
                 .rows = place.rows,
                 .columns = sum.out.size(1),
                 .dtype = sum.out.scalar_type(),
                 .gathers = false,
                 .out = sum.out,
                 .scale_inv = {},
                 .blocks = kBulkBlocks});
}

}  // namespace torch_overlap::ops
