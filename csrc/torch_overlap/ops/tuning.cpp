#include "torch_overlap/ops/tuning.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "torch_overlap/base/process.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/overlap/channel.h"

namespace torch_overlap::ops {
namespace {

constexpr const char* kSharedTuning = "tuning cache";

// Maximum distance between a problem and a measurement: half powers of two, summed over m, n and k.
constexpr int64_t kMaxDistance = 4;

// m, n and k in half powers of two.
using Sizes = std::array<int64_t, 3>;

Sizes sizes_of(int64_t m, int64_t n, int64_t k) {
  const auto half_octaves = [](int64_t size) -> int64_t {
    return std::lround(2 * std::log2(static_cast<double>(std::max<int64_t>(size, 1))));
  };
  return {half_octaves(m), half_octaves(n), half_octaves(k)};
}

int64_t size_of(int64_t half_octaves) {
  return std::llround(std::exp2(static_cast<double>(half_octaves) / 2));
}

int64_t distance(const Sizes& a, const Sizes& b) {
  int64_t sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::abs(a.at(i) - b.at(i));
  return sum;
}

// Returns the part of a key that must be equal.
std::string kind_of(std::string_view op, at::ScalarType dtype, int group_size,
                    std::string_view device, bool in_graph) {
  return concat(op, '|', c10::toString(dtype), '|', group_size, '|', device,
                in_graph ? "|graph" : "|eager");
}

std::string format_key(const Sizes& sizes, std::string_view kind) {
  return concat(sizes[0], '|', sizes[1], '|', sizes[2], '|', kind);
}

// Entries, searched by nearest size.
class Index {
 public:
  struct Found {
    const std::string* algorithm;
    int64_t distance;
    Sizes sizes;
  };

  Index() = default;
  explicit Index(const TuningEntries& entries) {
    for (const auto& [key, algorithm] : entries) {
      std::istringstream text(key);
      Sizes sizes{};
      for (int64_t& size : sizes) (text >> size).ignore();
      std::string kind;
      std::getline(text, kind);
      by_kind_[kind].insert_or_assign(sizes, algorithm);
    }
  }

  // Among equally near entries, returns the last by m, then n, then k.
  std::optional<Found> nearest(const Sizes& sizes, const std::string& kind) const {
    const auto same = by_kind_.find(kind);
    if (same == by_kind_.end()) return std::nullopt;
    std::optional<Found> best;
    for (const auto& [measured, algorithm] : same->second) {
      const int64_t found_distance = distance(measured, sizes);
      if (found_distance <= (best ? best->distance : kMaxDistance))
        best = Found{&algorithm, found_distance, measured};
    }
    return best;
  }

  std::string text() const {
    std::string text;
    for (const auto& [kind, by_sizes] : by_kind_) {
      for (const auto& [sizes, algorithm] : by_sizes) {
        text += concat(format_key(sizes, kind), '\t', algorithm, '\n');
      }
    }
    return text;
  }

 private:
  std::map<std::string, std::map<Sizes, std::string>> by_kind_;
};

struct TuningTables {
  ForkSafeMutex mutex;
  Index table;
  Index cache;
  std::atomic<uint64_t> version = 0;  // incremented when an entry set is replaced
};

TuningTables& measured() { return LeakySingleton<TuningTables>::get(); }

TuningEntries entries_of(const std::string& text) {
  TuningEntries entries;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto tab = line.find('\t');
    if (tab != std::string::npos) entries.emplace(line.substr(0, tab), line.substr(tab + 1));
  }
  return entries;
}

// Values that all members of a communicator share: the cache of rank 0, the name of its device,
// under which all of them look up measurements, and the number of SMs of each member.
class SharedTuning final : public CommAttachment {
 public:
  // Serializes a rank's number of SMs, device and cache.
  static std::string serialize_rank(int sms, std::string_view device, std::string_view cache) {
    return concat(sms, '\n', device, '\n', cache);
  }
  explicit SharedTuning(const std::vector<std::string>& ranks) {
    std::istringstream first(ranks.at(0));
    std::string line;
    std::getline(first, line);
    std::getline(first, device);
    cache = Index(entries_of(std::string(std::istreambuf_iterator<char>(first), {})));
    min_sms = std::stoi(line);
    for (const std::string& rank : ranks) min_sms = std::min(min_sms, std::stoi(rank));
  }
  void drain(std::chrono::milliseconds) noexcept override {}

