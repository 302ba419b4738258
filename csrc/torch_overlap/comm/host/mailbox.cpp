#include "torch_overlap/comm/host/mailbox.h"

#include <algorithm>
#include <cstring>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

std::exception_ptr make_error(ErrorKind kind, const std::string& message) {
  return std::make_exception_ptr(Error(kind, message));
}

std::string describe(const Message& message, int rank) {
  return concat(to_string(message.primitive), " with ", message.bytes.size(), " bytes on rank ",
                rank);
}

std::string left_message(int rank, const std::string& reason) {
  return concat("rank ", rank, " has left (", reason, ")");
}

}  // namespace

class Mailbox::PostedTransfer final : public Transfer {
 public:
  enum class State { kWaiting, kCopying, kDone, kFailed };

  PostedTransfer(std::shared_ptr<Mailbox> box, int rank, bool is_send, const Message& message)
      : box_(std::move(box)), rank(rank), is_send(is_send), message(message) {}

  ~PostedTransfer() override {
    std::unique_lock lock(box_->mutex_);
    if (state == State::kWaiting) std::erase(box_->slot(from(), to(), message.kind), this);
    ended_.wait(lock, [this] { return state != State::kCopying; });
  }

  bool wait(Deadline deadline) override {
    std::unique_lock lock(box_->mutex_);
    ended_.wait_until(lock, deadline, [this] { return state > State::kCopying; });
    // The other thread is inside memcpy, which ends soon.
    ended_.wait(lock, [this] { return state != State::kCopying; });
    if (state == State::kFailed) std::rethrow_exception(error_);
    return state == State::kDone;
  }

  bool is_missing() const override {
    std::lock_guard lock(box_->mutex_);
    return state == State::kWaiting;
  }
  int peer() const override { return message.peer == kAnySource ? source : message.peer; }

  bool is_from_any() const { return message.peer == kAnySource; }
  // Indices of the slot of this half.
  int from() const { return is_send ? rank : is_from_any() ? box_->size_ : message.peer; }
  int to() const { return is_send ? message.peer : rank; }

  // Ends this half. The lock must be held, so that the half is not destroyed before it is notified.
  void end(std::exception_ptr error) {
    state = error ? State::kFailed : State::kDone;
    error_ = std::move(error);
    ended_.notify_one();
  }

 private:
  const std::shared_ptr<Mailbox> box_;
  std::condition_variable ended_;
  std::exception_ptr error_;

 public:
  const int rank;
  const bool is_send;
  const Message message;
  // Guarded by the mailbox's mutex.
  State state = State::kWaiting;
  uint64_t number = 0;  // position in the order of posting of all halves
  int source = kAnySource;
};

Mailbox::Mailbox(int size)
    : size_(size), ranks_(size), slots_((static_cast<size_t>(size) + 1) * size * 2) {}
Mailbox::~Mailbox() = default;

std::deque<Mailbox::PostedTransfer*>& Mailbox::slot(int from, int to, MessageKind kind) {
  return slots_[(static_cast<size_t>(from) * size_ + to) * 2 + static_cast<size_t>(kind)];
}

Mailbox::PostedTransfer* Mailbox::take_match(const PostedTransfer& mine) {
  const auto matches = [&](const PostedTransfer* posted) {
    return posted->is_send != mine.is_send && posted->message.tag == mine.message.tag;
  };
  const MessageKind kind = mine.message.kind;
  std::deque<PostedTransfer*>* best = nullptr;
  std::deque<PostedTransfer*>::iterator first;
  const auto look = [&](int from) {
    auto& waiting = slot(from, mine.to(), kind);
    const auto found = std::find_if(waiting.begin(), waiting.end(), matches);
    if (found == waiting.end() || (best != nullptr && (*first)->number < (*found)->number)) return;
    best = &waiting;
    first = found;
  };
  if (mine.is_from_any()) {
    for (int from = 0; from < size_; ++from) {
      if (from != mine.rank) look(from);
    }
  } else {
    look(mine.from());
    if (mine.is_send) look(size_);
  }
  if (best == nullptr) return nullptr;
  PostedTransfer* const match = *first;
  best->erase(first);
  return match;
}

std::unique_ptr<Transfer> Mailbox::post(int rank, bool is_send, const Message& message) {
  auto mine = std::make_unique<PostedTransfer>(shared_from_this(), rank, is_send, message);
  std::unique_lock lock(mutex_);
  if (!ranks_[rank].stopped.empty()) fail(ErrorKind::kState, ranks_[rank].stopped);
  mine->number = posted_++;
  PostedTransfer* const other = take_match(*mine);
  if (other == nullptr) {
    if (!mine->is_from_any() && !ranks_[message.peer].left.empty()) {
      fail(ErrorKind::kRuntime, left_message(message.peer, ranks_[message.peer].left));
    }
    slot(mine->from(), mine->to(), message.kind).push_back(mine.get());
    return mine;
  }
  const PostedTransfer& sender = is_send ? *mine : *other;
  PostedTransfer& receiver = is_send ? *other : *mine;
  receiver.source = sender.rank;
  std::exception_ptr error;
  if (sender.message.bytes.size() != receiver.message.bytes.size() ||
      sender.message.primitive != receiver.message.primitive) {
    error = make_error(ErrorKind::kValue,
                       concat("expected the same operation and size on both ranks, got ",
                              describe(sender.message, sender.rank), " and ",
                              describe(receiver.message, receiver.rank)));
  } else {
    mine->state = other->state = PostedTransfer::State::kCopying;
    lock.unlock();
    std::memcpy(receiver.message.bytes.data(), sender.message.bytes.data(),
                receiver.message.bytes.size());
    lock.lock();
  }
  mine->end(error);
  other->end(error);
  return mine;
}

template <typename Predicate>
void Mailbox::end_waiting(const Predicate& should_end, const std::exception_ptr& error) {
  for (auto& waiting : slots_) {
    std::erase_if(waiting, [&](PostedTransfer* posted) {
      if (!should_end(*posted)) return false;
      posted->end(error);
      return true;
    });
  }
}

void Mailbox::stop(int rank, const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (!ranks_[rank].stopped.empty()) return;
  ranks_[rank].stopped = reason;
  ranks_[rank].changed.notify_all();
  end_waiting([rank](const PostedTransfer& posted) { return posted.rank == rank; },
              make_error(ErrorKind::kState, reason));
}

void Mailbox::leave(int rank, const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (!ranks_[rank].left.empty()) return;
  ranks_[rank].left = reason;
  end_waiting([rank](const PostedTransfer& posted) { return posted.message.peer == rank; },
              make_error(ErrorKind::kRuntime, left_message(rank, reason)));
}

std::string Mailbox::departure_reason(int rank) {
  std::lock_guard lock(mutex_);
  const auto& reason = ranks_[rank].left;
  return reason.empty() ? "" : left_message(rank, reason);
}

void Mailbox::sleep(int rank, Deadline until) {
  std::unique_lock lock(mutex_);
  Rank& me = ranks_[rank];
  if (me.changed.wait_until(lock, until, [&me] { return !me.stopped.empty(); })) {
    fail(ErrorKind::kState, me.stopped);
  }
}

}  // namespace torch_overlap
