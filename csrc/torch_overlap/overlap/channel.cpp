#include "torch_overlap/overlap/channel.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <iostream>
#include <mutex>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/store_bootstrap.h"
#include "torch_overlap/common/views.h"
#include "torch_overlap/overlap/comm_transport.h"
#include "torch_overlap/symm/pretend_unreachable.h"

namespace torch_overlap {
namespace {

std::atomic<uint64_t> channel_changes{0};

class CallbackBootstrap final : public Bootstrap {
 public:
  CallbackBootstrap(OverlapGroup::Callbacks callbacks, int rank, int size,
                    std::chrono::milliseconds timeout)
      : Bootstrap(rank, size, timeout), callbacks_(std::move(callbacks)) {}

  std::vector<std::string> all_gather(const std::string& mine) override {
    auto all = callbacks_.all_gather(mine);
    TORCH_OVERLAP_CHECK(static_cast<int>(all.size()) == size(), kValue,
                        "all_gather: expected the callback to return what ", size(),
                        " ranks gave, got ", all.size(),
                        " entries. Return the bytes of every rank, by "
                        "rank.");
    return all;
  }
  void barrier() override { callbacks_.barrier(); }

 private:
  const OverlapGroup::Callbacks callbacks_;
};

}  // namespace

std::shared_ptr<OverlapGroup> OverlapGroup::of(const std::shared_ptr<TorchComm>& comm) {
  std::shared_ptr<OverlapGroup> group(new OverlapGroup);
  group->comm_ = comm;
  group->generation_ = comm->generation();
  group->rank_ = comm->rank();
  group->size_ = comm->size();
  group->device_ = comm->device();
  group->name_ = comm->name();
  group->timeout_ = comm->membership()->context.timeout();
  return group;
}

std::shared_ptr<OverlapGroup> OverlapGroup::of(Callbacks callbacks, int rank, int size,
                                               c10::Device device, std::string name,
                                               std::chrono::milliseconds timeout) {
  TORCH_OVERLAP_CHECK(
      callbacks.all_gather && callbacks.barrier, kType,
      "OverlapGroup: expected two callbacks, all_gather and barrier, got an empty one. "
      "Pass functions.");
  TORCH_OVERLAP_CHECK(size > 0 && rank >= 0 && rank < size, kValue,
                      "OverlapGroup: expected a rank in [0, ", size, "), got ", rank,
                      ". Pass this process's rank and the number of processes.");
  std::shared_ptr<OverlapGroup> group(new OverlapGroup);
  group->is_outside_ = true;
  group->callbacks_ = std::move(callbacks);
  group->rank_ = rank;
  group->size_ = size;
  group->device_ = device;
  group->name_ = std::move(name);
  group->timeout_ = timeout;
  return group;
}

std::chrono::milliseconds OverlapGroup::timeout() const {
  const auto comm = comm_.lock();
  return comm ? comm->membership()->context.timeout() : timeout_;
}

std::shared_ptr<TorchComm> OverlapGroup::require_comm(std::string_view op) const {
  auto comm = comm_.lock();
  TORCH_OVERLAP_CHECK(comm, kState, op, ": expected a live communicator, got '", name_,
                      "', which is gone. Keep it as long as its buffers are used.");
  return comm;
}

std::unique_ptr<Bootstrap> OverlapGroup::bootstrap(std::string_view op,
                                                   const std::string& what) const {
  if (is_outside_) {
    return std::make_unique<CallbackBootstrap>(callbacks_, rank_, size_, timeout_);
  }
  const auto comm = require_comm(op);
  const auto members = comm->membership();
  if (!members->context.store) return nullptr;
  const uint64_t number = members->registrations->fetch_add(1);
  return comm->bootstrap(*members, concat(what, " #", number, " of '", name_, "'"));
}

std::vector<std::string> OverlapGroup::exchange(std::string_view op, const std::string& what,
                                                const std::string& mine) const {
  const auto met = bootstrap(op, what);
  if (!met) return {mine};
  return met->all_gather(mine);
}

void OverlapGroup::require_active(std::string_view op) const {
  if (is_outside_) return;
  const auto comm = require_comm(op);
  comm->require_own_process(op);
  TORCH_OVERLAP_CHECK(!comm->is_finalized(), kState, op, ": expected a live communicator, got '",
                      name_, "', which is finalized. Make a new one.");
  TORCH_OVERLAP_CHECK(!comm->is_aborted(), kState, op, ": expected a live communicator, got '",
                      name_, "', which was aborted. reconfigure() it, or make a new one.");
  TORCH_OVERLAP_CHECK(comm->generation() == generation_, kState, op,
                      ": expected the members that the buffer was made for, got '", name_,
                      "' after reconfigure(); make a new buffer");
}

std::string OverlapGroup::departure_reason(int rank) const {
  const auto comm = comm_.lock();
  if (!comm) return "";
  const auto members = comm->membership();
  return members->generation == generation_ ? members->backend->departure_reason(rank) : "";
}

std::shared_ptr<OverlapChannel> OverlapChannel::create(std::shared_ptr<OverlapGroup> group,
                                                       const Request& request) {
  std::shared_ptr<OverlapChannel> channel(new OverlapChannel);
  channel->layout_ = {.bytes = request.bytes,
                      .flags = request.flags,
                      .size = group->size(),
                      .tiles = request.tiles};
  const c10::Device device = group->device();
  const auto bootstrap = group->bootstrap(request.op, request.name);
  Fault fault = request.fault;
  if (!fault) {
    try {
      group->require_active(request.op);
      channel->device_ = &overlap_device(request.op, device.type());
      TORCH_OVERLAP_CHECK(channel->device_->capture() == 0, kState, request.op,
                          ": expected a stream that is not capturing, got one that is; make "
                          "buffers before the capture");
      channel->part_ = symmetric_empty({channel->layout_.total()}, at::kByte, device);
    } catch (...) {
      fault = Fault::current();
    }
  }
  if (!bootstrap) {
    if (fault) throw Error(fault.kind, fault.text);
    channel->unsupported_reason_ = "the communicator has no peers";
  } else {
    throw_if_any_failed(*bootstrap, request.op, fault);
    const auto digests = bootstrap->all_gather(request.digest);
    for (int rank = 1; rank < group->size(); ++rank) {
      TORCH_OVERLAP_CHECK(digests[rank] == digests[0], kValue, request.op,
                          ": expected the same on all ranks, got ", digests[0], " on rank 0 and ",
                          digests[rank], " on rank ", rank, ". Pass equal arguments on all ranks.");
    }
    if (PretendUnreachable::is_on()) {
      channel->unsupported_reason_ = PretendUnreachable::kReason;
    } else {
      try {
        channel->memory_ = SymmetricMemory::rendezvous(
            *bootstrap, {.op = request.op, .name = request.name, .tensor = channel->part_});
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kUnsupported) throw;
        channel->unsupported_reason_ = error.what();  // the same on all ranks
      }
    }
  }
  TORCH_OVERLAP_CHECK(channel->memory_ || group->comm(), kUnsupported, request.op,
                      ": expected ranks that reach each other's memory, or a communicator; ",
                      channel->unsupported_reason_);
  channel->logs_ = Env::log_chunks();
  channel->streams_ = channel->device_->make_streams(device, request.streams);
  if (channel->memory_) {
    channel->transport_ =
        channel->device_->make_transport(channel->memory_, {.layout = channel->layout_,
                                                            .use_ce = request.use_ce,
                                                            .blocks = request.blocks,
                                                            .cluster = request.cluster,
                                                            .group = group});
  } else {
    channel->transport_ = std::make_unique<CommTransport>(group->comm());
  }
  channel->streams_->keep(channel->transport_->retained_resources());
  channel->group_ = std::move(group);
  ++channel_changes;
  return channel;
}

