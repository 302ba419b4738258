#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "torch_overlap/comm/call.h"

namespace torch_overlap {

using HostClock = std::chrono::steady_clock;
using Deadline = HostClock::time_point;

// Messages of sends and receives never match those inside a collective.
enum class Channel : uint8_t { p2p, collective };

// One rank's half of a message: bytes to or from a peer. Halves match in the order in which each
// side posts them, for each (sender, receiver, channel, tag).
struct Message {
  int peer;  // kAnySource: a receive from any other rank
  Channel channel;
  Primitive primitive;         // the operation that it is part of; equal on both sides
  std::span<std::byte> bytes;  // a send only reads them; never empty
  int tag = 0;
};

// A posted half. Belongs to the thread that posted it. The destructor takes back what did not
// happen: afterwards nobody touches the bytes.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // True once the bytes have moved; false if `deadline` came first. Throws if it can never end
  // well: the peer has left, the two halves do not fit, the transport was aborted.
  virtual bool wait(Deadline deadline) = 0;
  // True if the peer is known not to have come. Never blocks, never throws.
  virtual bool is_missing() const = 0;
  // The rank at the other end, once wait() returned true; of a receive from any rank, the sender.
  virtual int peer() const = 0;
};

// How bytes get from one rank to another: all that a host backend is made of.
// A send ends when its receiver has the bytes. Threads: any; posts on one channel to one peer are
// ordered by the caller.
class HostTransport {
 public:
  virtual ~HostTransport() = default;
  virtual std::string version() const = 0;

  virtual std::unique_ptr<Transfer> send(const Message& message) = 0;
  virtual std::unique_ptr<Transfer> recv(const Message& message) = 0;

  // Called on the operation's thread before it begins; `index` counts this rank's operations on
  // this communicator. May block until `deadline`, or throw: where faults are injected.
  virtual void before(uint64_t index, Deadline deadline) {}

  // True if halves that do not fit never meet, so that a peer which is there, in another operation
  // or with other sizes, looks like one that is absent.
  virtual bool hides_mismatches() const { return false; }

  // From now on every transfer of this rank throws `reason`, those that wait at once. With
  // `tell_peers`, the transfers that others have or post with this rank fail too.
  virtual void stop(const std::string& reason, bool tell_peers) = 0;

  // That `peer` has told that it stopped, and its reason, for waits that have no transfer. Empty:
  // it has not, or the transport hears of that by transfers alone.
  virtual std::string why_left(int peer) { return {}; }
};

}  // namespace torch_overlap
