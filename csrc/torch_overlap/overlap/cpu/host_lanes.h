#pragma once

#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include "torch_overlap/overlap/lanes.h"

namespace torch_overlap {

// Lanes on a CPU: queues, which join() runs on the caller's thread. Waiting for another rank blocks
// only its own lane.
class HostLanes final : public Lanes {
 public:
  explicit HostLanes(int num_compute_lanes);

  void fork(bool single_lane) override;
  void join() override;
  void cancel() noexcept override;
  void run(int lane, std::string_view name, std::function<void()> work) override;
  Mark mark(int lane) override;
  void after(int lane, Mark mark) override;
  void join_lane(int lane) override;
  void wait(int lane, std::shared_ptr<WorkPtr> work) override;

  // Orders what is enqueued on the lane from now on after `is_ready` returns true. It is polled,
  // and throws when that takes too long.
  void until(int lane, std::function<bool()> is_ready);

 private:
  struct Item {
    std::string_view name;
    std::function<bool()> is_ready;  // empty: ready
    std::function<void()> work;      // empty: only the wait
  };
  struct Queue {
    std::deque<Item> items;
    uint64_t put = 0;
    uint64_t done = 0;
  };
  Queue& queue_of(int lane) { return queues_.at(single_lane_ ? 0 : lane); }
  void put(int lane, Item item);
  // Runs the first item of a lane if it is ready. Returns true if it did.
  bool advance(Queue& queue);
  // Runs the lanes until `is_done`.
  void run_until(const std::function<bool()>& is_done);

  std::vector<Queue> queues_;
  std::mt19937_64 random_;
  bool shuffles_ = false;
  bool single_lane_ = false;
};

// Sets the order in which lanes are run, for the whole process. 0, the default: communication
// first; otherwise a random order derived from `seed`, different for each operation. Finds
// dependencies that a schedule forgot. Ranks need not agree.
TORCH_OVERLAP_API void set_interleaving(uint64_t seed);

}  // namespace torch_overlap
