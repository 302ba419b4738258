#pragma once

#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include "torch_overlap/overlap/streams.h"

namespace torch_overlap {

// The streams on a CPU: queues, which join() runs on the caller's thread. Waiting for another rank
// blocks only its own stream.
class HostStreams final : public OverlapStreams {
 public:
  explicit HostStreams(int num_compute_streams);

  void fork(bool single_stream) override;
  void join() override;
  void cancel() noexcept override;
  void run(int stream, std::string_view name, std::function<void()> work) override;
  Mark mark(int stream) override;
  void after(int stream, Mark mark) override;
  void join_stream(int stream) override;
  void wait(int stream, std::shared_ptr<WorkPtr> work) override;

  // Orders what is enqueued on the stream from now on after `is_ready` returns true. It is polled,
  // and throws when that takes too long.
  void until(int stream, std::function<bool()> is_ready);

 private:
  struct Item {
    std::string_view name;
    std::function<bool()> is_ready;  // empty: ready
    std::function<void()> work;      // empty: only the wait
  };
  struct Queue {
    std::deque<Item> items;
    uint64_t enqueued = 0;
    uint64_t done = 0;
  };
  Queue& queue_of(int stream) { return queues_.at(single_stream_ ? 0 : stream); }
  void enqueue(int stream, Item item);
  // Runs the first item of a stream if it is ready. Returns true if it did.
  bool advance(Queue& queue);
  // Runs the streams until `is_done`.
  void run_until(const std::function<bool()>& is_done);

  std::vector<Queue> queues_;
  std::mt19937_64 random_;
  bool shuffles_ = false;
  bool single_stream_ = false;
};

// Sets the order in which streams are run, for the whole process. 0, the default: communication
// first; otherwise a random order derived from `seed`, different for each operation. Finds
// dependencies that a schedule forgot. Ranks need not agree.
TORCH_OVERLAP_API void set_interleaving(uint64_t seed);

}  // namespace torch_overlap
