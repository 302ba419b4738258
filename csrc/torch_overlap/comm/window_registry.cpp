#include <algorithm>
#include <map>
#include <mutex>
#include <thread>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/window.h"

namespace torch_overlap {
namespace {

struct WindowEntry {
  std::weak_ptr<TorchCommWindow> window;
  const TorchCommWindow* address;  // finds the entry of a window that is being destroyed
  std::thread::id owner;
  bool is_thread_rank;  // other ranks of this process may have a window of this name
};

struct WindowRegistry {
  ForkSafeMutex mutex;
  std::map<std::string, std::vector<WindowEntry>> entries;
};

WindowRegistry& window_registry() { return LeakySingleton<WindowRegistry>::get(); }

}  // namespace

std::shared_ptr<TorchCommWindow> get_window(const std::string& name) {
  {
    std::shared_ptr<TorchCommWindow> window;  // a last reference is dropped after the lock
    const std::lock_guard lock(window_registry().mutex);
    if (const auto found = window_registry().entries.find(name);
        found != window_registry().entries.end()) {
      // Search from the newest: an earlier communicator may have had the same name.
      for (auto entry = found->second.rbegin(); entry != found->second.rend(); ++entry) {
        if (entry->is_thread_rank && entry->owner != std::this_thread::get_id()) continue;
        window = entry->window.lock();
        if (window) return window;
      }
    }
  }
  fail(ErrorKind::kValue, "get_window: expected the name of a live window of this rank, got '",
       name, "'; there are ", list_string(window_names()));
}

std::vector<std::string> window_names() {
  const std::lock_guard lock(window_registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, entries] : window_registry().entries) names.push_back(name);
  return names;
}

namespace detail {

void add_window(const std::shared_ptr<TorchCommWindow>& window) {
  const auto& comm = window->comm();
  const bool is_thread_rank = comm->backend_name() == "local" && comm->size() > 1;
  const std::lock_guard lock(window_registry().mutex);
  window_registry().entries[window->name()].push_back(
      {window, window.get(), std::this_thread::get_id(), is_thread_rank});
}

void remove_window(const TorchCommWindow* window) {
  const std::lock_guard lock(window_registry().mutex);
  const auto found = window_registry().entries.find(window->name());
  if (found == window_registry().entries.end()) return;
  std::erase_if(found->second,
                [window](const WindowEntry& entry) { return entry.address == window; });
  if (found->second.empty()) window_registry().entries.erase(found);
}

}  // namespace detail
}  // namespace torch_overlap
