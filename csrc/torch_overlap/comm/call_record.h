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

// A communicator as the flight recorder knows it. Lives as long as the communicator or a record of
// one of its calls. Threads: any.
struct TORCH_OVERLAP_API CommRecord {
  std::string name;
  std::string backend;
  int rank = 0;
  std::vector<int> ranks_in_world;
  // Ranks that are threads have a trace each; else all communicators of the process share one.
  std::optional<int> thread_rank;

  int world_rank() const { return ranks_in_world.at(rank); }

  // Number of calls that were issued. Point-to-point calls and those of windows have counts of
  // their own: only collectives are issued by all ranks in the same order.
  std::atomic<uint64_t> collectives{0};
  std::atomic<uint64_t> p2p{0};
  std::atomic<uint64_t> one_sided{0};
  // The next number of its kind, counted from 1.
  uint64_t take_number(Primitive primitive);
  // Numbers the records of one trace, over all its communicators.
  std::atomic<uint64_t>* trace_ids = nullptr;

  // Closed: finalized, or its TorchComm is gone.
  enum class State : uint8_t { kActive, kAborted, kClosed };
  std::atomic<State> state{State::kActive};

  // Why the communicator failed; only the first reason is kept.
  void failed(const std::string& why) noexcept;
  std::optional<std::string> failure() const;

 private:
  std::optional<std::string> failure_;  // under a lock that all records of the process share
};

// Makes it known to the process: comm_records() lists it for as long as it lives.
TORCH_OVERLAP_API std::shared_ptr<CommRecord> make_comm_record(std::string name,
                                                               std::string backend, int rank,
                                                               std::vector<int> ranks_in_world);
// Those that are alive, in the order in which they were made.
TORCH_OVERLAP_API std::vector<std::shared_ptr<const CommRecord>> comm_records();

// How many records each trace of the process has had, by its counter (CommRecord::trace_ids).
using TraceCounts = std::map<const std::atomic<uint64_t>*, uint64_t>;
TORCH_OVERLAP_API TraceCounts trace_counts();

enum class CallState : uint8_t {
  kScheduled,  // issued; for all that is known it has not begun
  kStarted,
  kCompleted,
  kFailed,
  kCaptured,  // part of a CUDA graph: nothing is known of its replays
};

TORCH_OVERLAP_API std::string_view to_string(CallState state);

class CallRecord;

// Is told how calls go on, for logs. Called by the thread that noticed, which may hold a lock of
// the communicator: it neither blocks nor calls into one. Never throws.
class CallObserver {
 public:
  virtual ~CallObserver() = default;
  virtual void on_started(const CallRecord& record) noexcept = 0;
  virtual void on_ended(const CallRecord& record) noexcept = 0;
};

// One call, from issue to its end: what is written down of it. It holds no tensor. What is public
// and const is set when it is made; the state goes on while others read it. Threads: any.
class TORCH_OVERLAP_API CallRecord {
 public:
  using Sizes = c10::SmallVector<int64_t, 4>;
  struct Message {
    bool is_send;
    int peer;
    c10::ScalarType dtype;
    Sizes sizes;
  };

  // Takes the next number of the communicator. Keeps the caller's stack if the process asked for
  // that.
  CallRecord(const Call& call, std::shared_ptr<CommRecord> comm);
  ~CallRecord();

  const std::shared_ptr<CommRecord> comm;
  const OpName op;
  const Primitive primitive;
  const bool async_op;
  const RedOpType reduce_op;
  const int root;
  const Milliseconds timeout;
  const uint64_t call_id;   // Call::id, as hooks show it
  const uint64_t trace_id;  // counts the records of the trace
  const uint64_t collective_seq;
  const uint64_t p2p_seq;
  const int64_t created_ns;  // of the system's clock, as all times here
  // Of a list of parts: the number of elements of all. Absent: nothing goes in, or comes out.
  std::optional<Sizes> input;
  std::optional<Sizes> output;
  std::optional<c10::ScalarType> dtype;  // absent: no tensors
  std::vector<Message> messages;         // of a point-to-point call
  std::shared_ptr<torch::CapturedTraceback> stack;
  // Set before the call is launched, by who records it.
  c10::SmallVector<std::weak_ptr<CallObserver>, 1> observers;

  bool is_p2p() const { return primitive == Primitive::p2p; }
  bool is_collective() const { return torch_overlap::is_collective(primitive); }
  // Whether reduce_op means anything.
  bool has_reduction() const {
    return primitive == Primitive::all_reduce || primitive == Primitive::reduce ||
           primitive == Primitive::reduce_scatter;
  }
  // Whether it was issued and its end is not known.
  bool is_pending() const;

  // --- By the backend. Only the first end counts, and nothing after it. -------------------------
  void captured() noexcept;
  void started() noexcept;
  void ended(const std::exception_ptr& error) noexcept;
  // Before it begins. `name` lives as long as the process.
  void done_by(const char* name) noexcept { algorithm_.store(name, std::memory_order_relaxed); }

  // What the backend does it with, where there is a choice; else null.
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

// Nanoseconds of the system's clock, which can be compared between the hosts of a job.
TORCH_OVERLAP_API int64_t now_ns() noexcept;

}  // namespace torch_overlap
