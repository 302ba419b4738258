#include "torch_overlap/ops/tuning.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <sstream>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/overlap/channel.h"

namespace torch_overlap::ops {
namespace {

constexpr const char* kAgreedCache = "tuning cache";

struct Measured {
  std::mutex mutex;
  TuningEntries table;
  TuningEntries cache;
};

Measured& measured() {
  static auto* const instance = new Measured;
  return *instance;
}

// The cache of rank 0, for the members of a communicator.
class AgreedCache final : public CommAttachment {
 public:
  explicit AgreedCache(TuningEntries entries) : entries_(std::move(entries)) {}
  const TuningEntries& entries() const { return entries_; }
  void drain(std::chrono::milliseconds) noexcept override {}

 private:
  const TuningEntries entries_;
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

// `agreed`: null where the ranks have not met.
std::optional<Tuned> tuned(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                           const std::shared_ptr<AgreedCache>& agreed, bool in_graph) {
  const auto device = comm->device();
  const auto key =
      tuning_key(problem.op, problem.m, problem.n, problem.k, problem.dtype, comm->size(),
                 overlap_device(problem.op, device.type()).name(device), in_graph);
  Measured& all = measured();
  const std::lock_guard lock(all.mutex);
  if (auto found = find_in(all.table, key, "table")) return found;
  return find_in(agreed ? agreed->entries() : all.cache, key, "cache");
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
