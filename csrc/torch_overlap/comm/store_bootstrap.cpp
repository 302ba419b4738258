#include "torch_overlap/comm/store_bootstrap.h"

#include "torch_overlap/comm/bootstrap.h"

namespace torch_overlap {

StoreBootstrap::StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank,
                               int size, Milliseconds timeout)
    : Bootstrap(rank, size, timeout), store_(std::move(store)), name_(std::move(name)) {}

std::vector<std::string> StoreBootstrap::all_gather(const std::string& mine) {
  return exchange(*store_, concat(name_, ", step ", step_++), rank(), size(), mine, timeout());
}

}  // namespace torch_overlap
