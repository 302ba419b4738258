#include "torch_overlap/comm/c10d/pair_comms.h"

#include <ATen/core/jit_type.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

#include "torch_overlap/base/boundary.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/interrupt.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/shutdown.h"
#include "torch_overlap/common/capture.h"

namespace torch_overlap {
namespace {

// Maximum number of pairs with a tag. Tags that change per message, say per step, would create one
// communicator each, which holds memory and threads.
constexpr int kMaxTaggedPairs = 64;

std::string describe(const PairKey& key) {
  return concat("messages from rank ", key.src, " to rank ", key.dst,
                key.tag == 0 ? std::string() : concat(" with tag ", key.tag));
}

}  // namespace

// A message that waits for its communicator. Until it is issued, the host answers queries of it.
class QueuedWork final : public c10d::Work {
 public:
  using Inner = c10::intrusive_ptr<c10d::Work>;

  QueuedWork(const WorkParts& parts, c10::Device device)
      : c10d::Work(parts.rank, parts.type),
        outputs_(parts.outputs),
        source_(parts.source),
        device_(device) {}

  void issued(Inner work) {
    std::unique_lock lock(mutex_);
    inner_ = std::move(work);
    changed_.notify_all();
    const auto future = future_;
    lock.unlock();
    if (future) chain(*inner_, future);
  }
  void failed(std::exception_ptr error) {
    std::unique_lock lock(mutex_);
    error_ = std::move(error);
    changed_.notify_all();
    const auto future = future_;
    lock.unlock();
    if (future) future->setError(error_);
  }

  bool isCompleted() override {
    const auto work = now();
    return work ? work->isCompleted() : exception() != nullptr;
  }
  bool isSuccess() const override {
    const auto work = now();
    return work && work->isSuccess();
  }
  std::exception_ptr exception() const override {
    const std::lock_guard lock(mutex_);
    return inner_ ? inner_->exception() : error_;
  }
  int sourceRank() const override { return source_ >= 0 ? source_ : get()->sourceRank(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { get()->synchronize(); }
  void blockCurrentStream() override { get()->blockCurrentStream(); }
  // Returns at once: the caller may hold a lock that the message needs.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::unique_lock lock(mutex_);
    if (inner_) {
      const Inner work = inner_;
      lock.unlock();
      return work->getFuture();
    }
    if (!future_) {
      std::vector<c10::Device> devices;
      if (!device_.is_cpu()) devices.push_back(device_);
      future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                            std::move(devices));
      if (error_) future_->setError(error_);
    }
    return future_;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return with_exception_translation([&] { return get(timeout)->wait(timeout); });
  }

 private:
  using Future = c10::ivalue::Future;

  // The callback runs on streams that are ordered after the inner operation.
  static void chain(c10d::Work& inner, const c10::intrusive_ptr<Future>& future) {
    inner.getFuture()->addCallback([future](Future& done) {
      if (done.hasError()) return future->setError(done.exception_ptr());
      future->markCompleted(done.constValue());
    });
  }
  Inner now() const {
    const std::lock_guard lock(mutex_);
    return inner_;
  }
  // Blocks until the message is issued. The group's timeout bounds the creation of its
  // communicator.
  Inner get(std::chrono::milliseconds timeout = kNoTimeout) const {
    std::unique_lock lock(mutex_);
    const auto longest = timeout == kNoTimeout ? kMaxTimeout : clamp_timeout(timeout);
    const auto until = std::chrono::steady_clock::now() + longest;
    const auto is_known = [this] { return inner_ || error_; };
    if (!wait_interruptibly(changed_, lock, until, is_known)) {
      fail(ErrorKind::kTimeout, "wait: expected the other rank to issue its half within ",
           timeout.count(), " ms, got no answer; it goes on and can be waited for again");
    }
    if (error_) std::rethrow_exception(error_);
    return inner_;
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  const std::vector<at::Tensor> outputs_;
  const int source_;
  const c10::Device device_;
  Inner inner_;
  std::exception_ptr error_;
  c10::intrusive_ptr<Future> future_;  // returned to callers before the message was issued
};

// One communicator, or the thread that creates it and then issues the queued messages.
class PairComms::Pair : public std::enable_shared_from_this<Pair> {
 public:
  Pair(const PairKey& key, c10::Device device) : key_(key), device_(device) {}

  C10dWork issue(const WorkParts& parts, Issue issue, const CommFactory& make);
  CommPtr comm() const {
    const std::lock_guard lock(mutex_);
    return comm_;
  }
  void close(const std::exception_ptr& error);

 private:
  struct Message {
    Issue issue;
    c10::intrusive_ptr<QueuedWork> work;
    std::optional<c10::Event> ready;  // marks the preceding work on the caller's stream
  };

  void run(const CommFactory& make);
  void issue_queued();
  void issue_one(Message& message);

