#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/interrupt.h"
#include "torch_overlap/comm/options.h"

namespace torch_overlap {

inline std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// Returns the message without the backtrace that c10's errors carry.
std::string error_message(const std::exception& error);

// Runs `body`; converts the store's own errors to Error.
template <typename Body>
auto with_store_errors(const std::string& what, const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(ErrorKind::kRuntime, what, ": expected the store to answer, got: ", error_message(error),
         "; has the process that serves it ended?");
  }
}

// Polls `is_done` until it is true, or the timeout is over. Returns true if it became true.
// Store::wait() would block the connection for the other threads of this process, and what those
// have to publish may be what the missing ranks wait for. A signal would not end Store::wait()
// either, but ends this (interrupt.h).
template <typename IsDone>
bool poll(Milliseconds timeout, const IsDone& is_done) {
  using std::chrono::microseconds;
  const auto begin = std::chrono::steady_clock::now();
  while (true) {
    if (is_done()) return true;
    const auto waited =
        std::chrono::duration_cast<microseconds>(std::chrono::steady_clock::now() - begin);
    if (waited >= timeout) return false;
    check_interrupt();
    const auto pause = std::clamp(waited / 8, microseconds(200), microseconds(100'000));
    std::this_thread::sleep_for(std::min(pause, microseconds(timeout) - waited));
  }
}

// Polls for a set of keys. Most polls check only the first key that was missing.
class StoreKeys {
 public:
  explicit StoreKeys(std::vector<std::string> keys) : keys_(std::move(keys)) {}

  const std::vector<std::string>& keys() const { return keys_; }
  bool all(c10d::Store& store);
  // Returns the positions of the missing keys.
  std::vector<int> missing(c10d::Store& store) const;

 private:
  const std::vector<std::string> keys_;
  size_t next_ = 0;
};

// Returns "<key>/0", "<key>/1", ...
std::vector<std::string> rank_keys(const std::string& key, int size);
// Stores `mine` after a '=', because some stores cannot distinguish an empty value from a missing
// key.
void set_part(c10d::Store& store, const std::string& key, const std::string& mine);
// Returns the value, which begins with '=', or nothing if the key is missing, even if it has just
// been deleted: Store::get() would wait until it is set again.
std::optional<std::string> try_get(c10d::Store& store, const std::string& key);
// Returns the parts without their '='; nothing if one is missing.
std::optional<std::vector<std::string>> try_get_all(c10d::Store& store,
                                                    const std::vector<std::string>& keys);

}  // namespace torch_overlap
