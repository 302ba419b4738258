#include "torch_overlap/comm/store_bootstrap.h"

namespace torch_overlap {

StoreBootstrap::StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank,
                               int size, Milliseconds timeout, ExchangeCallbacks owner)
    : Bootstrap(rank, size, timeout),
      store_(std::move(store)),
      name_(std::move(name)),
      owner_(std::move(owner)) {}

std::vector<std::string> StoreBootstrap::all_gather(const std::string& mine) {
  return exchange(*store_, next_key(), rank(), size(), mine, timeout(), owner_);
}

void StoreBootstrap::publish(const std::string& mine) {
  torch_overlap::publish(*store_, next_key(), rank(), size(), mine);
}

}  // namespace torch_overlap
