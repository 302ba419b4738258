#pragma once

#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include "torch_overlap/overlap/lanes.h"

namespace torch_overlap {

// Lanes on a CPU: queues, which join() works off on the caller's thread. What waits for another
// rank holds up its own lane only.
class HostLanes final : public Lanes {
 public:
  explicit HostLanes(int computes);

  void fork(bool as_one) override;
  void join() override;
  void cancel() noexcept override;
  void run(int lane, std::string_view name, std::function<void()> work) override;
  Mark mark(int lane) override;
  void after(int lane, Mark mark) override;
  void settle(int lane) override;
  void wait(int lane, std::shared_ptr<WorkPtr> work) override;

  // What is put on the lane from now on comes after `is_ready` has said so, which is asked again
  // and again. It throws when that takes too long.
  void until(int lane, std::function<bool()> is_ready);

 private:
  struct Item {
    std::string_view name;
    std::function<bool()> is_ready;  // empty: it is
    std::function<void()> work;      // empty: nothing but the wait
  };
  struct Queue {
    std::deque<Item> items;
    uint64_t put = 0;
    uint64_t done = 0;
  };
  Queue& queue_of(int lane) { return queues_.at(as_one_ ? 0 : lane); }
  void put(int lane, Item item);
  // Does the first item of a lane, if it is ready.
  bool advance(Queue& queue);
  // Works the lanes off until `is_done`.
  void work_off(const std::function<bool()>& is_done);

  std::vector<Queue> queues_;
  std::mt19937_64 random_;
  bool shuffles_ = false;
  bool as_one_ = false;
};

// In which order lanes are worked off: 0, the default, one after another as they were filled; else
// a random one that `seed` stands for, another for each operation. Finds what a schedule forgot to
// order. Of the whole process; ranks need not agree.
TORCH_OVERLAP_API void set_interleaving(uint64_t seed);

}  // namespace torch_overlap
