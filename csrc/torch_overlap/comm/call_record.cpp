#include "torch_overlap/comm/call_record.h"

#include <torch/csrc/profiler/combined_traceback.h>

#include <chrono>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/call_log.h"
#include "torch_overlap/symm/bootstrap.h"

namespace torch_overlap {
namespace {

// Never destroyed, because records may be made until the very end of the process.
struct Known {
  ForkSafeMutex mutex;
  std::vector<std::weak_ptr<const CommRecord>> comms;
  std::map<std::optional<int>, std::atomic<uint64_t>> trace_ids;
};

Known& known() { return LeakySingleton<Known>::get(); }

struct Stacks {
  bool cpp;
  bool python;
};

const Stacks& stacks() {
  return lazy_leaky_singleton([] {
    return Stacks{.cpp = Env::recorder_cpp_stack(), .python = Env::recorder_python_stack()};
  });
}

CallRecord::Sizes sizes_of(const at::Tensor& tensor) {
  return CallRecord::Sizes(tensor.sizes().begin(), tensor.sizes().end());
}

std::optional<CallRecord::Sizes> sizes_of(const RankTensors& blocks) {
  if (blocks.flat.defined()) return sizes_of(blocks.flat);
  if (blocks.parts.empty()) return std::nullopt;
  int64_t total = 0;
  for (const at::Tensor& part : blocks.parts) total += part.numel();
  return CallRecord::Sizes{total};
}

std::optional<c10::ScalarType> dtype_of_call(const Call& call) {
  for (const at::Tensor* tensor : {&call.tensor, &call.in.flat, &call.out.flat}) {
    if (tensor->defined()) return tensor->scalar_type();
  }
  for (const RankTensors* blocks : {&call.in, &call.out}) {
    if (!blocks->parts.empty()) return blocks->parts.front().scalar_type();
  }
  return std::nullopt;
}

std::optional<int64_t> unless_zero(int64_t time) {
  return time != 0 ? std::optional(time) : std::nullopt;
}

}  // namespace

int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void CommRecord::failed(const std::string& why) noexcept {
  const std::lock_guard lock(known().mutex);
  if (!failure_) failure_ = why;
}

std::optional<std::string> CommRecord::failure() const {
  const std::lock_guard lock(known().mutex);
  return failure_;
}

std::shared_ptr<CommRecord> make_comm_record(std::string name, std::string backend, int rank,
                                             std::vector<int> ranks_in_world) {
  auto comm = std::make_shared<CommRecord>();
  comm->name = std::move(name);
  comm->backend = std::move(backend);
  comm->rank = rank;
  comm->ranks_in_world = std::move(ranks_in_world);
  if (comm->backend == "local") comm->thread_rank = comm->world_rank();
  std::lock_guard lock(known().mutex);
  comm->trace_ids = &known().trace_ids[comm->thread_rank];
  std::erase_if(known().comms, [](const auto& weak) { return weak.expired(); });
  known().comms.push_back(comm);
  return comm;
}

std::vector<std::shared_ptr<const CommRecord>> comm_records() {
  std::vector<std::shared_ptr<const CommRecord>> alive;
  std::lock_guard lock(known().mutex);
  for (const auto& weak : known().comms) {
    if (auto comm = weak.lock()) alive.push_back(std::move(comm));
  }
  return alive;
}

TraceCounts trace_counts() {
  TraceCounts counts;
  std::lock_guard lock(known().mutex);
  for (const auto& [rank, count] : known().trace_ids) {
    counts[&count] = count.load(std::memory_order_relaxed);
  }
  return counts;
}

std::string_view to_string(CallState state) {
  switch (state) {
    case CallState::kScheduled:
    case CallState::kCaptured:  // in a comparison of ranks it counts as issued
      return "scheduled";
    case CallState::kStarted:
      return "started";
    case CallState::kCompleted:
      return "completed";
    case CallState::kFailed:
      return "failed";
  }
  return "unknown";
}

uint64_t CommRecord::next_sequence_number(Primitive primitive) {
  auto& count = primitive == Primitive::p2p ? p2p
                : is_collective(primitive)  ? collectives
                                            : one_sided;
  return count.fetch_add(1, std::memory_order_relaxed) + 1;
}

CallRecord::CallRecord(const Call& call, std::shared_ptr<CommRecord> of)
    : comm(std::move(of)),
      op(call.name),
      primitive(call.primitive),
      async_op(call.async_op),
      reduce_op(call.reduce_op.type()),
      root(call.peer < 0 ? call.root : call.peer),
      timeout(call.timeout),
      call_id(call.id),
      trace_id(comm->trace_ids->fetch_add(1, std::memory_order_relaxed)),
      collective_seq(is_collective() ? call.sequence
                                     : comm->collectives.load(std::memory_order_relaxed)),
      p2p_seq(is_p2p() ? call.sequence : comm->p2p.load(std::memory_order_relaxed)),
      created_ns(now_ns()) {
  record_tensors(call);
  if (stacks().cpp || stacks().python) {
    stack = torch::CapturedTraceback::gather(stacks().python, /*script=*/false, stacks().cpp);
  }
}

CallRecord::~CallRecord() = default;

void CallRecord::record_tensors(const Call& call) {
  dtype = dtype_of_call(call);
  input = sizes_of(call.in);
  output = sizes_of(call.out);
  switch (call.primitive) {
    case Primitive::p2p:
      messages.reserve(call.p2p.size());
      for (const P2POp& message : call.p2p) {
        messages.push_back({message.type == P2POp::Type::SEND, message.peer,
                            message.tensor.scalar_type(), sizes_of(message.tensor)});
      }
      break;
    case Primitive::broadcast:
    case Primitive::all_reduce:
    case Primitive::reduce:
      input = output = sizes_of(call.tensor);
      break;
    case Primitive::all_gather:
    case Primitive::gather:
    case Primitive::put:
      input = sizes_of(call.tensor);
      break;
    case Primitive::reduce_scatter:
    case Primitive::scatter:
      output = sizes_of(call.tensor);
      break;
    default:  // all_to_all: both are lists; barrier: neither
      break;
  }
}

bool CallRecord::is_pending() const {
  const CallState now = state();
  return now == CallState::kScheduled || now == CallState::kStarted;
}

void CallRecord::captured() noexcept {
  auto expected = CallState::kScheduled;
  state_.compare_exchange_strong(expected, CallState::kCaptured, std::memory_order_acq_rel);
}

void CallRecord::started() noexcept {
  if (state() != CallState::kScheduled) return;
  int64_t never = 0;
  if (!started_ns_.compare_exchange_strong(never, now_ns(), std::memory_order_relaxed)) return;
  auto expected = CallState::kScheduled;
  state_.compare_exchange_strong(expected, CallState::kStarted, std::memory_order_acq_rel);
  for (const auto& weak : logs) {
    if (const auto log = weak.lock()) log->on_started(*this);
  }
}

void CallRecord::ended(const std::exception_ptr& error) noexcept {
  if (has_end_.exchange(true, std::memory_order_acq_rel)) return;
  ended_ns_.store(now_ns(), std::memory_order_relaxed);
  if (error) error_ = Fault::of(error).text;
  state_.store(error ? CallState::kFailed : CallState::kCompleted, std::memory_order_release);
  for (const auto& weak : logs) {
    if (const auto log = weak.lock()) log->on_ended(*this);
  }
}

std::optional<int64_t> CallRecord::started_ns() const {
  return unless_zero(started_ns_.load(std::memory_order_relaxed));
}

std::optional<int64_t> CallRecord::ended_ns() const {
  return unless_zero(ended_ns_.load(std::memory_order_relaxed));
}

std::optional<std::string> CallRecord::error() const {
  return state() == CallState::kFailed ? std::optional(error_) : std::nullopt;
}

}  // namespace torch_overlap
