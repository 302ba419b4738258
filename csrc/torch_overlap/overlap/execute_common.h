#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <utility>
#include <vector>

#include "torch_overlap/common/views.h"
#include "torch_overlap/gemm/checked_gemm.h"
#include "torch_overlap/overlap/channel.h"
#include "torch_overlap/overlap/execute.h"
#include "torch_overlap/overlap/schedule.h"

// Helpers of the executors (execute_*.cpp).
namespace torch_overlap {

inline int64_t row_bytes(const at::Tensor& tensor) {
  return tensor.size(1) * static_cast<int64_t>(tensor.element_size());
}

inline at::Tensor rows_of_rank(const at::Tensor& tensor, const RowPartition& rows, int rank) {
  return row_view(tensor, rows.begin(rank), rows.length(rank));
}

// Returns those of the `size` flags from `first` on that belong to the other ranks.
inline std::vector<int> flags_of_others(const OverlapGroup& group, int first) {
  std::vector<int> flags;
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer != group.rank()) flags.push_back(first + peer);
  }
  return flags;
}

// The largest absolute value of a GEMM that is computed in parts: each part has an element of its
// own.
class PartialAmax {
 public:
  PartialAmax(at::Tensor whole, size_t parts) : whole_(std::move(whole)) {
    if (whole_.defined()) parts_ = at::zeros({static_cast<int64_t>(parts)}, whole_.options());
  }
  void next(GemmArgs& part) {
    if (whole_.defined()) part.out_amax = parts_.narrow(0, next_++, 1);
  }
  // Reduces the parts. On the caller's stream, after the operation.
  void finish() const {
    if (whole_.defined()) whole_.copy_(parts_.amax().view(whole_.sizes()));
  }

 private:
  at::Tensor whole_;
  at::Tensor parts_;
  int64_t next_ = 0;
};

// The gradient of a bias as the sum of the rows of out, for a GEMM that is computed in parts of
// some rows.
class PartialBiasGrad {
 public:
  // Takes it out of `whole`. Does nothing if it is undefined, or if it is the sum over k, in which
  // each part has elements of its own.
  PartialBiasGrad(GemmArgs& whole, size_t parts) {
    if (!whole.epilogue.bias_grad.defined() || !whole.epilogue.gelu_input.defined()) return;
    whole_ = std::exchange(whole.epilogue.bias_grad, {});
    const auto type = whole_.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    parts_ = at::zeros({static_cast<int64_t>(parts), whole_.size(0)}, whole_.options().dtype(type));
  }
  void next(GemmArgs& part) {
    if (whole_.defined()) part.epilogue.bias_grad = parts_.select(0, next_++);
  }
  // Sums the parts. On the caller's stream, after the operation.
  void finish() const {
    if (whole_.defined()) whole_.copy_(parts_.sum(0));
  }

 private:
  at::Tensor whole_;
  at::Tensor parts_;
  int64_t next_ = 0;
};

// Returns the source and destination of one exchange of a gathered matrix.
inline Transport::Move chunk_move(const OverlapChannel& channel, const GatheredRows& part,
                                  const RowPartition& rows, const Exchange& exchange,
                                  int first_flag) {
  const int rank = channel.group().rank();
  return {.dst = exchange.dst,
          .send = exchange.send == rank ? part.own : rows_of_rank(part.all, rows, exchange.send),
          .dst_offset_bytes =
              channel.offset_of(part.all) + rows.begin(exchange.send) * row_bytes(part.all),
          .flag = first_flag + exchange.send,
          .src = exchange.src,
          .recv = rows_of_rank(part.all, rows, exchange.recv),
          .recv_flag = first_flag + exchange.recv};
}

// Enqueues a barrier of the ranks that map each other's memory: signals flags + rank() on all ranks
// after what was enqueued on the stream, and waits until all of them have signalled. At the end of
// an operation it keeps operands from being overwritten before all ranks have read them by address.
inline void enqueue_barrier(OverlapChannel& channel, OverlapChannel::Session& session, int stream,
                            int flags) {
  if (channel.group().size() == 1 || !session.transport.is_peer_mapped()) return;
  session.post(stream, flags);
  session.wait_for_flags(stream, flags_of_others(channel.group(), flags));
}

// Enqueues the all-gather of `part`: every rank sends its rows to all others. Flag first_flag + r
// signals the chunk of rank r.
void enqueue_all_gather(OverlapChannel& channel, OverlapChannel::Session& session, int stream,
                        const RowPartition& rows, const GatheredRows& part, int first_flag);

}  // namespace torch_overlap
