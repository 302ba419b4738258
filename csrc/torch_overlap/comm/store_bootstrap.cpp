#include "torch_overlap/comm/store_bootstrap.h"

#include "torch_overlap/comm/bootstrap.h"

namespace torch_overlap {

StoreBootstrap::StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank,
                               int size, Milliseconds timeout)
    : Bootstrap(rank, size, timeout), store_(std::move(store)), name_(std::move(name)) {}

std::vector<std::string> StoreBootstrap::all_gather(const std::string& mine) {
  const uint64_t step = step_++;
  auto all = exchange(*store_, key(step), rank(), size(), mine, timeout());
  // Everybody has come to this step, so everybody has read the one before.
  if (step > 0) (void)store_->deleteKey(concat(key(step - 1), "/", rank()));
  return all;
}

void StoreBootstrap::leave() noexcept {
  if (std::exchange(left_, true) || step_ == 0) return;
  try {
    const std::string left = name_ + ", left";
    if (store_->add(left, 1) < size()) return;
    for (int r = 0; r < size(); ++r) (void)store_->deleteKey(concat(key(step_ - 1), "/", r));
    (void)store_->deleteKey(left);
  } catch (const std::exception&) {  // the keys stay: a store may be unable to delete, or be gone
  }
}

}  // namespace torch_overlap
