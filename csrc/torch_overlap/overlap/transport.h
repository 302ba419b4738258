#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/overlap/lanes.h"
#include "torch_overlap/symm/begin.h"

namespace torch_overlap {

// Moves chunks between the ranks of a group, into the data of each other's part of a channel
// (channel.h), and tells who waits that they are there. What a chunk is told by is a flag: a number
// that stands for its place, of which every rank has one.
//
// One operation lies between begin() and end(). All ranks make the same operations, and in each the
// exchanges in the same order. Lanes are those of the transport's kind of device.
class TORCH_OVERLAP_API Transport {
 public:
  virtual ~Transport() = default;
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  // How it moves data, for explain: "copy engine", "shared memory", ...
  virtual std::string_view name() const = 0;
  // Whether ranks reach each other's memory: peer() and post() then work.
  virtual bool is_direct() const = 0;

  // Throws if an operation before has failed since.
  virtual void check() const {}
  // On the caller's stream, before fork(): all ranks have come to this operation, and so are done
  // with what the one before left; from here on they write to each other's data. What is begun is
  // the same on all ranks, or the operation fails on all where memory is shared.
  virtual void begin(const Begin& operation) = 0;
  // Whether it may be put on a lane instead, before all that concerns other ranks.
  virtual bool may_begin_beside() const { return false; }
  // On the caller's stream, after join(); of an operation that ended half way, too.
  virtual void end() {}
  // What the device uses in an operation: it outlives the transport where one may still run, or a
  // graph has captured one.
  virtual std::vector<std::shared_ptr<void>> keepers() const { return {}; }

  // `give` goes to rank `to`, at byte `at` of its data, and is told there by `flag`; what comes
  // from `from` goes to `get` in this rank's data, and is told by `get_flag`. Either may be empty.
  struct Move {
    int to;
    at::Tensor give;
    int64_t at;
    int flag;  // direct only: kUntold where a later move of the lane tells of this one too
    int from;
    at::Tensor get;
    int get_flag;
    // Direct only. Bytes from row to row of `give` [rows, columns] there, where other data lies
    // between; 0: it lies there as one piece, and here too.
    int64_t pitch = 0;
  };
  static constexpr int kUntold = -1;
  virtual void exchange(Lanes& lanes, int lane, const Move& move) = 0;
  // What is put on the lane from now on finds what the flags tell of.
  virtual void arrived(Lanes& lanes, int lane, const std::vector<int>& flags) = 0;

  // Direct only. Tells all others by `flag` + rank() that what was put on the lane before is done.
  virtual void post(Lanes& lanes, int lane, int flag) = 0;
  // Direct only. A tensor in the data of `rank`'s part.
  virtual at::Tensor peer(int rank, int64_t at, c10::IntArrayRef sizes,
                          at::ScalarType dtype) const = 0;
};

}  // namespace torch_overlap