std::shared_ptr<OverlapChannel> OverlapChannel::over_communicator(
    std::string_view op, const std::shared_ptr<TorchComm>& comm, const StreamOptions& streams) {
  std::shared_ptr<OverlapChannel> channel(new OverlapChannel);
  channel->layout_ = {.size = comm->size()};
  channel->device_ = &overlap_device(op, comm->device().type());
  channel->unsupported_reason_ = "the channel moves data through the communicator";
  channel->logs_ = Env::log_chunks();
  channel->streams_ = channel->device_->make_streams(comm->device(), streams);
  channel->transport_ = std::make_unique<CommTransport>(comm);
  channel->group_ = OverlapGroup::of(comm);
  return channel;
}

bool OverlapChannel::is_captured() const {
  const c10::DeviceGuard guard(group_->device());
  return device_->capture() != 0;
}

bool OverlapChannel::shares_devices() const { return memory_ && memory_->shares_devices(); }

at::Tensor OverlapChannel::data(int64_t at, c10::IntArrayRef sizes, at::ScalarType dtype) const {
  return typed_view(part_, at, sizes, dtype);
}

int64_t OverlapChannel::offset_of(const at::Tensor& tensor) const {
  if (tensor.numel() == 0 || !memory_) return 0;
  return static_cast<const std::byte*>(tensor.const_data_ptr()) -
         static_cast<const std::byte*>(part_.const_data_ptr());
}

