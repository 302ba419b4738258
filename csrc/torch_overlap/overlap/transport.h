#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/overlap/streams.h"
#include "torch_overlap/symm/op_signature.h"

namespace torch_overlap {

// Moves chunks between the ranks of a group, to each other's data of a channel (channel.h), and
// signals their arrival by flags. A flag is an index: every rank has one flag of each index in its
// part.
//
// An operation is what is between begin() and end(). All ranks must make the same operations, with
// their exchanges in the same order. Streams must be those of the transport's kind of device.
class TORCH_OVERLAP_API Transport {
 public:
  virtual ~Transport() = default;
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  // Returns how data moves, for explain: "copy engine", "shared memory", ...
  virtual std::string_view name() const = 0;
  // True if ranks map each other's memory: peer() and post() then work.
  virtual bool is_peer_mapped() const = 0;

  // Throws if an earlier operation has failed.
  virtual void check() const {}
  // Enters an operation. Enqueued on the caller's stream, before fork(). When it is done, all ranks
  // have entered the operation, and so have finished with the results of the previous one: from
  // here on they write to each other's data. `entry` must be equal on all ranks; otherwise the
  // operation fails on all of them, if memory is shared.
  virtual void begin(const EntryPayload& entry) = 0;
  // True if begin() may run on a stream instead, before everything that involves other ranks.
  virtual bool can_begin_on_comm_stream() const { return false; }
  // Ends an operation, on the caller's stream, after join(). Also called for one that failed half
  // way.
  virtual void end() {}
  // Returns the resources that the device uses in an operation. They must outlive the transport
  // while an operation may still run, or a graph has captured one.
  virtual std::vector<std::shared_ptr<void>> retained_resources() const { return {}; }

  // Sends `send` to an offset in the data of rank `dst`, and signals `flag` there. What rank `src`
  // sends arrives in `recv`, in this rank's data, and signals `recv_flag`. Either tensor may be
  // empty.
  struct Move {
    int dst;
    at::Tensor send;
    int64_t dst_offset_bytes;
    int flag;  // peer-mapped only: kNoFlag if a later move of the stream signals this one too
    int src;
    at::Tensor recv{};
    int recv_flag;
    // Peer-mapped only. Row stride at the destination of `send` [rows, columns], whose rows need
    // not be contiguous; 0: `send` is contiguous, here and there.
    int64_t dst_pitch_bytes = 0;
  };
  static constexpr int kNoFlag = -1;
  virtual void exchange(OverlapStreams& streams, int stream, const Move& move) = 0;
  // Orders what is enqueued on the stream from now on after the arrivals that the flags signal.
  virtual void wait_for_flags(OverlapStreams& streams, int stream,
                              const std::vector<int>& flags) = 0;

  // Peer-mapped only. Signals flag `flag` + rank() of all ranks after what was enqueued on the
  // stream before.
  virtual void post(OverlapStreams& streams, int stream, int flag) = 0;
  // Peer-mapped only. Returns a tensor in the data of `rank`.
  virtual at::Tensor peer(int rank, int64_t at, c10::IntArrayRef sizes,
                          at::ScalarType dtype) const = 0;
};

}  // namespace torch_overlap