  const PairKey key_;
  const c10::Device device_;
  mutable std::mutex mutex_;
  CommPtr comm_;
  std::deque<Message> queue_;
  bool is_queue_drained_ = false;  // the queue is empty and stays empty
  bool is_started_ = false;
  std::exception_ptr error_;
};

PairComms::C10dWork PairComms::Pair::issue(const WorkParts& parts, Issue issue,
                                           const CommFactory& make) {
  std::unique_lock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  if (is_queue_drained_) {
    const CommPtr comm = comm_;
    lock.unlock();
    return issue(*comm);
  }
  TORCH_OVERLAP_CHECK(!is_capturing(device_), kState, "send/recv: expected ", describe(key_),
                      " before the capture too, got the first one inside; send one eagerly first, "
                      "which makes their communicator, or use batch_isend_irecv");
  Message message{std::move(issue), c10::make_intrusive<QueuedWork>(parts, device_), std::nullopt};
  auto work = message.work;
  if (!device_.is_cpu()) {
    const c10::impl::VirtualGuardImpl impl(device_.type());
    message.ready.emplace(device_.type());
    message.ready->record(impl.getStream(device_));
  }
  queue_.push_back(std::move(message));
  if (is_started_) return work;
  try {
    std::thread([self = shared_from_this(), make] { self->run(make); }).detach();
  } catch (...) {  // no thread available: dequeue; the next message tries again
    queue_.pop_back();
    throw;
  }
  is_started_ = true;
  return work;
}

void PairComms::Pair::run(const CommFactory& make) {
  const BackgroundTask until_done;
  try {
    CommPtr comm = make(key_, device_);
    std::unique_lock lock(mutex_);
    comm_ = comm;
    if (error_) {  // closed in the meantime
      lock.unlock();
      comm->abort();
      return;
    }
    lock.unlock();
    issue_queued();
  } catch (...) {
    close(std::current_exception());
  }
}

void PairComms::Pair::issue_queued() {
  while (true) {
    std::unique_lock lock(mutex_);
    if (queue_.empty()) {
      is_queue_drained_ = true;
      return;
    }
    Message message = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    try {
      issue_one(message);
    } catch (...) {
      message.work->failed(std::current_exception());
    }
    drop_or_leak(std::move(message));  // it holds tensors
  }
}

void PairComms::Pair::issue_one(Message& message) {
  if (!message.ready) return message.work->issued(message.issue(*comm_));
  const c10::DeviceGuard device(device_);
  const c10::impl::VirtualGuardImpl impl(device_.type());
  const c10::Stream stream = impl.getStreamFromGlobalPool(device_, /*isHighPriority=*/false);
  message.ready->block(stream);
  const c10::StreamGuard guard(stream);
  message.work->issued(message.issue(*comm_));
}

void PairComms::Pair::close(const std::exception_ptr& error) {
  std::deque<Message> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
    is_queue_drained_ = false;
    dropped.swap(queue_);
  }
  for (const Message& message : dropped) message.work->failed(error);
  drop_or_leak(std::move(dropped));
}

struct PairComms::Shared {
  CommFactory make;
  std::mutex mutex;
  std::map<PairKey, std::shared_ptr<Pair>> pairs;
  std::exception_ptr closed;
  int num_tagged = 0;
};

PairComms::PairComms(CommFactory make) : shared_(std::make_shared<Shared>()) {
  shared_->make = std::move(make);
}

PairComms::~PairComms() { close("the process group is gone"); }

PairComms::C10dWork PairComms::issue(const PairKey& key, c10::Device device, const WorkParts& parts,
                                     Issue issue) {
  std::shared_ptr<Pair> pair;
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->closed) std::rethrow_exception(shared_->closed);
    auto& slot = shared_->pairs[key];
    if (!slot) {
      if (key.tag != 0 && ++shared_->num_tagged > kMaxTaggedPairs) {
        shared_->pairs.erase(key);
        --shared_->num_tagged;
        fail(ErrorKind::kUnsupported, "send/recv: expected at most ", kMaxTaggedPairs,
             " combinations of sender, receiver and tag other than 0 on this rank, got another: ",
             describe(key), "; use the same tags again, or tag 0");
      }
      slot = std::make_shared<Pair>(key, device);
    }
    pair = slot;
  }
  return pair->issue(parts, std::move(issue), shared_->make);
}

std::vector<PairComms::CommPtr> PairComms::comms() const {
  const std::lock_guard lock(shared_->mutex);
  std::vector<CommPtr> result;
  for (const auto& [key, pair] : shared_->pairs) {
    if (auto comm = pair->comm()) result.push_back(std::move(comm));
  }
  return result;
}

void PairComms::close(const std::string& reason) {
  std::vector<std::shared_ptr<Pair>> pairs;
  const auto error = std::make_exception_ptr(Error(ErrorKind::kState, reason));
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->closed = error;
    for (const auto& [key, pair] : shared_->pairs) pairs.push_back(pair);
  }
  for (const auto& pair : pairs) pair->close(error);
}

}  // namespace torch_overlap
