#include "torch_overlap/ops/overlapped.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "torch_overlap/base/rounding.h"
#include "torch_overlap/common/views.h"
#include "torch_overlap/ops/rows.h"
#include "torch_overlap/overlap/op_channels.h"

namespace torch_overlap::ops {
namespace {

// Alignment in bytes of scales that are stored after the rows that they belong to.
constexpr int64_t kScalesAlignment = 256;

int64_t element_bytes(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// True if the copy of one rank's chunk of such rows takes less time than the host needs to set up
// streams.
bool is_small_transfer(const RowPartition& partition, const at::Tensor& rows) {
  constexpr int64_t kBytes = 512 << 10;
  const int64_t bytes = partition.largest() * rows.size(1) * element_bytes(rows.scalar_type());
  return !is_worth_chunks(partition.largest()) && bytes <= kBytes;
}

int64_t scales_offset_bytes(const TorchComm& comm, const at::Tensor& own) {
  const int64_t bytes = comm.size() * static_cast<int64_t>(own.nbytes());
  return round_up(bytes, kScalesAlignment);
}

at::Tensor all_rows_like(const TorchComm& comm, const at::Tensor& own) {
  return at::empty({comm.size() * own.size(0), own.size(1)}, own.options());
}

int64_t features_of(const GemmOperand& rhs) { return rhs.data.size(rhs.transposed ? 0 : 1); }
int64_t depth_of(const GemmOperand& rhs) { return rhs.data.size(rhs.transposed ? 1 : 0); }

// --- Gathers -------------------------------------------------------------------------------------

// Product i of some of the gathered rows.
GemmArgs product_with_lhs(const GemmArgs& whole, const at::Tensor& rows, const at::Tensor& scales) {
  GemmArgs args = whole;
  args.lhs.data = rows;
  if (scales.defined()) args.lhs.scale_inv = scales;
  return args;
}

void gather_then_multiply(const GatherProducts& products) {
  TorchComm& comm = *products.comm;
  const auto destination = [&](const at::Tensor& own, const at::Tensor& gathered) {
    return gathered.defined() || !own.defined() ? gathered : all_rows_like(comm, own);
  };
  const auto rows = destination(products.own, products.gathered);
  const auto scales = destination(products.scales, products.gathered_scales);
  std::vector<Product> checked;  // before anything is sent
  for (const GemmArgs& args : products.gemms) {
    checked.emplace_back(products.op, product_with_lhs(args, rows, scales));
  }
  if (scales.defined()) comm.all_gather_single(scales, products.scales, /*async_op=*/false);
  // 8-bit floats are sent as bytes, because not every backend has them.
  const auto sent = [](const at::Tensor& data) {
    return c10::isFloat8Type(data.scalar_type()) ? data.view(at::kByte) : data;
  };
  comm.all_gather_single(sent(rows), sent(products.own), /*async_op=*/false);
  for (const Product& product : checked) product.run();
  if (products.use_rows) products.use_rows(rows);
}

// Through the communicator the rows arrive where they are wanted. A channel has memory of its own.
struct GatherBuffers {
  std::shared_ptr<OverlapChannel> channel;
  GatheredRows data;
  GatheredRows scales;
};

GatherBuffers gather_buffers(const GatherProducts& products, Algorithm algorithm) {
  const auto& comm = products.comm;
  if (algorithm == Algorithm::pipelined) {
    const auto rows = [&](const at::Tensor& own, const at::Tensor& gathered) {
      if (!own.defined()) return GatheredRows{};
      return GatheredRows{.own = own,
                          .all = gathered.defined() ? gathered : all_rows_like(*comm, own)};
    };
    return {.channel = pipeline_channel(products.op, comm, OperatorChannel::gather),
            .data = rows(products.own, products.gathered),
            .scales = rows(products.scales, products.gathered_scales)};
  }
  const auto channel = operator_channel(products.op, comm, OperatorChannel::gather,
                                        gather_bytes(*comm, products.own, products.scales));
  const auto rows = [&](const at::Tensor& own, int64_t at, const at::Tensor& gathered) {
    if (!own.defined()) return GatheredRows{};
    return GatheredRows{
        .own = own,
        .all = channel->data(at, {comm->size() * own.size(0), own.size(1)}, own.scalar_type()),
        .copy = gathered};
  };
  return {.channel = channel,
          .data = rows(products.own, 0, products.gathered),
          .scales = rows(products.scales, scales_offset_bytes(*comm, products.own),
                         products.gathered_scales)};
}

void gather_in_chunks(GatherProducts products, Algorithm algorithm) {
  const RowPartition partition{products.own.size(0) * products.comm->size(), products.comm->size()};
  const GatherBuffers buffers = gather_buffers(products, algorithm);
  const bool is_pipelined = algorithm == Algorithm::pipelined;
  std::optional<OverlapChannel::Use> use;
  if (products.use_rows && !is_pipelined) use.emplace(*buffers.channel);
  for (GemmArgs& args : products.gemms) {
    args = product_with_lhs(args, buffers.data.all, buffers.scales.all);
  }
  const auto execute = algorithm == Algorithm::fused         ? run_fused_gather
                       : algorithm == Algorithm::low_latency ? run_low_latency_gather
                                                             : run_gather_gemm;
  execute(products.op, *buffers.channel,
          {.gemms = std::move(products.gemms),
           .rows = partition,
           .data = buffers.data,
           .scales = buffers.scales,
           .order = GatherOrder::all_pairs,
           .single_stream = is_small_transfer(partition, products.own)});
  // The other ranks' rows are in place.
  const auto copy_own = [&](const at::Tensor& own, const at::Tensor& all) {
    row_view(all, partition.begin(products.comm->rank()), own.size(0)).copy_(own);
  };
  if (products.use_rows || (is_pipelined && products.gathered.defined())) {
    copy_own(products.own, buffers.data.all);
  }
  if (is_pipelined && products.gathered_scales.defined()) {
    copy_own(products.scales, products.gathered_scales);
  }
  if (products.use_rows) products.use_rows(buffers.data.all);
}

// --- Scatters ------------------------------------------------------------------------------------

struct ScatterBuffers {
  std::shared_ptr<OverlapChannel> channel;
  RowPartition rows;
  at::Tensor partial;   // [rows, columns]: this rank's products
  at::Tensor received;  // see ReduceScatterGemm
};

RowPartition partition_of(const ReduceScatterProducts& products) {
  return {gemm_shape(products.gemms.at(0)).m, products.comm->size(), products.row_unit};
}

ScatterBuffers scatter_buffers(const ReduceScatterProducts& products, Algorithm algorithm) {
  const auto& comm = products.comm;
  const RowPartition rows = partition_of(products);
  const int64_t columns = products.out.size(1);
  const auto dtype = products.out.scalar_type();
  const std::vector<int64_t> partial{rows.rows, columns};
  const std::vector<int64_t> received{comm->size() * rows.largest(), columns};
  if (algorithm == Algorithm::pipelined) {
    return {.channel = pipeline_channel(products.op, comm, OperatorChannel::reduce_scatter),
            .rows = rows,
            .partial = at::empty(partial, products.out.options()),
            .received = at::empty(received, products.out.options())};
  }
  const auto channel =
      operator_channel(products.op, comm, OperatorChannel::reduce_scatter,
                       reduce_scatter_bytes(*comm, rows.rows, columns, dtype, products.row_unit));
  return {.channel = channel,
          .rows = rows,
          .partial = channel->data(0, partial, dtype),
          .received = channel->data(rows.rows * columns * element_bytes(dtype), received, dtype)};
}

// Lets the products and `start` be summed in `partial`.
void accumulate_into(const at::Tensor& partial, const at::Tensor& start,
                     std::vector<GemmArgs>& gemms) {
  if (start.defined()) at::Tensor(partial).copy_(start);
  for (size_t i = 0; i < gemms.size(); ++i) {
    gemms[i].out = partial;
    gemms[i].accumulate = i > 0 || start.defined();
  }
}

void multiply_then_reduce_scatter(const ReduceScatterProducts& products) {
  const auto partial =
      at::empty({partition_of(products).rows, products.out.size(1)}, products.out.options());
  auto gemms = products.gemms;
  accumulate_into(partial, products.start, gemms);
  for (GemmArgs& args : gemms) Product(products.op, std::move(args)).run();
  products.comm->reduce_scatter_single(products.out, partial,
                                       products.mean ? RedOpType::AVG : RedOpType::SUM,
                                       /*async_op=*/false);
  if (products.bias.defined()) at::Tensor(products.out).add_(products.bias);
  if (products.meanwhile) products.meanwhile();
}

void scatter_in_chunks(ReduceScatterProducts products, Algorithm algorithm) {
  const ScatterBuffers buffers = scatter_buffers(products, algorithm);
  const OverlapChannel::Use use(*buffers.channel);
  accumulate_into(buffers.partial, products.start, products.gemms);
  const auto execute =
      algorithm == Algorithm::fused ? run_fused_reduce_scatter : run_reduce_scatter_gemm;
  execute(products.op, *buffers.channel,
          {.gemms = std::move(products.gemms),
           .rows = buffers.rows,
           .partial = buffers.partial,
           .received = buffers.received,
           .out = products.out,
           .factor = products.mean ? 1.0 / products.comm->size() : 1.0,
           .bias = contiguous_or_undefined(products.bias),
           .ranks_share_k = products.ranks_share_k,
           .single_stream = is_small_transfer(buffers.rows, products.out),
           .meanwhile = std::move(products.meanwhile)});
}

}  // namespace

int64_t gather_bytes(const TorchComm& comm, const at::Tensor& own, const at::Tensor& scales) {
  const int64_t bytes = scales.defined() ? scales_offset_bytes(comm, own) +
                                               comm.size() * static_cast<int64_t>(scales.nbytes())
                                         : comm.size() * static_cast<int64_t>(own.nbytes());
  return std::max<int64_t>(bytes, 1);
}

int64_t reduce_scatter_bytes(const TorchComm& comm, int64_t rows, int64_t columns,
                             at::ScalarType dtype, int64_t row_unit) {
  // The products of all rows, and each rank's part of this rank's rows.
  const RowPartition partition{rows, comm.size(), row_unit};
  return std::max<int64_t>(
      (rows + partition.size * partition.largest()) * columns * element_bytes(dtype), 1);
}

FusedTypes fused_types(const GemmArgs& args, at::ScalarType lhs, at::ScalarType out) {
  if (args.rhs.scaling == ScalingMode::NO_SCALING) return FusedTypes::all(out);
  return {.lhs = lhs,
          .rhs = args.rhs.data.scalar_type(),
          .out = out,
          .scaling = args.rhs.scaling,
          .use_split_accumulator = args.use_split_accumulator};
}

OverlapProblem problem_of(const GatherProducts& products) {
  const TorchComm& comm = *products.comm;
  const int64_t rows = products.own.size(0);
  const int64_t k = products.own.size(1);
  const auto dtype = products.gemms.at(0).out.scalar_type();
  const int64_t bytes = gather_bytes(comm, products.own, products.scales);
  const bool is_scaled = products.gemms[0].rhs.scaling != ScalingMode::NO_SCALING;
  GemmShape global_shape{rows * comm.size(), 0, k};
  FusedProducts fused{
      .n = {}, .k = k, .types = fused_types(products.gemms[0], products.own.scalar_type(), dtype)};
  for (const GemmArgs& args : products.gemms) {
    fused.n.push_back(features_of(args.rhs));
    global_shape.n += comm.size() * fused.n.back();
  }
  return {.op = products.op,
          .dtype = dtype,
          .global_shape = global_shape,
          .chunk_rows = rows,
          .gather_bytes = bytes,
          .fused = std::move(fused),
          .low_latency = is_scaled
                             ? std::nullopt
                             : std::optional(ChannelRequirement{OperatorChannel::gather, bytes}),
          .can_pipeline = is_channel_dtype(dtype)};
}

void check(const GatherProducts& products) {
  for (const GemmArgs& whole : products.gemms) {
    GemmArgs args = product_with_lhs(whole, products.own, products.scales);
    args.out = row_view(whole.out, 0, products.own.size(0));
    check_gemm(products.op, args);
  }
}

void run_gather(GatherProducts products, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::sequential:
    case Algorithm::bulk:  // differs in the gradient only
      return gather_then_multiply(products);
    case Algorithm::pipelined:
    case Algorithm::p2p:
    case Algorithm::fused:
    case Algorithm::low_latency:
      return gather_in_chunks(std::move(products), algorithm);
  }
}

OverlapProblem problem_of(const ReduceScatterProducts& products) {
  const TorchComm& comm = *products.comm;
  const auto& gemms = products.gemms;
  const int64_t rows = gemm_shape(gemms.at(0)).m;
  const int64_t columns = products.out.size(1);
  const auto dtype = products.out.scalar_type();
  int64_t k = 0;
  for (const GemmArgs& args : gemms) k += depth_of(args.rhs);
  const bool is_scaled = gemms[0].rhs.scaling != ScalingMode::NO_SCALING;
  // A fused kernel computes one product, and adds nothing to it.
  const bool may_fuse = gemms.size() == 1 && !products.start.defined();
  OverlapProblem problem{
      .op = products.op,
      .dtype = dtype,
      .global_shape = GemmShape{rows, columns, k * comm.size()},
      .chunk_rows = products.out.size(0),
      .reduce_scatter_bytes = reduce_scatter_bytes(comm, rows, columns, dtype, products.row_unit),
      .can_pipeline = is_channel_dtype(dtype)};
  if (may_fuse) {
    problem.fused =
        FusedProducts{.n = {columns},
                      .k = k,
                      .types = fused_types(gemms[0], gemms[0].lhs.data.scalar_type(), dtype)};
    if (!is_scaled) {
      problem.low_latency = {OperatorChannel::low_latency,
                             low_latency_bytes(comm, rows, columns, dtype)};
    }
  }
  return problem;
}

void check(const ReduceScatterProducts& products) {
  const RowPartition rows = partition_of(products);
  for (const GemmArgs& whole : products.gemms) {
    check_gemm(products.op, product_of_rows(whole, 0, rows.length(0), products.out));
  }
}

void run_reduce_scatter(ReduceScatterProducts products, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::sequential:
    case Algorithm::bulk:  // differs in the gradient only, which calls run_bulk()
      return multiply_then_reduce_scatter(products);
    case Algorithm::low_latency:
      run_low_latency_on_channel(products.op, products.comm,
                                 {.gemm = products.gemms.at(0),
                                  .rows = partition_of(products),
                                  .out = products.out,
                                  .factor = products.mean ? 1.0 / products.comm->size() : 1.0,
                                  .bias = contiguous_or_undefined(products.bias)});
      if (products.meanwhile) products.meanwhile();
      return;
    case Algorithm::pipelined:
    case Algorithm::p2p:
    case Algorithm::fused:
      return scatter_in_chunks(std::move(products), algorithm);
  }
}

