#include <algorithm>
#include <optional>
#include <utility>

#include "torch_overlap/base/rounding.h"
#include "torch_overlap/ops/exchange.h"
#include "torch_overlap/overlap/op_channels.h"

namespace torch_overlap::ops {
namespace {

static_assert(kNumRowPieces <= kOperatorFlagsPerRank);

// Alignment in bytes of the parts of a result.
constexpr int64_t kAlignment = 256;

int64_t element_bytes(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.element_size());
}

// Flag step * size + r signals that the rows of a step from rank r have arrived, for all matrices.
class ChannelRowExchange final : public RowExchange {
 public:
  ChannelRowExchange(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                     const std::vector<at::Tensor>& matrices, int64_t pieces)
      : RowExchange(*comm, matrices, pieces),
        channel_(operator_channel(op, comm, OperatorChannel::gather, channel_bytes(matrices))),
        operation_(op, *channel_,
                   {.entry = EntryPayload{.rows = matrices[0].size(0),
                                          .signature = OpSignature::all_to_all_rows()}}) {
    operation_.enqueue([&](OverlapChannel::Session& session) {
      gathered_ = channel_->data(0, {own(), total_}, matrices[0].scalar_type());
      for (size_t step = 0; step < steps(); ++step) send(session, step);
      session.streams.run(0, "copy", [this] {
        const IndexRange all{0, own()};
        for (size_t i = 0; i < matrices_.size(); ++i) {
          destination(i, rank_, all).copy_(part(i, rank_, all));
        }
      });
    });
  }

  void finish() override { operation_.finish(); }

 private:
  void send(OverlapChannel::Session& session, size_t step) const {
    const IndexRange rows = range(step);
    const int first_flag = static_cast<int>(step) * size_;
    for (const Exchange& exchange : reduce_scatter_schedule(rank_, size_).exchanges) {
      for (size_t i = 0; i < matrices_.size(); ++i) {
        const int64_t column = column_offsets_[i] + rank_ * matrices_[i].size(1);
        const bool is_last = i + 1 == matrices_.size();
        session.exchange(
            session.streams.comm(),
            {.dst = exchange.dst,
             .send = part(i, exchange.dst, rows),
             .dst_offset_bytes = (rows.begin * total_ + column) * element_bytes(gathered_),
             .flag = is_last ? first_flag + rank_ : Transport::kNoFlag,
             .src = exchange.src,
             .recv = destination(i, exchange.src, rows),
             .recv_flag = first_flag + exchange.src,
             .dst_pitch_bytes = total_ * element_bytes(gathered_)});
      }
    }
  }

  void receive_step(size_t step) override {
    operation_.enqueue([&](OverlapChannel::Session& session) {
      std::vector<int> flags;
      for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_) flags.push_back(static_cast<int>(step) * size_ + peer);
      }
      if (!flags.empty()) session.wait_for_flags(0, flags);
      session.streams.join_stream(0);
    });
  }

  const std::shared_ptr<OverlapChannel> channel_;
  OverlapChannel::Operation operation_;
};

// Parts arrive in the channel and are copied from there while the next ones are computed. Flag r
// signals the arrival of the parts of rank r, for all products.
class ChannelColumnExchange final : public ColumnExchange {
 public:
  ChannelColumnExchange(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                        const std::vector<at::Tensor>& into)
      : ColumnExchange(*comm, into),
        channel_(operator_channel(op, comm, OperatorChannel::reduce_scatter,
                                  channel_bytes(bytes_of(into)))),
        operation_(op, *channel_,
                   {.entry = EntryPayload{.rows = into[0].size(0),
                                          .signature = OpSignature::all_to_all_columns()},
                    .begin_on_comm_stream = channel_->is_captured()}) {
    operation_.enqueue([&](const OverlapChannel::Session&) {
      int64_t at = 0;
      for (const auto& result : results_) {
        offsets_bytes_.push_back(at);
        receive_buffers_.push_back(channel_->data(at, result.sizes(), result.scalar_type()));
        at += round_up(static_cast<int64_t>(result.nbytes()), kAlignment);
      }
    });
  }

  void wait_all() override {
    operation_.enqueue([&](OverlapChannel::Session& session) { copy_received(session); });
    operation_.finish();
  }

 private:
  static std::vector<int64_t> bytes_of(const std::vector<at::Tensor>& tensors) {
    std::vector<int64_t> bytes;
    for (const auto& tensor : tensors) bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
    return bytes;
  }

  void transfer(size_t i, size_t step, const Exchange& exchange) override {
    operation_.enqueue([&](OverlapChannel::Session& session) {
      OverlapStreams& streams = session.streams;
      // The copy is enqueued after the product that followed its transfer: on a device with one
      // queue the product would wait, too.
      if (i == 0) copy_received(session);
      const bool is_last = i + 1 == results_.size();
      const auto send = part(i, step);
      streams.after(streams.comm(), streams.mark(0));
      session.exchange(
          streams.comm(),
          {.dst = exchange.dst,
           .send = send,
           .dst_offset_bytes = offsets_bytes_[i] + rank_ * static_cast<int64_t>(send.nbytes()),
           .flag = is_last ? rank_ : Transport::kNoFlag,
           .src = exchange.src,
           .recv = receive_buffers_[i][exchange.src],
           .recv_flag = exchange.src});
      if (is_last) pending_source_ = exchange.src;
    });
  }

  // Copies the parts of the rank of the previous exchange, on a stream that runs no product.
  void copy_received(OverlapChannel::Session& session) {
    if (!pending_source_) return;
    const int from = *std::exchange(pending_source_, std::nullopt);
    OverlapStreams& streams = session.streams;
    const int stream = streams.num_compute_streams() - 1;
    // The other rank is as busy as this one until then.
    streams.after(stream, streams.mark(streams.comm()));
    session.wait_for_flags(stream, {from});
    streams.run(stream, "copy", [this, from] {
      for (size_t j = 0; j < results_.size(); ++j)
        results_[j][from].copy_(receive_buffers_[j][from]);
    });
  }

  const std::shared_ptr<OverlapChannel> channel_;
  std::vector<int64_t> offsets_bytes_;  // offset of each result in the channel's data
  std::vector<at::Tensor> receive_buffers_;
  std::optional<int> pending_source_;
  OverlapChannel::Operation operation_;
};

}  // namespace

int64_t RowExchange::channel_bytes(const std::vector<at::Tensor>& matrices) {
  int64_t bytes = 0;
  for (const auto& matrix : matrices) bytes += static_cast<int64_t>(matrix.nbytes());
  return matrices.empty() ? 0 : std::max<int64_t>(bytes, 1);
}

int64_t ColumnExchange::channel_bytes(const std::vector<int64_t>& bytes) {
  int64_t sum = 0;
  for (const int64_t one : bytes) sum += round_up(one, kAlignment);
  return std::max<int64_t>(sum, 1);
}

std::unique_ptr<RowExchange> start_channel_rows(std::string_view op,
                                                const std::shared_ptr<TorchComm>& comm,
                                                const std::vector<at::Tensor>& matrices,
                                                int64_t pieces) {
  return std::make_unique<ChannelRowExchange>(op, comm, matrices, pieces);
}

std::unique_ptr<ColumnExchange> start_channel_columns(std::string_view op,
                                                      const std::shared_ptr<TorchComm>& comm,
                                                      const std::vector<at::Tensor>& into) {
  return std::make_unique<ChannelColumnExchange>(op, comm, into);
}

}  // namespace torch_overlap::ops
