#include "torch_overlap/ops/tuning.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <sstream>
#include <unordered_map>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/overlap/channel.h"

namespace torch_overlap::ops {
namespace {

constexpr const char* kAgreedCache = "tuning cache";

struct Measured {
  std::mutex mutex;
  TuningEntries table;
  TuningEntries cache;
  std::atomic<uint64_t> version = 0;  // grows when one of them is replaced
};

Measured& measured() {
  static auto* const instance = new Measured;
  return *instance;
}

// What a tuning_key() is made of, but for what a communicator's problems have in common.
struct Asked {
  std::string op;
  int64_t m;
  int64_t n;
  int64_t k;
  at::ScalarType dtype;
  bool in_graph;
  bool operator==(const Asked&) const = default;
};

struct AskedHash {
  size_t operator()(const Asked& asked) const noexcept {
    return c10::get_hash(asked.op, asked.m, asked.n, asked.k, asked.dtype, asked.in_graph);
  }
};

// The cache of rank 0, for the members of a communicator; and what was asked before, which an eager
// call has no time to look up.
class AgreedCache final : public CommAttachment {
 public:
  explicit AgreedCache(TuningEntries entries) : entries_(std::move(entries)) {}
  const TuningEntries& entries() const { return entries_; }
  void drain(std::chrono::milliseconds) noexcept override {}

  template <typename Find>
  std::optional<Tuned> remember(Asked asked, const Find& find) {
    const uint64_t version = measured().version;
    {
      const std::lock_guard lock(mutex_);
      if (version_ != version) answers_.clear();
      version_ = version;
      if (const auto known = answers_.find(asked); known != answers_.end()) return known->second;
    }
    auto answer = find();
    const std::lock_guard lock(mutex_);
    constexpr size_t kMost = 4096;  // shapes without end are looked up again
    if (version_ == version && answers_.size() < kMost) answers_.emplace(std::move(asked), answer);
    return answer;
  }

 private:
  const TuningEntries entries_;
  std::mutex mutex_;
  uint64_t version_ = 0;
  std::unordered_map<Asked, std::optional<Tuned>, AskedHash> answers_;
};

std::string text_of(const TuningEntries& entries) {
  std::string text;
  for (const auto& [key, algorithm] : entries) text += concat(key, '\t', algorithm, '\n');
  return text;
}

TuningEntries entries_of(const std::string& text) {
  TuningEntries entries;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto tab = line.find('\t');
    if (tab != std::string::npos) entries.emplace(line.substr(0, tab), line.substr(tab + 1));
  }
  return entries;
}

bool may_be_measured(const OverlapProblem& problem, const TorchComm& comm) {
  return problem.m > 0 && comm.backend_name() != "fake";
}

std::shared_ptr<AgreedCache> agreed_cache(const TorchComm& comm) {
  return std::static_pointer_cast<AgreedCache>(comm.attachment(kAgreedCache));
}

int64_t half_octaves(int64_t size) {
  return std::lround(2 * std::log2(static_cast<double>(std::max<int64_t>(size, 1))));
}

std::optional<Tuned> find_in(const TuningEntries& entries, const std::string& key,
                             std::string_view source) {
  const auto found = entries.find(key);
  if (found == entries.end()) return std::nullopt;
  return Tuned{found->second, source};
}

std::optional<Tuned> look_up(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                             const AgreedCache* agreed, bool in_graph) {
  const auto device = comm->device();
  const auto key =
      tuning_key(problem.op, problem.m, problem.n, problem.k, problem.dtype, comm->size(),
                 overlap_device(problem.op, device.type()).name(device), in_graph);
  Measured& all = measured();
  const std::lock_guard lock(all.mutex);
  if (auto found = find_in(all.table, key, "table")) return found;
  return find_in(agreed != nullptr ? agreed->entries() : all.cache, key, "cache");
}

// `agreed`: null where the ranks have not met.
std::optional<Tuned> tuned(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                           const std::shared_ptr<AgreedCache>& agreed, bool in_graph) {
  if (!agreed) return look_up(problem, comm, nullptr, in_graph);
  return agreed->remember(
      {std::string(problem.op), problem.m, problem.n, problem.k, problem.dtype, in_graph},
      [&] { return look_up(problem, comm, agreed.get(), in_graph); });
}

}  // namespace

std::string tuning_key(std::string_view op, int64_t m, int64_t n, int64_t k, at::ScalarType dtype,
                       int group_size, std::string_view device, bool in_graph) {
  return concat(op, '|', half_octaves(m), '|', half_octaves(n), '|', half_octaves(k), '|',
                c10::toString(dtype), '|', group_size, '|', device, in_graph ? "|graph" : "|eager");
}

void set_tuning(TuningSource source, TuningEntries entries) {
  Measured& all = measured();
  const std::lock_guard lock(all.mutex);
  (source == TuningSource::table ? all.table : all.cache) = std::move(entries);
  ++all.version;
}

std::optional<Tuned> find_tuned(const OverlapProblem& problem,
                                const std::shared_ptr<TorchComm>& comm, bool in_graph) {
  if (!may_be_measured(problem, *comm)) return std::nullopt;
  auto agreed = agreed_cache(*comm);
  if (!agreed) {
    std::string mine;
    {
      Measured& all = measured();
      const std::lock_guard lock(all.mutex);
      mine = text_of(all.cache);
    }
    const auto texts = OverlapGroup::of(comm)->exchange(kAgreedCache, mine);
    agreed = std::make_shared<AgreedCache>(entries_of(texts.at(0)));
    comm->attach(kAgreedCache, agreed);
  }
  return tuned(problem, comm, agreed, in_graph);
}

std::optional<Tuned> look_for_tuned(const OverlapProblem& problem,
                                    const std::shared_ptr<TorchComm>& comm, bool in_graph) {
  if (!may_be_measured(problem, *comm)) return std::nullopt;
  return tuned(problem, comm, agreed_cache(*comm), in_graph);
}

}  // namespace torch_overlap::ops
