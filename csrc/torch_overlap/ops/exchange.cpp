#include "torch_overlap/ops/exchange.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "torch_overlap/ops/checks.h"
#include "torch_overlap/ops/rows.h"

namespace torch_overlap::ops {
namespace {

// One collective for each matrix; the constructor waits for them.
class CollectiveRowExchange final : public RowExchange {
 public:
  CollectiveRowExchange(TorchComm& comm, const std::vector<at::Tensor>& matrices)
      : RowExchange(comm, matrices, /*pieces=*/1) {
    gathered_ = at::empty({own(), total_}, matrices[0].options());
    for (size_t i = 0; i < matrices.size(); ++i) {
      const int64_t width = matrices[i].size(1);
      const auto received = at::empty({size_, own(), width}, matrices[i].options());
      comm.all_to_all_single(received, matrices[i].view(received.sizes()), /*async_op=*/false);
      columns(gathered_, i).unflatten(1, {size_, width}).copy_(received.movedim(0, 1));
    }
  }

 private:
  void receive_step(size_t) override {}
};

// The communicator sends and receives the rows in pieces.
class PipelinedRowExchange final : public RowExchange {
 public:
  PipelinedRowExchange(TorchComm& comm, const std::vector<at::Tensor>& matrices, int64_t pieces)
      : RowExchange(comm, matrices, pieces) {
    gathered_ = at::empty({own(), total_}, matrices[0].options());
    for (const auto& matrix : matrices) {
      received_.push_back(at::empty({size_, own(), matrix.size(1)}, matrix.options()));
    }
    for (size_t step = 0; step < steps() && size_ > 1; ++step) {
      const ProfilerRange span("chunk_comm", step);
      const auto [begin, length] = range(step);
      std::vector<P2POp> transfers;
      for (const auto& [dst, send, src, recv] : reduce_scatter_schedule(rank_, size_).exchanges) {
        for (size_t i = 0; i < received_.size(); ++i) {
          transfers.push_back({P2POp::Type::SEND, part(i, send, range(step)), dst});
          transfers.push_back({P2POp::Type::RECV, received_[i][src].narrow(0, begin, length), src});
        }
      }
      works_.push_back(comm.batch_send_recv(std::move(transfers), /*async_op=*/true));
    }
    for (size_t i = 0; i < received_.size(); ++i) {
      received_[i][rank_].copy_(part(i, rank_, {0, own()}));
    }
  }

 private:
  void receive_step(size_t step) override {
    if (step < works_.size()) {
      const ProfilerRange span("chunk_wait", step);
      works_[step]->wait();
    }
    const auto [begin, length] = range(step);
    for (size_t i = 0; i < received_.size(); ++i) {
      columns(gathered_.narrow(0, begin, length), i)
          .unflatten(1, {size_, received_[i].size(2)})
          .copy_(received_[i].narrow(1, begin, length).movedim(0, 1));
    }
  }

  std::vector<at::Tensor> received_;  // [size, own, k_i]
  std::vector<WorkPtr> works_;
};

// The communicator sends the parts directly to their place in the results.
class PipelinedColumnExchange final : public ColumnExchange {
 public:
  PipelinedColumnExchange(TorchComm& comm, const std::vector<at::Tensor>& into)
      : ColumnExchange(comm, into), comm_(comm) {}

  void wait_all() override {
    for (size_t step = 0; step < works_.size(); ++step) {
      const ProfilerRange span("chunk_wait", step);
      works_[step]->wait();
    }
    works_.clear();
  }

 private:
  void transfer(size_t i, size_t step, const Exchange& exchange) override {
    works_.push_back(
        comm_.batch_send_recv({{P2POp::Type::SEND, part(i, step), exchange.dst},
                               {P2POp::Type::RECV, results_[i][exchange.src], exchange.src}},
                              /*async_op=*/true));
  }

