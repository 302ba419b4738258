#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "torch_overlap/symm/bootstrap.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap::testing {

using std::chrono::milliseconds;

// Ranks that are threads of one process.
class ThreadExchange {
 public:
  explicit ThreadExchange(int size) : values_(size) {}

  std::vector<std::string> all_gather(int rank, const std::string& mine, milliseconds timeout) {
    std::unique_lock lock(mutex_);
    const auto round = round_;
    values_[rank] = mine;
    if (++num_arrived_ == values_.size()) {
      num_arrived_ = 0;
      ++round_;
      result_ = values_;
      changed_.notify_all();
    } else if (!changed_.wait_for(lock, timeout, [&] { return round_ != round; })) {
      --num_arrived_;
      fail(ErrorKind::kTimeout, "a rank did not come");
    }
    return result_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> values_;
  std::vector<std::string> result_;
  size_t num_arrived_ = 0;
  uint64_t round_ = 0;
};

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(ThreadExchange& board, int rank, int size,
                  milliseconds timeout = milliseconds(10'000))
      : Bootstrap(rank, size, timeout), board_(board) {}
  std::vector<std::string> all_gather(const std::string& mine) override {
    return board_.all_gather(rank(), mine, timeout());
  }

 private:
  ThreadExchange& board_;
};

inline SymmetricMemory::Request request_of(at::Tensor tensor) {
  return {.op = "test", .name = "memory", .tensor = std::move(tensor), .digest = "", .fault = {}};
}

inline void run_threads(int size, const std::function<void(int, ThreadExchange&)>& body) {
  ThreadExchange board(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { body(rank, board); });
  }
  for (auto& thread : threads) thread.join();
}

template <typename Body>
std::optional<Error> thrown_error(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

}  // namespace torch_overlap::testing
