#include "torch_overlap/comm/backends/nccl/remote_windows.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace torch_overlap {

std::shared_ptr<OneSided> RemoteWindows::open(const NcclApi& api, const BackendContext& context,
                                              Bootstrap& bootstrap, std::string_view op,
                                              SymmetricMemory& memory) {
  BackendContext own = context;
  {
    const std::lock_guard lock(mutex_);
    own.store =
        c10::make_intrusive<c10d::PrefixStore>(concat("one-sided #", opened_++), context.store);
  }
  own.name = memory.name();
  own.options.timeout = context.timeout();
  const auto made = std::make_shared<OneSided>(memory);
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(windows_, [](const auto& weak) { return weak.expired(); });
    windows_.push_back(made);
    if (is_stopped_) made->stop();  // open() then fails on all ranks
  }
  made->open(api, own, bootstrap, op, memory);
  return made;
}

std::vector<std::shared_ptr<OneSided>> RemoteWindows::alive() {
  std::vector<std::shared_ptr<OneSided>> alive;
  const std::lock_guard lock(mutex_);
  for (const auto& weak : windows_) {
    if (auto window = weak.lock()) alive.push_back(std::move(window));
  }
  return alive;
}

void RemoteWindows::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
  }
  for (const auto& window : alive()) window->stop();
}

void RemoteWindows::close(Milliseconds limit) {
  for (const auto& window : alive()) window->close(limit);
}

}  // namespace torch_overlap