void OverlapChannel::Session::begin(const EntryPayload& entry) {
  const int comm = streams.comm();
  streams.run(comm, "begin", [this, entry] { transport.begin(entry); });
  begin_mark_ = streams.mark(comm);
  is_after_begin_.assign(streams.count(), false);
  is_after_begin_[comm] = true;
}

void OverlapChannel::Session::order_after_begin(int stream) {
  if (is_after_begin_.empty() || is_after_begin_.at(stream)) return;
  streams.after(stream, begin_mark_);
  is_after_begin_[stream] = true;
}

void OverlapChannel::Session::exchange(int stream, const Transport::Move& move) {
  if (channel.logs_) channel.log_exchange(move);
  order_after_begin(stream);
  transport.exchange(streams, stream, move);
}

void OverlapChannel::Session::wait_for_flags(int stream, const std::vector<int>& flags) {
  order_after_begin(stream);
  transport.wait_for_flags(streams, stream, flags);
}

void OverlapChannel::Session::post(int stream, int flag) {
  order_after_begin(stream);
  transport.post(streams, stream, flag);
}

void OverlapChannel::Session::gemm(int stream, CheckedGemm& product) {
  if (channel.logs_) channel.log_gemm(stream, product.args());
  product.take_workspace_part(stream, streams.num_compute_streams());
  streams.run(stream, "gemm", [&product] { product.run(); });
}

void OverlapChannel::Session::sum(int stream, const SumArgs& args) {
  if (channel.logs_) channel.log_sum(stream, args);
  streams.run(stream, "sum", [&device = channel.device(), args] { device.sum(args); });
}

void OverlapChannel::log_exchange(const Transport::Move& move) const {
  const auto begin = concat("torch_overlap: ", group_->name(), " rank ", group_->rank(), ": ");
  if (move.flag == Transport::kNoFlag) {
    std::cerr << concat(begin, "part of the next chunk, ", move.send.nbytes(), " bytes to rank ",
                        move.dst, " by ", transport_->name(), "\n");
    return;
  }
  std::cerr << concat(begin, "chunk ", move.flag, " of ", move.send.nbytes(), " bytes to rank ",
                      move.dst, ", chunk ", move.recv_flag, " from rank ", move.src, " by ",
                      transport_->name(), "\n");
}

void OverlapChannel::log_gemm(int stream, const GemmArgs& args) const {
  const auto [m, n, k] = gemm_shape(args);
  std::cerr << concat("torch_overlap: ", group_->name(), " rank ", group_->rank(), ": product ", m,
                      " x ", n, " x ", k, " on stream ", stream, "\n");
}

void OverlapChannel::log_sum(int stream, const SumArgs& args) const {
  std::cerr << concat("torch_overlap: ", group_->name(), " rank ", group_->rank(), ": sum of ",
                      args.parts.size(), " parts of ", args.out.size(0), " x ", args.out.size(1),
                      " on stream ", stream, "\n");
}

