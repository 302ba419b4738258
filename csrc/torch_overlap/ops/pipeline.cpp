#include "torch_overlap/ops/pipeline.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/ops/checks.h"
#include "torch_overlap/ops/gemm_call.h"

namespace torch_overlap::ops {

ProfilerRange::ProfilerRange(std::string_view name, size_t index)
    : record_(at::RecordScope::USER_SCOPE) {
  if (record_.isActive()) record_.before(concat("torch_overlap::", name, "[", index, "]"));
}

GatherPipeline::GatherPipeline(TorchComm& comm, const at::Tensor& own,
                               const std::optional<at::Tensor>& into)
    : schedule_(gather_schedule(comm.rank(), comm.size(), GatherOrder::all_pairs)), own_(own) {
  const std::vector<int64_t> sizes{comm.size(), own.size(0), own.size(1)};
  buffer_ = into ? into->view(sizes) : at::empty(sizes, own.options());
  for (size_t step = 1; step < steps(); ++step) {
    const ProfilerRange span("chunk_comm", step);
    const Exchange& exchange = schedule_.exchanges[step - 1];
    works_.push_back(
        comm.batch_send_recv({{P2POp::Type::SEND, own_, exchange.to},
                              {P2POp::Type::RECV, buffer_.select(0, exchange.get), exchange.from}},
                             /*async_op=*/true));
  }
  if (into) buffer_.select(0, comm.rank()).copy_(own_);
}

at::Tensor GatherPipeline::wait(size_t step) {
  if (step == 0) return own_;
  if (auto work = std::exchange(works_[step - 1], nullptr)) {
    const ProfilerRange span("chunk_wait", step);
    work->wait();
  }
  return buffer_.select(0, chunk(step));
}

void GatherPipeline::wait_all() {
  for (size_t step = 1; step < steps(); ++step) wait(step);
}

ScatterPipeline::ScatterPipeline(TorchComm& comm, int64_t rows, int64_t columns,
                                 const at::TensorOptions& options)
    : comm_(comm), schedule_(scatter_schedule(comm.rank(), comm.size())) {
  send_buffer_ = at::empty({comm.size() - 1, rows, columns}, options);
  receive_buffer_ = at::empty({comm.size(), rows, columns}, options);
}

at::Tensor ScatterPipeline::partial(size_t step) {
  return is_own(step) ? receive_buffer_.select(0, comm_.rank())
                      : send_buffer_.select(0, static_cast<int64_t>(step));
}

void ScatterPipeline::send(size_t step) {
  if (is_own(step)) return;
  const ProfilerRange span("chunk_comm", step);
  const Exchange& exchange = schedule_.exchanges[step];
  works_.push_back(comm_.batch_send_recv(
      {{P2POp::Type::SEND, partial(step), exchange.to},
       {P2POp::Type::RECV, receive_buffer_.select(0, exchange.from), exchange.from}},
      /*async_op=*/true));
}

void ScatterPipeline::wait(size_t step) {
  const ProfilerRange span("chunk_wait", step);
  works_[step]->wait();
}

void ScatterPipeline::reduce(const at::Tensor& out, bool mean) {
  for (size_t step = 0; step < works_.size(); ++step) wait(step);
  works_.clear();
  const auto dtype = receive_buffer_.scalar_type();
  if (mean) {
    // On a CPU, ATen rounds a mean of a narrow dtype twice: after the sum, and after the division.
    out.copy_(at::mean(receive_buffer_, 0, /*keepdim=*/false, at::toOpMathType(dtype)));
  } else {
    at::Tensor target = out;
    at::sum_out(target, receive_buffer_, 0, /*keepdim=*/false, dtype);
  }
}

void linear_out(std::string_view op, const at::Tensor& out, const at::Tensor& x,
                const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                bool overlaps_communication) {
  if (out.is_cuda() && at::isFloatingType(out.scalar_type())) {
    GemmArgs args;
    args.lhs = gemm_operand(x, false, ScalingMode::NO_SCALING, std::nullopt, false);
    args.rhs = gemm_operand(weight, true, ScalingMode::NO_SCALING, std::nullopt, false);
    args.out = out;
    if (bias && bias->defined()) args.epilogue.bias = bias->contiguous();
    args.overlaps_communication = overlaps_communication;
    gemm(op, args);
    return;
  }
  at::Tensor target = out;
  if (bias && bias->defined()) {
    at::addmm_out(target, *bias, x, weight.t());
  } else {
    at::mm_out(target, x, weight.t());
  }
}

at::Tensor as_rows(const at::Tensor& x) { return x.dim() == 2 ? x : x.flatten(0, -2); }

at::Tensor to_rows(const at::Tensor& x, int64_t dim) { return as_rows(dim_first(x, dim)); }

at::Tensor writable_rows(const at::Tensor& out, int64_t dim) {
  const auto rows = as_rows(out);
  return is_outermost(out, dim) ? rows : at::empty(rows.sizes(), rows.options());
}

void copy_rows_back(const at::Tensor& rows, const at::Tensor& out, int64_t dim) {
  if (is_outermost(out, dim)) return;
  const auto target = out.movedim(dim, 0);
  target.copy_(rows.view(target.sizes()));
}

}  // namespace torch_overlap::ops