  std::string device;
  Index cache;
  int min_sms = 0;
};

bool can_have_tuning(const OverlapProblem& problem, const TorchComm& comm) {
  return problem.global_shape && problem.global_shape->m > 0 && comm.backend_name() != "fake";
}

std::string device_name(const OverlapProblem& problem, const TorchComm& comm) {
  return overlap_device(problem.op, comm.device().type()).name(comm.device());
}

int sm_count(const OverlapProblem& problem, const TorchComm& comm) {
  return overlap_device(problem.op, comm.device().type()).sm_count(comm.device());
}

// `shared`: null if the ranks have not exchanged their caches. Among equally near entries the
// table's is returned.
std::optional<TunedAlgorithm> find_nearest_tuned(const OverlapProblem& problem,
                                                 const TorchComm& comm, const SharedTuning* shared,
                                                 bool in_graph) {
  const auto& [m, n, k] = problem.global_shape.value();
  const Sizes sizes = sizes_of(m, n, k);
  const auto op = problem.measured_as.empty() ? problem.op : problem.measured_as;
  const auto kind =
      kind_of(op, problem.dtype, comm.size(),
              shared != nullptr ? shared->device : device_name(problem, comm), in_graph);
  TuningTables& all = measured();
  const std::lock_guard lock(all.mutex);
  const auto table = all.table.nearest(sizes, kind);
  const auto cache = (shared != nullptr ? shared->cache : all.cache).nearest(sizes, kind);
  const bool use_cache = cache && (!table || cache->distance < table->distance);
  const auto& found = use_cache ? cache : table;
  if (!found) return std::nullopt;
  return TunedAlgorithm{.algorithm = *found->algorithm,
                        .source = use_cache ? "cache" : "table",
                        .is_other_size = found->distance > 0,
                        .m = size_of(found->sizes[0]),
                        .n = size_of(found->sizes[1]),
                        .k = size_of(found->sizes[2])};
}

}  // namespace

std::string tuning_key(std::string_view op, int64_t m, int64_t n, int64_t k, at::ScalarType dtype,
                       int group_size, std::string_view device, bool in_graph) {
  return format_key(sizes_of(m, n, k), kind_of(op, dtype, group_size, device, in_graph));
}

void set_tuning(TuningSource source, const TuningEntries& entries) {
  Index index(entries);
  TuningTables& all = measured();
  const std::lock_guard lock(all.mutex);
  (source == TuningSource::table ? all.table : all.cache) = std::move(index);
  ++all.version;
}

uint64_t tuning_version() { return measured().version; }

void share_tuning(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm) {
  if (!can_have_tuning(problem, *comm) || comm->attachment(kSharedTuning)) return;
  std::string cache;
  {
    TuningTables& all = measured();
    const std::lock_guard lock(all.mutex);
    cache = all.cache.text();
  }
  const auto mine =
      SharedTuning::serialize_rank(sm_count(problem, *comm), device_name(problem, *comm), cache);
  comm->attach(kSharedTuning, std::make_shared<SharedTuning>(OverlapGroup::of(comm)->exchange(
                                  problem.op, kSharedTuning, mine)));
}

std::optional<TunedAlgorithm> find_tuned(const OverlapProblem& problem,
                                         const std::shared_ptr<TorchComm>& comm, bool in_graph) {
  if (!can_have_tuning(problem, *comm)) return std::nullopt;
  const auto shared = std::static_pointer_cast<SharedTuning>(comm->attachment(kSharedTuning));
  return find_nearest_tuned(problem, *comm, shared.get(), in_graph);
}

int min_sm_count(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm) {
  const auto shared = std::static_pointer_cast<SharedTuning>(comm->attachment(kSharedTuning));
  return shared ? shared->min_sms : sm_count(problem, *comm);
}

}  // namespace torch_overlap::ops
