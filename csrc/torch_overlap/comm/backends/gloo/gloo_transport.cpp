#include "torch_overlap/comm/backends/gloo/gloo_transport.h"

#include <ATen/ops/from_blob.h>
#include <torch/version.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

// Mixes `bits`: every bit of the result depends on every bit of it (the finalizer of SplitMix64).
uint64_t mix_bits(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ULL;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebULL;
  return bits ^ (bits >> 31);
}

// Returns the 31-bit tag that both halves of a message must share to match.
//
//   collective            1 | hash of size and primitive, 30 bits
//   p2p, tag < 2^16      0 0 | tag, 16 bits | hash of the size, 13 bits
//   p2p, larger tag      0 1 | hash of tag and size, 29 bits
//
// The tag contains the size because gloo ends the process if a message is larger than the buffer
// that it matches. Messages with different tags below 2^16 never match, whatever their sizes.
int tag_of(const Message& message) {
  constexpr int kTagBits = 16;
  const uint64_t bytes = message.bytes.size();
  const auto low = [](uint64_t bits, int count) { return bits & ((uint64_t{1} << count) - 1); };
  if (message.kind == MessageKind::collective) {
    const uint64_t shape = mix_bits(mix_bits(bytes) + static_cast<uint64_t>(message.primitive));
    return static_cast<int>(uint64_t{1} << 30 | low(shape, 30));
  }
  const auto tag = static_cast<uint64_t>(message.tag);
  if (tag >> kTagBits != 0) {
    return static_cast<int>(uint64_t{1} << 29 | low(mix_bits(mix_bits(bytes) + tag), 29));
  }
  return static_cast<int>(tag << 13 | low(mix_bits(bytes), 13));
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
      // At least 1: gloo treats 0 as no limit.
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

  // gloo does not report it.
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

// gloo has no version of its own; torch's identifies the gloo that it ships.
std::string GlooTransport::version() const { return "torch " TORCH_VERSION; }

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
  if (!stopped_.empty()) posted->abort();  // stop() ran in between
  return posted;
}

void GlooTransport::stop(const std::string& reason, bool notify_peers) {
  // Peers learn of it from the closed sockets. The last thread that uses the group closes them.
  c10::intrusive_ptr<c10d::Backend> closed;
  std::lock_guard lock(mutex_);
  if (stopped_.empty()) stopped_ = reason;
  for (Posted* posted : posted_) posted->abort();
  if (notify_peers) closed = std::move(group_);
}

}  // namespace torch_overlap