OverlapChannel::Operation::Operation(std::string_view op, OverlapChannel& channel,
                                     const OperationOptions& options)
    : channel_(channel),
      lock_(channel.mutex_, std::defer_lock),
      session_(options.lender == nullptr ? *channel.streams_ : *options.lender->streams_,
               *channel.transport_, channel) {
  OverlapChannel* const lender = options.lender;
  if (lender != nullptr && lender != &channel) {
    lender_lock_ = std::unique_lock(lender->mutex_, std::defer_lock);
    std::lock(lock_, lender_lock_);
  } else {
    lock_.lock();
  }
  TORCH_OVERLAP_CHECK(channel.broken_.empty(), kState, op,
                      ": expected a usable buffer, got one of which an operation ended half way: ",
                      channel.broken_, "; make a new one");
  try {
    // Checked before the communicator, which an expired wait has aborted: this error names the
    // wait.
    channel.transport_->check();
  } catch (...) {
    fail();
    throw;
  }
  channel.group_->require_active(op);
  try {
    channel.keep_for_graph();
    channel.enter();
    if (options.fills_device)
      resident_kernel_guard_ =
          channel.device().acquire_resident_kernel_lock(channel.group_->device());
    const bool begins_on_comm_stream =
        options.begin_on_comm_stream && channel.transport_->can_begin_on_comm_stream();
    if (options.entry && !begins_on_comm_stream) channel.transport_->begin(*options.entry);
    session_.streams.fork(options.single_stream);
    if (options.entry && begins_on_comm_stream) session_.begin(*options.entry);
  } catch (...) {
    fail();
    throw;
  }
}

OverlapChannel::Operation::~Operation() {
  if (!open_) return;
  session_.streams.cancel();
  channel_.end_quietly();
  channel_.set_broken("it was given up");
}

void OverlapChannel::Operation::finish() {
  try {
    session_.streams.join();
    resident_kernel_guard_.reset();
    channel_.leave();
  } catch (...) {
    fail();
    throw;
  }
  open_ = false;
}

void OverlapChannel::Operation::fail() noexcept {
  session_.streams.cancel();
  resident_kernel_guard_.reset();
  channel_.end_quietly();
  channel_.set_broken(Fault::current().text);
  open_ = false;
}

void OverlapChannel::keep_for_graph() {
  const c10::DeviceGuard guard(group_->device());
  const uint64_t capture = device_->capture();
  if (capture == 0 || capture == retained_capture_) return;
  auto what = transport_->retained_resources();
  if (part_.defined()) what.push_back(std::make_shared<at::Tensor>(part_));
  device_->keep_for_graph(std::move(what));
  retained_capture_ = capture;
}

uint64_t OverlapChannel::changes() { return channel_changes; }

void OverlapChannel::set_broken(std::string why) {
  broken_ = std::move(why);
  ++channel_changes;
}

bool OverlapChannel::is_broken() const {
  const std::lock_guard lock(mutex_);
  return !broken_.empty();
}

void OverlapChannel::check() const {
  const std::lock_guard lock(mutex_);
  transport_->check();
}

void OverlapChannel::drain(std::chrono::milliseconds timeout) noexcept { streams_->drain(timeout); }

OverlapChannel::Use::Use(OverlapChannel& channel) : channel_(channel), lock_(channel.mutex_) {
  channel_.enter();
  ++channel_.uses_;
}

OverlapChannel::Use::~Use() {
  if (--channel_.uses_ == 0) channel_.end_quietly();
}

void OverlapChannel::enter() {
  if (uses_ == 0) streams_->wait_for_previous();
}

void OverlapChannel::leave() {
  if (uses_ > 0) return;
  transport_->end();
  streams_->record_last();
}

void OverlapChannel::end_quietly() noexcept {
  try {
    transport_->end();
    streams_->record_last();
  } catch (const std::exception&) {  // the device is broken, or the capture is
  }
}

}  // namespace torch_overlap
