#include "torch_overlap/ops/exchange.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "torch_overlap/ops/checks.h"
#include "torch_overlap/ops/choose.h"
#include "torch_overlap/ops/pipeline.h"

namespace torch_overlap::ops {

void check_exchange_algorithm(std::string_view op, std::string_view algorithm) {
  check_choice(op, "algorithm", "auto sequential chunked", algorithm);
}

bool goes_in_pieces(const TorchComm& comm, std::string_view algorithm, int64_t rows) {
  if (algorithm == "auto") return comm.size() > 1 && is_worth_chunks(rows);
  return algorithm == "chunked";
}

RowExchange::RowExchange(TorchComm& comm, const at::Tensor& rows, int64_t pieces) {
  const int rank = comm.rank();
  const int size = comm.size();
  const auto parts = rows.view({size, rows.size(0) / size, rows.size(1)});
  ranges_ = row_chunks(parts.size(1), pieces);
  received_ = at::empty(parts.sizes(), parts.options());
  joined_ = at::empty({parts.size(1), size * parts.size(2)}, parts.options());
  if (pieces == 0) {
    comm.all_to_all_single(received_, parts, /*async_op=*/false);
    return;
  }
  for (size_t step = 0; step < ranges_.size() && size > 1; ++step) {
    const Span span("chunk_comm", step);
    const auto [begin, length] = ranges_[step];
    std::vector<P2POp> transfers;
    for (const auto& [to, give, from, get] : scatter_schedule(rank, size).exchanges) {
      transfers.push_back({P2POp::Type::SEND, parts[give].narrow(0, begin, length), to});
      transfers.push_back({P2POp::Type::RECV, received_[from].narrow(0, begin, length), from});
    }
    works_.push_back(comm.batch_send_recv(std::move(transfers), /*async_op=*/true));
  }
  received_[rank].copy_(parts[rank]);
}

at::Tensor RowExchange::wait(size_t step) {
  const auto [begin, length] = ranges_[step];
  const auto rows = joined_.narrow(0, begin, length);
  if (step < waited_) return rows;
  waited_ = step + 1;
  if (step < works_.size()) {
    const Span span("chunk_wait", step);
    works_[step]->wait();
  }
  rows.view({length, received_.size(0), received_.size(2)})
      .copy_(received_.narrow(1, begin, length).movedim(0, 1));
  return rows;
}

at::Tensor RowExchange::wait_all() {
  for (size_t step = waited_; step < steps(); ++step) wait(step);
  return joined_;
}

ColumnExchange::ColumnExchange(TorchComm& comm, const at::Tensor& into)
    : comm_(comm), schedule_(scatter_schedule(comm.rank(), comm.size())) {
  arriving_ = into.view({comm.size(), into.size(0) / comm.size(), into.size(1)});
  outgoing_ =
      at::empty({comm.size() - 1, arriving_.size(1), arriving_.size(2)}, arriving_.options());
}

at::Tensor ColumnExchange::part(size_t step) {
  return step + 1 == steps() ? arriving_[comm_.rank()] : outgoing_[static_cast<int64_t>(step)];
}

void ColumnExchange::send(size_t step) {
  if (step + 1 == steps()) return;
  const Span span("chunk_comm", step);
  const Exchange& exchange = schedule_.exchanges[step];
  works_.push_back(
      comm_.batch_send_recv({{P2POp::Type::SEND, part(step), exchange.to},
                             {P2POp::Type::RECV, arriving_[exchange.from], exchange.from}},
                            /*async_op=*/true));
}

void ColumnExchange::wait_all() {
  for (size_t step = 0; step < works_.size(); ++step) {
    const Span span("chunk_wait", step);
    works_[step]->wait();
  }
  works_.clear();
}

void exchange_columns(TorchComm& comm, const at::Tensor& y, const at::Tensor& into) {
  const auto parts = y.unflatten(1, {comm.size(), y.size(1) / comm.size()}).movedim(1, 0);
  comm.all_to_all_single(into, parts.contiguous().flatten(0, 1), /*async_op=*/false);
}

}  // namespace torch_overlap::ops