  TorchComm& comm_;
  std::vector<WorkPtr> works_;
};

}  // namespace

void check_exchange_algorithm(std::string_view op, std::string_view algorithm) {
  check_choice(op, "algorithm", "auto sequential pipelined p2p", algorithm);
}

std::optional<Algorithm> choose_exchange(const OverlapProblem& problem, std::string_view algorithm,
                                         const std::shared_ptr<TorchComm>& comm) {
  const auto chosen = choose_algorithm(problem, algorithm, comm);
  if (!chosen) return std::nullopt;
  // The other algorithms do not apply to exchanges.
  return chosen == Algorithm::pipelined || chosen == Algorithm::p2p ? chosen
                                                                    : Algorithm::sequential;
}

RowExchange::RowExchange(const TorchComm& comm, const std::vector<at::Tensor>& matrices,
                         int64_t pieces)
    : rank_(comm.rank()),
      size_(comm.size()),
      matrices_(matrices),
      ranges_(row_chunks(own(), pieces)) {
  for (const auto& matrix : matrices_) {
    column_offsets_.push_back(total_);
    total_ += size_ * matrix.size(1);
  }
}

std::unique_ptr<RowExchange> RowExchange::start(std::string_view op,
                                                const std::shared_ptr<TorchComm>& comm,
                                                const std::vector<at::Tensor>& matrices,
                                                int64_t pieces, Algorithm algorithm) {
  if (algorithm == Algorithm::p2p) return start_channel_rows(op, comm, matrices, pieces);
  if (algorithm == Algorithm::pipelined) {
    return std::make_unique<PipelinedRowExchange>(*comm, matrices, pieces);
  }
  return std::make_unique<CollectiveRowExchange>(*comm, matrices);
}

at::Tensor RowExchange::wait(size_t step) {
  if (step >= waited_) {
    receive_step(step);
    waited_ = step + 1;
  }
  const auto [begin, length] = ranges_[step];
  return gathered_.narrow(0, begin, length);
}

at::Tensor RowExchange::wait_all() {
  for (size_t step = waited_; step < steps(); ++step) wait(step);
  return gathered_;
}

at::Tensor RowExchange::columns(const at::Tensor& rows, size_t i) const {
  return rows.narrow(1, column_offsets_[i], size_ * matrices_[i].size(1));
}

at::Tensor RowExchange::destination(size_t i, int from, const IndexRange& rows) const {
  const int64_t width = matrices_[i].size(1);
  return gathered_.narrow(0, rows.begin, rows.length)
      .narrow(1, column_offsets_[i] + from * width, width);
}

at::Tensor RowExchange::part(size_t i, int to, const IndexRange& rows) const {
  return matrices_[i].narrow(0, to * own() + rows.begin, rows.length);
}

ColumnExchange::ColumnExchange(const TorchComm& comm, const std::vector<at::Tensor>& into)
    : rank_(comm.rank()), schedule_(reduce_scatter_schedule(comm.rank(), comm.size())) {
  for (const auto& result : into) {
    results_.push_back(result.view({comm.size(), result.size(0) / comm.size(), result.size(1)}));
    send_buffers_.push_back(at::empty(
        {comm.size() - 1, results_.back().size(1), results_.back().size(2)}, result.options()));
  }
}

std::unique_ptr<ColumnExchange> ColumnExchange::start(std::string_view op,
                                                      const std::shared_ptr<TorchComm>& comm,
                                                      const std::vector<at::Tensor>& into,
                                                      Algorithm algorithm) {
  if (algorithm == Algorithm::p2p) return start_channel_columns(op, comm, into);
  return std::make_unique<PipelinedColumnExchange>(*comm, into);
}

at::Tensor ColumnExchange::part(size_t i, size_t step) const {
  return step + 1 == steps() ? results_[i][rank_] : send_buffers_[i][static_cast<int64_t>(step)];
}

void ColumnExchange::send(size_t i, size_t step) {
  if (step + 1 == steps()) return;
  const ProfilerRange span("chunk_comm", step);
  transfer(i, step, schedule_.exchanges[step]);
}

void all_to_all_columns(TorchComm& comm, const at::Tensor& y, const at::Tensor& into) {
  const auto parts = y.unflatten(1, {comm.size(), y.size(1) / comm.size()}).movedim(1, 0);
  comm.all_to_all_single(into, parts.contiguous().flatten(0, 1), /*async_op=*/false);
}

}  // namespace torch_overlap::ops
