// Native communicator of the next generation's members.
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backends/nccl/backend.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/common/cuda/thread_device.h"

namespace torch_overlap {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kOldCommStopTimeout = std::chrono::seconds(10);
// Time to wait for graphs that the caller has released: the driver reports their end on a thread of
// its own.
constexpr auto kGraphReleaseTimeout = std::chrono::seconds(1);
constexpr auto kGraphPollInterval = std::chrono::milliseconds(1);

constexpr const char* kCanShrink = "shrink";
constexpr const char* kShrunk = "done";

// Remaining part of a timeout that starts at construction; at least 1 ms.
class TimeLeft {
 public:
  explicit TimeLeft(Milliseconds timeout) : deadline_(Clock::now() + timeout) {}
  Milliseconds operator()() const {
    return std::max(std::chrono::ceil<Milliseconds>(deadline_ - Clock::now()), Milliseconds(1));
  }

 private:
  const Clock::time_point deadline_;
};

bool all_replied(const std::vector<std::string>& replies, const std::string& what) {
  return std::all_of(replies.begin(), replies.end(), [&](const auto& one) { return one == what; });
}

// Returns the ranks of the old generation that are not among `kept`.
std::vector<int> lost_ranks(const std::vector<int>& kept, int old_size) {
  std::vector<int> lost;
  for (int r = 0; r < old_size; ++r) {
    if (std::find(kept.begin(), kept.end(), r) == kept.end()) lost.push_back(r);
  }
  return lost;
}

}  // namespace

std::shared_ptr<NcclHandle> NcclHandle::shrink(const BackendContext& context,
                                               std::vector<int> excluded, Milliseconds timeout) {
  auto child = std::make_shared<Native>(api_, context.name, context.options.hints, native_->device);
  child->config.get()->shrinkShare = 0;  // a stopped communicator shares nothing
  const auto make = [self = shared_from_this(), child, excluded = std::move(excluded)]() mutable {
    cuda::use_device(child->device);
    const NcclApi& api = self->api();
    const std::lock_guard lock(self->mutex());
    TORCH_OVERLAP_CHECK(self->can_shrink(), kState,
                        "reconfigure: expected a communicator that NCCL can shrink, got one that "
                        "was stopped");
    nccl_check(api,
               api.comm_shrink(self->comm(), excluded.data(), static_cast<int>(excluded.size()),
                               &child->comm, child->config.get(), NCCL_SHRINK_ABORT),
               "ncclCommShrink");
  };
  TORCH_OVERLAP_CHECK(run_bounded_on_cuda(make, timeout), kTimeout,
                      "reconfigure: expected ncclCommShrink to end within ", timeout.count(),
                      " ms, got no answer");
  return std::shared_ptr<NcclHandle>(
      new NcclHandle(api_, std::move(child), std::make_shared<std::timed_mutex>()));
}

std::shared_ptr<Backend> NcclBackend::regroup(const std::function<RegroupRequest()>& rendezvous,
                                              Milliseconds timeout) {
  const TimeLeft left(timeout);
  // Does the same as abort(), except that NCCL is not stopped yet: it could not shrink any more.
  acted_on_failure_ = true;
  runtime_->failure.set(
      WorkStatus::ERROR,
      std::make_exception_ptr(Error(
          ErrorKind::kState, concat("communicator '", runtime_->name, "' was reconfigured"))));
  runtime_->stop_waits();  // otherwise they would block the next generation's streams
  remote_.stop();
  RegroupRequest request = rendezvous();
  const auto& context = request.context;
  // A replay would communicate with ranks that have left, which the device cannot report.
  const auto graphs_deadline =
      Clock::now() + std::min<Clock::duration>(left(), kGraphReleaseTimeout);
  while (handle_->has_graphs() && Clock::now() < graphs_deadline)
    std::this_thread::sleep_for(kGraphPollInterval);
  const std::string mine = handle_->has_graphs() ? "graphs" : "none";
  const auto replies =
      exchange(*context.store, "reconfigure: graphs", context.rank, context.size, mine, left());
  for (int r = 0; r < context.size; ++r) {
    TORCH_OVERLAP_CHECK(replies[r] == "none", kState,
                        "reconfigure: expected no CUDA graph that captured '", context.name,
                        "', got some on the member that is to be rank ", r,
                        "; reset() them and drop what holds them, then capture again");
  }

  request.context.options.timeout = left();
  auto backend = shrink(request);
  // This also ends operations that are still queued on the device. Half of the time is left for the
  // creation below.
  handle_->stop(std::min<Milliseconds>(left() / 2, kOldCommStopTimeout));
  if (backend) return backend;
  request.context.options.timeout = left();
  return create(request.context, handle_->api());
}

std::shared_ptr<NcclBackend> NcclBackend::shrink(const RegroupRequest& request) {
  const auto& context = request.context;
  const auto& kept = request.old_ranks;
  // The condition is the same on every member.
  const bool fewer = !kept.empty() && static_cast<int>(kept.size()) < context_.size;
  if (!fewer || !std::is_sorted(kept.begin(), kept.end())) return nullptr;
  const TimeLeft left(context.options.timeout);
  // Half of the time: the other half is for a fresh communicator, if this one fails.
  const TimeLeft half(context.options.timeout / 2);
  const auto agreed = exchange(*context.store, "reconfigure: can shrink", context.rank,
                               context.size, handle_->can_shrink() ? kCanShrink : "no", half());
  if (!all_replied(agreed, kCanShrink)) return nullptr;

  std::shared_ptr<NcclHandle> child;
  std::string outcome = kShrunk;
  try {
    child = handle_->shrink(context, lost_ranks(kept, context_.size), half());
  } catch (const std::exception& error) {
    outcome = error.what();
  }
  const auto outcomes =
      exchange(*context.store, "reconfigure: shrunk", context.rank, context.size, outcome, left());
  if (all_replied(outcomes, kShrunk)) return start(context, std::move(child));
  if (child) child->stop(Milliseconds(0));
  const auto reason = std::find_if(outcomes.begin(), outcomes.end(),
                                   [](const auto& one) { return one != kShrunk; });
  TORCH_WARN("reconfigure of '", context.name, "': ncclCommShrink did not work (", *reason,
             "); a fresh communicator is made");
  return nullptr;
}

}  // namespace torch_overlap
