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
enum class MessageKind : uint8_t { p2p, collective };

// One rank's half of a message: bytes that it sends to or receives from a peer. For each (sender,
// receiver, kind, tag), halves match in the order in which each side posts them.
struct Message {
  int peer;  // kAnySource: a receive from any other rank
  MessageKind kind;
  Primitive primitive;         // operation of the message; equal on both sides
  std::span<std::byte> bytes;  // only read by a send; never empty
  int tag = 0;
};

// A posted half. It belongs to the thread that posted it. The destructor cancels a transfer that
// has not completed; nothing accesses the bytes afterwards.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Returns true once the bytes have been transferred, false if `deadline` passed first. Throws if
  // the transfer cannot succeed: the peer has left, the two halves do not match, or the transport
  // was stopped.
  virtual bool wait(Deadline deadline) = 0;
  // True if the peer is known not to have arrived. Never blocks, never throws.
  virtual bool is_missing() const = 0;
  // Rank at the other end once wait() returned true. For a receive from any rank, the sender.
  virtual int peer() const = 0;
};

// Moves bytes between ranks. It is all that a host backend needs from its implementation. A send
// ends when its receiver has the bytes. Thread-safe; the caller orders the posts of one kind to
// one peer.
class HostTransport {
 public:
  virtual ~HostTransport() = default;
  virtual std::string version() const = 0;

  virtual std::unique_ptr<Transfer> post(const Message& message, bool is_send) = 0;

  // Called on the operation's thread before it begins. `index` counts this rank's operations on
  // this communicator. May block until `deadline`, or throw, to inject faults.
  virtual void before(uint64_t index, Deadline deadline) {}

  // True if halves that do not fit never match, so that a peer in another operation, or with other
  // sizes, looks like a missing one.
  virtual bool hides_mismatches() const { return false; }

  // Makes every waiting and every later transfer of this rank throw `reason`. If `notify_peers` is
  // set, the transfers that peers have posted or post with this rank fail too.
  virtual void stop(const std::string& reason, bool notify_peers) = 0;

  // Returns the reason with which `peer` stopped, for waits that have no transfer. Empty if it has
  // not reported one, or if the transport learns of it only through transfers.
  virtual std::string departure_reason(int peer) { return {}; }
};

}  // namespace torch_overlap
