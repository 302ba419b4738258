#include "torch_overlap/overlap/comm_transport.h"

#include "torch_overlap/base/errors.h"

namespace torch_overlap {

void CommTransport::exchange(OverlapStreams& streams, int stream, const Move& move) {
  auto started = std::make_shared<WorkPtr>();
  streams.run(stream, "exchange", [comm = comm_.lock(), move, started] {
    std::vector<P2POp> ops;
    if (move.send.numel() > 0) ops.push_back({P2POp::Type::SEND, move.send, move.dst});
    if (move.recv.numel() > 0) ops.push_back({P2POp::Type::RECV, move.recv, move.src});
    if (!ops.empty()) *started = comm->batch_send_recv(std::move(ops), /*async_op=*/true);
  });
  pending_recvs_.insert_or_assign(move.recv_flag,
                                  PendingRecv{.started = streams.mark(stream), .work = started});
}

void CommTransport::wait_for_flags(OverlapStreams& streams, int stream,
                                   const std::vector<int>& flags) {
  for (const int flag : flags) {
    const auto found = pending_recvs_.find(flag);
    TORCH_OVERLAP_CHECK(found != pending_recvs_.end(), kRuntime, "expected an exchange for flag ",
                        flag, ", got none");
    // The stream of the exchange may not have started it yet.
    streams.after(stream, found->second.started);
    streams.wait(stream, found->second.work);
  }
}

void CommTransport::post(OverlapStreams&, int, int) {
  fail(ErrorKind::kUnsupported, "post: expected ranks that reach each other's memory");
}

at::Tensor CommTransport::peer(int, int64_t, c10::IntArrayRef, at::ScalarType) const {
  fail(ErrorKind::kUnsupported, "peer: expected ranks that reach each other's memory");
}

}  // namespace torch_overlap
