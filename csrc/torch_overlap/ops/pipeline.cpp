#include "torch_overlap/ops/pipeline.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/ops/checks.h"

namespace torch_overlap::ops {

Span::Span(std::string_view name, size_t index) : record_(at::RecordScope::USER_SCOPE) {
  if (record_.isActive()) record_.before(concat("torch_overlap::", name, "[", index, "]"));
}

GatherPipeline::GatherPipeline(TorchComm& comm, const at::Tensor& own, bool keep_own)
    : schedule_(gather_schedule(comm.rank(), comm.size())), own_(own) {
  if (comm.size() == 1 && !keep_own) return;
  buffer_ = at::empty({comm.size(), own.size(0), own.size(1)}, own.options());
  for (size_t step = 1; step < schedule_.size(); ++step) {
    const Span span("chunk_comm", step);
    const auto [chunk, to] = schedule_[step];
    works_.push_back(comm.batch_send_recv(
        {{P2POp::Type::SEND, own_, to}, {P2POp::Type::RECV, buffer_.select(0, chunk), chunk}},
        /*async_op=*/true));
  }
  if (keep_own) buffer_.select(0, comm.rank()).copy_(own_);
}

at::Tensor GatherPipeline::wait(size_t step) {
  if (step == 0) return own_;
  if (auto work = std::exchange(works_[step - 1], nullptr)) {
    const Span span("chunk_wait", step);
    work->wait();
  }
  return buffer_.select(0, chunk(step));
}

at::Tensor GatherPipeline::gathered() {
  for (size_t step = 1; step < steps(); ++step) wait(step);
  return buffer_.flatten(0, 1);
}

ScatterPipeline::ScatterPipeline(TorchComm& comm, int64_t rows, int64_t columns,
                                 const at::TensorOptions& options)
    : comm_(comm), schedule_(scatter_schedule(comm.rank(), comm.size())) {
  outgoing_ = at::empty({comm.size() - 1, rows, columns}, options);
  arriving_ = at::empty({comm.size(), rows, columns}, options);
}

at::Tensor ScatterPipeline::partial(size_t step) {
  return is_own(step) ? arriving_.select(0, comm_.rank())
                      : outgoing_.select(0, static_cast<int64_t>(step));
}

void ScatterPipeline::send(size_t step) {
  if (is_own(step)) return;
  const Span span("chunk_comm", step);
  const auto [chunk, from] = schedule_[step];
  works_.push_back(comm_.batch_send_recv({{P2POp::Type::SEND, partial(step), chunk},
                                          {P2POp::Type::RECV, arriving_.select(0, from), from}},
                                         /*async_op=*/true));
}

at::Tensor ScatterPipeline::reduce(bool mean) {
  for (size_t step = 0; step < works_.size(); ++step) {
    const Span span("chunk_wait", step);
    works_[step]->wait();
  }
  works_.clear();
  if (arriving_.size(0) == 1) return arriving_.select(0, 0);
  const auto dtype = arriving_.scalar_type();
  return mean ? at::mean(arriving_, 0, /*keepdim=*/false, dtype)
              : at::sum(arriving_, 0, /*keepdim=*/false, dtype);
}

void linear_out(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight,
                const std::optional<at::Tensor>& bias) {
  at::Tensor target = out;
  if (bias && bias->defined()) {
    at::addmm_out(target, *bias, x, weight.t());
  } else {
    at::mm_out(target, x, weight.t());
  }
}

at::Tensor to_rows(const at::Tensor& x, int64_t dim) { return dim_first(x, dim).flatten(0, -2); }

at::Tensor from_rows(const at::Tensor& rows, const at::Tensor& like, int64_t dim) {
  if (like.dim() == 2) return rows;
  auto sizes = like.movedim(dim, 0).sizes().vec();
  int64_t inner = 1;
  for (size_t i = 1; i + 1 < sizes.size(); ++i) inner *= sizes[i];
  sizes.front() = inner == 0 ? 0 : rows.size(0) / inner;
  sizes.back() = rows.size(1);
  const auto shaped = rows.view(sizes);
  return dim == 0 ? shaped : shaped.movedim(0, dim).contiguous();
}

}  // namespace torch_overlap::ops
