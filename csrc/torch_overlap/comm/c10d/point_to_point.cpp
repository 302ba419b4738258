// Sends and receives of torch.distributed, single and coalesced.

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/c10d/backend_wrapper.h"
#include "torch_overlap/comm/c10d/convert.h"
#include "torch_overlap/comm/c10d/joined_work.h"

namespace torch_overlap {

using C10dWork = BackendWrapper::C10dWork;

namespace {

std::string_view name_of(P2POp::Type type) { return type == P2POp::Type::SEND ? "send" : "recv"; }

}  // namespace

// Returns the communicator of the whole group if every rank has had it since the group was created
// and its messages carry tags. Otherwise returns null, and each direction of a pair has its own
// communicator.
BackendWrapper::CommPtr BackendWrapper::tagged_comm(c10::Device device) {
  if (existing_comm_) return existing_comm_;
  const std::lock_guard lock(mutex_);
  const auto slot = slots_.find(device.type());
  const bool is_usable =
      slot != slots_.end() && slot->second.eager && slot->second.comm->has_tags();
  return is_usable ? slot->second.comm : nullptr;
}

C10dWork BackendWrapper::issue_message(const P2POp& message) {
  const bool is_send = message.type == P2POp::Type::SEND;
  WorkParts parts{.type = is_send ? c10d::OpType::SEND : c10d::OpType::RECV,
                  .outputs = {message.tensor}};
  parts.span = begin_span(parts.type, {message.tensor});
  const auto memory = is_send ? contiguous_input(message.tensor)
                              : contiguous_output(message.tensor, parts.copies, /*reads=*/false,
                                                  name_of(message.type));
  if (!is_send && message.peer != kAnySource) parts.source = message.peer;
  const auto issue = [is_send, memory, options = op_options(Ms(0))](TorchComm& comm, int peer,
                                                                    int tag) {
    return is_send ? comm.send(memory, peer, /*async_op=*/true, options, tag)
                   : comm.recv(memory, peer, /*async_op=*/true, options, tag);
  };
  if (const auto comm = tagged_comm(message.tensor.device())) {
    parts.works.push_back(issue(*comm, message.peer, message.tag));
    return wrap(std::move(parts));
  }
  check_pair(message);
  parts.rank = getRank();
  parts.sequence = ++sequence_;
  const PairKey key{.src = is_send ? getRank() : message.peer,
                    .dst = is_send ? message.peer : getRank(),
                    .tag = message.tag};
  return pairs_->issue(key, message.tensor.device(), parts,
                       [issue, parts, peer = is_send ? 1 : 0](TorchComm& comm) -> C10dWork {
                         WorkParts issued = parts;
                         issued.works.push_back(issue(comm, peer, /*tag=*/0));
                         end_span(issued);
                         return c10::make_intrusive<WorkWrapper>(std::move(issued));
                       });
}

void BackendWrapper::check_pair(const P2POp& message) const {
  const auto op = name_of(message.type);
  TORCH_OVERLAP_CHECK(message.tag >= 0, kValue, op, ": expected a tag >= 0, got ", message.tag);
  TORCH_OVERLAP_CHECK(message.peer != kAnySource, kUnsupported, "recv: expected a source rank on ",
                      message.tensor.device().str(),
                      ", got none; NCCL cannot receive from any rank, pass src");
  TORCH_OVERLAP_CHECK(message.peer >= 0 && message.peer < getSize() && message.peer != getRank(),
                      kValue, op, ": expected a peer among ranks 0 to ", getSize() - 1,
                      " other than ", getRank(), ", got ", message.peer,
                      "; ranks count within the group");
}

C10dWork BackendWrapper::point_to_point(const P2POp& message) {
  if (!is_coalescing()) return issue_message(message);
  coalescing_.p2p.push_back(message);
  return nullptr;  // endCoalescing returns the Work for it
}

// If the group's communicator does not support tags, tagged messages are issued one by one and
// matched by tag.
C10dWork BackendWrapper::issue_batch(std::vector<P2POp> ops, WorkParts parts) {
  std::vector<C10dWork> works;
  const auto shared = ops.empty() ? nullptr : tagged_comm(ops.front().tensor.device());
  if (!shared || !shared->has_tags()) {
    const auto tagged = std::stable_partition(
        ops.begin(), ops.end(), [](const P2POp& message) { return message.tag == 0; });
    for (auto message = tagged; message != ops.end(); ++message) {
      works.push_back(issue_message(*message));
    }
    ops.erase(tagged, ops.end());
  }
  if (!ops.empty()) {
    const auto comm = comm_for(ops.front().tensor.device());
    Tensors tensors;
    for (const P2POp& message : ops) tensors.push_back(message.tensor);
    parts.span = begin_span(c10d::OpType::COALESCED, tensors);
    stage_batch(ops, parts.copies);
    parts.works.push_back(
        comm->batch_send_recv(std::move(ops), /*async_op=*/true, op_options(Ms(0))));
  }
  if (!parts.works.empty()) {
    parts.type = c10d::OpType::COALESCED;
    works.push_back(wrap(std::move(parts)));
  }
  return join_works(std::move(works));
}

// Replaces each tensor by contiguous memory to send from or receive into.
void BackendWrapper::stage_batch(std::vector<P2POp>& ops, std::vector<CopyBack>& copies) {
  Tensors sent;
  Tensors received;
  for (P2POp& message : ops) {
    if (message.type == P2POp::Type::SEND) {
      message.tensor = contiguous_input(message.tensor);
      sent.push_back(message.tensor);
    } else {
      received.push_back(message.tensor);
    }
  }
  const auto targets =
      contiguous_output(received, copies, /*reads=*/false, "batch_isend_irecv", sent);
  auto target = targets.begin();
  for (P2POp& message : ops) {
    if (message.type == P2POp::Type::RECV) message.tensor = *target++;
  }
}

C10dWork BackendWrapper::send(Tensors& tensors, int dst, int tag) {
  return operation(
      [&] { return point_to_point({P2POp::Type::SEND, only(tensors, "send"), dst, tag}); });
}

C10dWork BackendWrapper::recv(Tensors& tensors, int src, int tag) {
  return operation(
      [&] { return point_to_point({P2POp::Type::RECV, only(tensors, "recv"), src, tag}); });
}

C10dWork BackendWrapper::recvAnysource(Tensors& tensors, int tag) {
  return operation(
      [&] { return point_to_point({P2POp::Type::RECV, only(tensors, "recv"), kAnySource, tag}); });
}

}  // namespace torch_overlap
