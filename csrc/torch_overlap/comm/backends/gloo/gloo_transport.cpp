#include "torch_overlap/comm/backends/gloo/gloo_transport.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/hash.h>
#include <torch/version.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

// 31 bits: the channel, then a hash of the properties that are equal on both sides. The tag is
// added to it, so that messages of one size never match under two tags.
int tag_of(const Message& message) {
  const size_t shape = c10::get_hash(message.bytes.size(), static_cast<int>(message.primitive));
  return static_cast<int>(
      (static_cast<uint32_t>(message.channel) << 30) |
      (((shape ^ (shape >> 32)) + static_cast<uint32_t>(message.tag)) & 0x3fffffff));
}

std::string peer_name(int peer) {
  return peer == kAnySource ? std::string("any rank") : concat("rank ", peer);
}

}  // namespace

class GlooTransport::Posted final : public Transfer {
 public:
  Posted(GlooTransport& transport, int peer, c10::intrusive_ptr<c10d::Work> work)
      : transport_(transport), peer_(peer), work_(std::move(work)) {}

  ~Posted() override {
    std::lock_guard lock(transport_.mutex_);
    transport_.posted_.erase(this);
  }

  bool wait(Deadline deadline) override {
    const auto left = std::chrono::ceil<Milliseconds>(deadline - HostClock::now());
    bool ended = false;
    try {
      // At least 1: gloo takes 0 for no limit.
      ended = work_->wait(std::max(left, Milliseconds(1)));
    } catch (const std::exception& error) {
      throw_if_stopped();
      if (HostClock::now() >= deadline) return false;
      fail(ErrorKind::kRuntime, peer_name(peer_),
           " died or left while this rank waited for it; gloo says: ", error.what());
    }
    if (ended) return true;
    throw_if_stopped();
    fail(ErrorKind::kRuntime, peer_name(peer_), ": the transfer was aborted");
  }

  // gloo does not say.
  bool is_missing() const override { return false; }
  int peer() const override { return peer_ == kAnySource ? work_->sourceRank() : peer_; }

  void abort() { work_->abort(); }

 private:
  void throw_if_stopped() const {
    std::lock_guard lock(transport_.mutex_);
    if (!transport_.stopped_.empty()) fail(ErrorKind::kState, transport_.stopped_);
  }

  GlooTransport& transport_;
  const int peer_;
  const c10::intrusive_ptr<c10d::Work> work_;
};

GlooTransport::GlooTransport(c10::intrusive_ptr<c10d::Backend> group) : group_(std::move(group)) {}
GlooTransport::~GlooTransport() = default;

// gloo counts none: torch's is the one that it comes with.
std::string GlooTransport::version() const { return "torch " TORCH_VERSION; }

std::unique_ptr<Transfer> GlooTransport::send(const Message& message) {
  return post(message, /*is_send=*/true);
}

std::unique_ptr<Transfer> GlooTransport::recv(const Message& message) {
  return post(message, /*is_send=*/false);
}

std::unique_ptr<Transfer> GlooTransport::post(const Message& message, bool is_send) {
  c10::intrusive_ptr<c10d::Backend> group;
  {
    std::lock_guard lock(mutex_);
    if (!stopped_.empty()) fail(ErrorKind::kState, stopped_);
    group = group_;
  }
  std::vector<at::Tensor> bytes{
      at::from_blob(message.bytes.data(), {static_cast<int64_t>(message.bytes.size())}, at::kByte)};
  std::unique_ptr<Posted> posted;
  try {
    const int tag = tag_of(message);
    auto work = is_send                      ? group->send(bytes, message.peer, tag)
                : message.peer == kAnySource ? group->recvAnysource(bytes, tag)
                                             : group->recv(bytes, message.peer, tag);
    posted = std::make_unique<Posted>(*this, message.peer, std::move(work));
  } catch (const std::exception& error) {
    fail(ErrorKind::kRuntime, peer_name(message.peer), ": ", error.what());
  }
  std::lock_guard lock(mutex_);
  posted_.insert(posted.get());
  if (!stopped_.empty()) posted->abort();  // stop() came in between
  return posted;
}

void GlooTransport::stop(const std::string& reason, bool tell_peers) {
  // Closing the sockets is how peers learn. The last thread that still uses the group does it.
  c10::intrusive_ptr<c10d::Backend> closed;
  std::lock_guard lock(mutex_);
  if (stopped_.empty()) stopped_ = reason;
  for (Posted* posted : posted_) posted->abort();
  if (tell_peers) closed = std::move(group_);
}

}  // namespace torch_overlap
