#include "torch_overlap/ops/regather.h"

#include <ATen/ops/empty.h>

#include <mutex>
#include <utility>
#include <vector>

#include "torch_overlap/base/process.h"
#include "torch_overlap/ops/rows.h"

namespace torch_overlap::ops {
namespace {

struct Regather {
  std::shared_ptr<TorchComm> comm;
  at::Tensor x;     // keeps its memory, by which it is found, from being used again
  int64_t version;  // of x, whose values may be others after a backward pass that failed
  int64_t dim;
  at::Tensor rows;
  WorkPtr work;

  bool is_of(const std::shared_ptr<TorchComm>& other_comm, const at::Tensor& other,
             int64_t other_dim) const {
    return comm == other_comm && dim == other_dim && x.const_data_ptr() == other.const_data_ptr() &&
           version == other._version() && x.scalar_type() == other.scalar_type() &&
           x.sizes() == other.sizes() && x.strides() == other.strides();
  }
};

class Regathers {
 public:
  void add(Regather regather) {
    std::lock_guard lock(mutex_);
    started_.push_back(std::move(regather));
  }
  // Removes those for which `is_match` holds, in the order of their start.
  template <typename Predicate>
  std::vector<Regather> take(const Predicate& is_match) {
    std::lock_guard lock(mutex_);
    const auto first = std::stable_partition(started_.begin(), started_.end(),
                                             [&](const Regather& one) { return !is_match(one); });
    std::vector<Regather> taken(std::make_move_iterator(first),
                                std::make_move_iterator(started_.end()));
    started_.erase(first, started_.end());
    return taken;
  }

 private:
  ForkSafeMutex mutex_;
  std::vector<Regather> started_;
};

}  // namespace

void start_regather(const std::shared_ptr<TorchComm>& comm, const at::Tensor& x, int64_t dim) {
  const auto own = to_rows(x, dim);
  auto rows = at::empty({comm->size() * own.size(0), own.size(1)}, own.options());
  auto work = comm->all_gather_single(rows, own, /*async_op=*/true);
  LeakySingleton<Regathers>::get().add({.comm = comm,
                                        .x = x,
                                        .version = x._version(),
                                        .dim = dim,
                                        .rows = std::move(rows),
                                        .work = std::move(work)});
}

std::optional<at::Tensor> take_regathered(const std::shared_ptr<TorchComm>& comm,
                                          const at::Tensor& x, int64_t dim) {
  auto taken = LeakySingleton<Regathers>::get().take(
      [&](const Regather& one) { return one.is_of(comm, x, dim); });
  for (const Regather& one : taken) one.work->wait();
  return taken.empty() ? std::nullopt : std::optional(std::move(taken.back().rows));
}

void drop_regathered(const std::shared_ptr<TorchComm>& comm) {
  const auto dropped =
      LeakySingleton<Regathers>::get().take([&](const Regather& one) { return one.comm == comm; });
  for (const Regather& one : dropped) one.work->wait();
}

}  // namespace torch_overlap::ops
