#include "torch_overlap/comm/store_access.h"

#include <c10/util/Exception.h>

namespace torch_overlap {

std::string error_message(const std::exception& error) {
  const auto* from_c10 = dynamic_cast<const c10::Error*>(&error);
  return from_c10 != nullptr ? from_c10->what_without_backtrace() : error.what();
}

bool StoreKeys::all(c10d::Store& store) {
  for (; next_ < keys_.size() && store.check({keys_[next_]}); ++next_) {
    if (store.check(keys_)) return true;
  }
  if (next_ == keys_.size()) next_ = 0;  // a rank that had published has given up
  return false;
}

std::vector<int> StoreKeys::missing(c10d::Store& store) const {
  std::vector<int> missing;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (!store.check({keys_[i]})) missing.push_back(static_cast<int>(i));
  }
  return missing;
}

std::vector<std::string> rank_keys(const std::string& key, int size) {
  std::vector<std::string> keys;
  keys.reserve(size);
  for (int r = 0; r < size; ++r) keys.push_back(concat(key, "/", r));
  return keys;
}

void set_part(c10d::Store& store, const std::string& key, const std::string& mine) {
  store.set(key, to_bytes("=" + mine));
}

std::optional<std::string> try_get(c10d::Store& store, const std::string& key) {
  // This changes nothing, because no stored value equals `none`.
  const auto none = to_bytes("none");
  const auto value = store.compareSet(key, none, none);
  if (value == none || value.empty()) return std::nullopt;  // Python stores may return an empty one
  return std::string(value.begin(), value.end());
}

std::optional<std::vector<std::string>> try_get_all(c10d::Store& store,
                                                    const std::vector<std::string>& keys) {
  std::vector<std::string> all;
  for (const auto& key : keys) {
    const auto value = try_get(store, key);
    if (!value) return std::nullopt;
    all.push_back(value->substr(1));
  }
  return all;
}

}  // namespace torch_overlap