void run_bulk(const ReduceScatterProducts& products, const std::function<void()>& before_reduction,
              const std::vector<GemmArgs>& concurrent) {
  const ScatterBuffers buffers = scatter_buffers(products, Algorithm::bulk);
  const OverlapChannel::Use use(*buffers.channel);
  auto gemms = products.gemms;
  accumulate_into(buffers.partial, products.start, gemms);
  for (const GemmArgs& args : gemms) gemm(products.op, args);
  before_reduction();
  run_bulk_gemm(products.op, *buffers.channel,
                {.gemms = concurrent,
                 .rows = buffers.rows,
                 .columns = products.out.size(1),
                 .dtype = products.out.scalar_type(),
                 .gathers = false,
                 .out = products.out,
                 .blocks = kBulkBlocks});
}

ChannelGather::ChannelGather(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                             const at::Tensor& own, const RowPartition& partition, bool with_own,
                             Algorithm algorithm) {
  if (algorithm == Algorithm::pipelined) {
    channel_ = pipeline_channel(op, comm, OperatorChannel::gather);
    rows_ = at::empty({partition.rows, own.size(1)}, own.options());
  } else {
    channel_ = operator_channel(op, comm, OperatorChannel::gather,
                                partition.rows * own.size(1) * element_bytes(own.scalar_type()));
    use_.emplace(*channel_);
    rows_ = channel_->data(0, {partition.rows, own.size(1)}, own.scalar_type());
  }
  gather_.emplace(op, *channel_, partition, own, rows_, with_own,
                  is_small_transfer(partition, own));
}

}  // namespace torch_overlap::ops
