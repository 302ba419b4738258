#include "torch_overlap/comm/options.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <set>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/collectives/select.h"
#include "torch_overlap/comm/work.h"

namespace torch_overlap {
namespace {

// The plain key, and the one in upstream's first documentation.
constexpr const char* kPriorityHints[] = {"is_high_priority_stream",
                                          "torchcomm::ncclx::high_priority_stream"};

std::optional<bool> take_priority(Hints& hints) {
  std::optional<bool> value;
  for (const char* key : kPriorityHints) {
    if (auto found = hints.find(key); found != hints.end()) {
      value = parse_bool(found->second, key);
      hints.erase(found);
    }
  }
  return value;
}

constexpr const char* kMismatchHint = "check_mismatch";

std::optional<bool> take_mismatch(Hints& hints) {
  const auto found = hints.find(kMismatchHint);
  if (found == hints.end()) return std::nullopt;
  const bool value = parse_bool(found->second, concat("hint ", kMismatchHint));
  hints.erase(found);
  return value;
}

std::optional<CollectiveMode> take_custom_collectives(Hints& hints) {
  const auto found = hints.find(std::string(kCustomCollectivesHint));
  if (found == hints.end()) return std::nullopt;
  const CollectiveMode value =
      parse_collective_mode(found->second, concat("hint ", kCustomCollectivesHint));
  hints.erase(found);
  return value;
}

struct Warned {
  ForkSafeMutex mutex;
  std::set<std::string> hints;
};

// Warns of unknown hints that `where` received. No later receiver of the same `kind` is warned of
// them again.
void warn(const Hints& hints, std::string_view where, std::string_view kind,
          const std::vector<std::string_view>& known) {
  auto& warned = LeakySingleton<Warned>::get();
  std::vector<std::string> fresh;
  {
    const std::lock_guard lock(warned.mutex);
    for (const auto& [key, value] : hints) {
      if (warned.hints.insert(concat(kind, "/", key)).second) fresh.push_back(key);
    }
  }
  if (fresh.empty()) return;
  TORCH_WARN(where, ": unknown hints are ignored: ", list_string(fresh), "; known ones are ",
             list_string(known), ".");
}

}  // namespace

void warn_unknown_hints(const Hints& hints, std::string_view backend,
                        std::vector<std::string_view> known) {
  known.insert(known.end(), {kPriorityHints[0], kMismatchHint, kCustomCollectivesHint});
  warn(hints, backend, backend, known);
}

OpHints op_hints(std::string_view op, const Hints& hints) {
  OpHints out;
  if (hints.empty()) return out;
  Hints rest = hints;
  out.high_priority = take_priority(rest);
  out.custom_collectives = take_custom_collectives(rest);
  warn(rest, op, "operation", {kPriorityHints[0], kCustomCollectivesHint});
  return out;
}

void merge_hints(ResolvedOptions& options, const Hints& hints) {
  Hints rest = hints;
  options.is_high_priority_stream = take_priority(rest).value_or(options.is_high_priority_stream);
  options.check_mismatch = take_mismatch(rest).value_or(options.check_mismatch);
  options.custom_collectives = take_custom_collectives(rest).value_or(options.custom_collectives);
  for (const auto& [key, value] : rest) options.hints.insert_or_assign(key, value);
}

ResolvedOptions resolve_options(const CommOptions& options) {
  ResolvedOptions out;
  out.hints = options.hints;
  const auto hinted = take_priority(out.hints);
  const auto mismatch = take_mismatch(out.hints);
  out.check_mismatch = mismatch ? *mismatch : Env::check_mismatch();
  const auto hint = take_custom_collectives(out.hints);
  out.custom_collectives =
      hint ? *hint
           : parse_collective_mode(Env::custom_collectives(), "TORCH_OVERLAP_CUSTOM_COLLECTIVES");
  out.enable_reconfigure = options.enable_reconfigure.value_or(false);
  // A caller that reconfigures after a failure needs the process to survive it.
  const auto& aborts = options.abort_process_on_timeout_or_error;
  out.abort_process_on_timeout_or_error =
      aborts ? *aborts : !out.enable_reconfigure && Env::abort_on_error();
  out.timeout = std::min(options.timeout ? *options.timeout : Env::timeout(), kMaxTimeout);
  TORCH_OVERLAP_CHECK(out.timeout.count() > 0, kValue,
                      "new_comm: expected a timeout of at least 1 ms, got ", out.timeout.count(),
                      " ms");
  out.is_high_priority_stream = options.is_high_priority_stream.value_or(hinted.value_or(false));
  return out;
}

std::string_view to_string(WorkStatus status) {
  constexpr std::array<std::string_view, 5> kNames{"NOT_STARTED", "INPROGRESS", "COMPLETED",
                                                   "TIMEDOUT", "ERROR"};
  return kNames.at(static_cast<size_t>(status));
}

}  // namespace torch_overlap
