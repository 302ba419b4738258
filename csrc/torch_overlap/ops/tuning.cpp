#include "torch_overlap/ops/tuning.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <iterator>
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

constexpr const char* kAgreed = "tuning cache";

// How far apart a problem and what was measured may be: half powers of two over m, n and k
// together.
constexpr int64_t kFarthest = 4;

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

// What has to be equal.
std::string kind_of(std::string_view op, at::ScalarType dtype, int group_size,
                    std::string_view device, bool in_graph) {
  return concat(op, '|', c10::toString(dtype), '|', group_size, '|', device,
                in_graph ? "|graph" : "|eager");
}

std::string text_of(const Sizes& sizes, std::string_view kind) {
  return concat(sizes[0], '|', sizes[1], '|', sizes[2], '|', kind);
}

// Entries, to be found by what is like them.
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

  // Of equally near ones the last by m, then n, then k.
  std::optional<Found> nearest(const Sizes& sizes, const std::string& kind) const {
    const auto same = by_kind_.find(kind);
    if (same == by_kind_.end()) return std::nullopt;
    std::optional<Found> best;
    for (const auto& [measured, algorithm] : same->second) {
      const int64_t apart = distance(measured, sizes);
      if (apart <= (best ? best->distance : kFarthest)) best = Found{&algorithm, apart, measured};
    }
    return best;
  }

  std::string text() const {
    std::string text;
    for (const auto& [kind, by_sizes] : by_kind_) {
      for (const auto& [sizes, algorithm] : by_sizes) {
        text += concat(text_of(sizes, kind), '\t', algorithm, '\n');
      }
    }
    return text;
  }

 private:
  std::map<std::string, std::map<Sizes, std::string>> by_kind_;
};

struct Measured {
  ForkSafeMutex mutex;
  Index table;
  Index cache;
  std::atomic<uint64_t> version = 0;  // grows when one of them is replaced
};

Measured& measured() { return ProcessWide<Measured>::get(); }

TuningEntries entries_of(const std::string& text) {
  TuningEntries entries;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto tab = line.find('\t');
    if (tab != std::string::npos) entries.emplace(line.substr(0, tab), line.substr(tab + 1));
  }
  return entries;
}

// What all members of a communicator know alike: the cache of rank 0, and the name of its device,
// under which all look up what was measured; and the SMs that each of them has.
class Agreed final : public CommAttachment {
 public:
  // Of a rank: its SMs, its device, its cache.
  static std::string text_of_rank(int sms, std::string_view device, std::string_view cache) {
    return concat(sms, '\n', device, '\n', cache);
  }
  explicit Agreed(const std::vector<std::string>& ranks) {
    std::istringstream first(ranks.at(0));
    std::string line;
    std::getline(first, line);
    std::getline(first, device);
    cache = Index(entries_of(std::string(std::istreambuf_iterator<char>(first), {})));
    least_sms = std::stoi(line);
    for (const std::string& rank : ranks) least_sms = std::min(least_sms, std::stoi(rank));
  }
  void drain(std::chrono::milliseconds) noexcept override {}

  std::string device;
  Index cache;
  int least_sms = 0;
};

bool may_be_measured(const OverlapProblem& problem, const TorchComm& comm) {
  return problem.m > 0 && comm.backend_name() != "fake";
}

std::string device_name(const OverlapProblem& problem, const TorchComm& comm) {
  return overlap_device(problem.op, comm.device().type()).name(comm.device());
}

int sm_count(const OverlapProblem& problem, const TorchComm& comm) {
  return overlap_device(problem.op, comm.device().type()).sm_count(comm.device());
}

// `agreed`: null where the ranks have not met. Of equally near entries that of the table.
std::optional<Tuned> look_up(const OverlapProblem& problem, const TorchComm& comm,
                             const Agreed* agreed, bool in_graph) {
  const Sizes sizes = sizes_of(problem.m, problem.n, problem.k);
  const auto kind =
      kind_of(problem.op, problem.dtype, comm.size(),
              agreed != nullptr ? agreed->device : device_name(problem, comm), in_graph);
  Measured& all = measured();
  const std::lock_guard lock(all.mutex);
  const auto table = all.table.nearest(sizes, kind);
  const auto cache = (agreed != nullptr ? agreed->cache : all.cache).nearest(sizes, kind);
  const bool takes_cache = cache && (!table || cache->distance < table->distance);
  const auto& found = takes_cache ? cache : table;
  if (!found) return std::nullopt;
  return Tuned{.algorithm = *found->algorithm,
               .source = takes_cache ? "cache" : "table",
               .is_like = found->distance > 0,
               .m = size_of(found->sizes[0]),
               .n = size_of(found->sizes[1]),
               .k = size_of(found->sizes[2])};
}

}  // namespace

std::string tuning_key(std::string_view op, int64_t m, int64_t n, int64_t k, at::ScalarType dtype,
                       int group_size, std::string_view device, bool in_graph) {
  return text_of(sizes_of(m, n, k), kind_of(op, dtype, group_size, device, in_graph));
}

void set_tuning(TuningSource source, const TuningEntries& entries) {
  Index index(entries);
  Measured& all = measured();
  const std::lock_guard lock(all.mutex);
  (source == TuningSource::table ? all.table : all.cache) = std::move(index);
  ++all.version;
}

uint64_t tuning_version() { return measured().version; }

std::optional<Tuned> find_tuned(const OverlapProblem& problem,
                                const std::shared_ptr<TorchComm>& comm, bool in_graph) {
  if (!may_be_measured(problem, *comm)) return std::nullopt;
  auto agreed = std::static_pointer_cast<Agreed>(comm->attachment(kAgreed));
  if (!agreed) {
    std::string cache;
    {
      Measured& all = measured();
      const std::lock_guard lock(all.mutex);
      cache = all.cache.text();
    }
    const auto mine =
        Agreed::text_of_rank(sm_count(problem, *comm), device_name(problem, *comm), cache);
    agreed = std::make_shared<Agreed>(OverlapGroup::of(comm)->exchange(kAgreed, mine));
    comm->attach(kAgreed, agreed);
  }
  return look_up(problem, *comm, agreed.get(), in_graph);
}

std::optional<Tuned> look_for_tuned(const OverlapProblem& problem,
                                    const std::shared_ptr<TorchComm>& comm, bool in_graph) {
  if (!may_be_measured(problem, *comm)) return std::nullopt;
  const auto agreed = std::static_pointer_cast<Agreed>(comm->attachment(kAgreed));
  return look_up(problem, *comm, agreed.get(), in_graph);
}

int least_sm_count(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm) {
  const auto agreed = std::static_pointer_cast<Agreed>(comm->attachment(kAgreed));
  return agreed ? agreed->least_sms : sm_count(problem, *comm);
}

}  // namespace torch_overlap::ops
