#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/call.h"

namespace torch {
struct CapturedTraceback;
}

namespace torch_overlap {

// A communicator as the flight recorder sees it. Lives as long as the communicator or a record of
// one of its calls. Threads: any.
struct TORCH_OVERLAP_API CommRecord {
  std::string name;
  std::string backend;
  int rank = 0;
  std::vector<int> ranks_in_world;
  // Set if ranks are threads: each has its own trace. Otherwise all communicators of the process
  // share one trace.
  std::optional<int> thread_rank;

  int world_rank() const { return ranks_in_world.at(rank); }

  // Number of calls that were issued. Point-to-point calls and those of windows are counted
  // separately, because only collectives are issued by all ranks in the same order.
  std::atomic<uint64_t> collectives{0};
  std::atomic<uint64_t> p2p{0};
  std::atomic<uint64_t> one_sided{0};
  // Returns the next sequence number for the kind of `primitive`, counted from 1.
  uint64_t next_sequence_number(Primitive primitive);
  // Counter of the records of one trace, over all its communicators.
  std::atomic<uint64_t>* trace_ids = nullptr;

  // kClosed: the communicator was finalized, or its TorchComm was destroyed.
  enum class State : uint8_t { kActive, kAborted, kClosed };
  std::atomic<State> state{State::kActive};

  // Records why the communicator failed; only the first reason is kept.
  void failed(const std::string& why) noexcept;
  std::optional<std::string> failure() const;

 private:
  std::optional<std::string> failure_;  // guarded by a lock that all records of the process share
};

// Registers a new record in the process. comm_records() lists it while it lives.
TORCH_OVERLAP_API std::shared_ptr<CommRecord> make_comm_record(std::string name,
                                                               std::string backend, int rank,
                                                               std::vector<int> ranks_in_world);
// Returns the live records, in the order in which they were made.
TORCH_OVERLAP_API std::vector<std::shared_ptr<const CommRecord>> comm_records();

// Number of records that each trace of the process has had, by its counter (CommRecord::trace_ids).
using TraceCounts = std::map<const std::atomic<uint64_t>*, uint64_t>;
TORCH_OVERLAP_API TraceCounts trace_counts();

enum class CallState : uint8_t {
  kScheduled,  // issued; not known to have started
  kStarted,
  kCompleted,
  kFailed,
  kCaptured,  // part of a CUDA graph; its replays are not recorded
};

TORCH_OVERLAP_API std::string_view to_string(CallState state);

class CallLog;

// Record of one call, from issue to end. It holds no tensor. Public const members are set at
// construction; the state advances while other threads read it. Threads: any.
class TORCH_OVERLAP_API CallRecord {
 public:
  using Sizes = c10::SmallVector<int64_t, 4>;
  struct Message {
    bool is_send;
    int peer;
    c10::ScalarType dtype;
    Sizes sizes;
  };

  // Assigns the next number of the communicator. Keeps the caller's stack if the process asked for
  // it.
  CallRecord(const Call& call, std::shared_ptr<CommRecord> comm);
  ~CallRecord();

  const std::shared_ptr<CommRecord> comm;
  const OpName op;
  const Primitive primitive;
  const bool async_op;
  const RedOpType reduce_op;
  const int root;  // or the peer; -1 for none
  const Milliseconds timeout;
  const uint64_t call_id;   // Call::id, which hooks see
  const uint64_t trace_id;  // number of the record in its trace
  const uint64_t collective_seq;
  const uint64_t p2p_seq;
  const int64_t created_ns;  // system clock, as for all times here
  // Sizes of the input and output; the total number of elements for a list of parts. Absent if
  // there is no input, or no output.
  std::optional<Sizes> input;
  std::optional<Sizes> output;
  std::optional<c10::ScalarType> dtype;  // absent: no tensors
  std::vector<Message> messages;         // point-to-point calls only
  std::shared_ptr<torch::CapturedTraceback> stack;
  // Set before the call is issued, by the hook that records it.
  c10::SmallVector<std::weak_ptr<CallLog>, 1> logs;

  bool is_p2p() const { return primitive == Primitive::p2p; }
  bool is_collective() const { return torch_overlap::is_collective(primitive); }
  // True if reduce_op is meaningful.
  bool has_reduction() const {
    return primitive == Primitive::all_reduce || primitive == Primitive::reduce ||
           primitive == Primitive::reduce_scatter;
  }
  // True if the call was issued and is not known to have ended.
  bool is_pending() const;

  // --- Called by the backend. The first end is final; later calls have no effect. --------------
  void captured() noexcept;
  void started() noexcept;
  void ended(const std::exception_ptr& error) noexcept;
  // Called before the call starts. `name` must live as long as the process.
  void set_algorithm(const char* name) noexcept {
    algorithm_.store(name, std::memory_order_relaxed);
  }

  // The algorithm that the backend uses, if it has a choice; otherwise null.
  const char* algorithm() const { return algorithm_.load(std::memory_order_relaxed); }
  CallState state() const { return state_.load(std::memory_order_acquire); }
  std::optional<int64_t> started_ns() const;
  std::optional<int64_t> ended_ns() const;
  std::optional<std::string> error() const;

 private:
  void record_tensors(const Call& call);

  std::atomic<CallState> state_{CallState::kScheduled};
  std::atomic<bool> has_end_{false};
  std::atomic<int64_t> started_ns_{0};
  std::atomic<int64_t> ended_ns_{0};
  std::string error_;  // written before the state becomes kFailed
  std::atomic<const char*> algorithm_{nullptr};
};

using CallRecordPtr = std::shared_ptr<const CallRecord>;

// Returns the nanoseconds of the system clock, which can be compared between the hosts of a job.
TORCH_OVERLAP_API int64_t now_ns() noexcept;

}  // namespace torch_overlap
