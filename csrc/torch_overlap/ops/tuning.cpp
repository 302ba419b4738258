#include "torch_overlap/ops/tuning.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <sstream>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/overlap/channel.h"

namespace torch_overlap::ops {
namespace {

constexpr const char* kAgreed = "tuning cache";

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

// What rank 0 has, for all members of a communicator: its cache, and the name of its device, under
// which all look up what was measured.
class Agreed final : public CommAttachment {
 public:
  explicit Agreed(const std::string& text)
      : device(text.substr(0, text.find('\n'))), cache(entries_of(text)) {}
  void drain(std::chrono::milliseconds) noexcept override {}

  const std::string device;
  const TuningEntries cache;
};

bool may_be_measured(const OverlapProblem& problem, const TorchComm& comm) {
  return problem.m > 0 && comm.backend_name() != "fake";
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

std::string device_name(const OverlapProblem& problem, const TorchComm& comm) {
  return overlap_device(problem.op, comm.device().type()).name(comm.device());
}

// `agreed`: null where the ranks have not met.
std::optional<Tuned> look_up(const OverlapProblem& problem, const TorchComm& comm,
                             const Agreed* agreed, bool in_graph) {
  const auto key =
      tuning_key(problem.op, problem.m, problem.n, problem.k, problem.dtype, comm.size(),
                 agreed != nullptr ? agreed->device : device_name(problem, comm), in_graph);
  Measured& all = measured();
  const std::lock_guard lock(all.mutex);
  if (auto found = find_in(all.table, key, "table")) return found;
  return find_in(agreed != nullptr ? agreed->cache : all.cache, key, "cache");
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

uint64_t tuning_version() { return measured().version; }

std::optional<Tuned> find_tuned(const OverlapProblem& problem,
                                const std::shared_ptr<TorchComm>& comm, bool in_graph) {
  if (!may_be_measured(problem, *comm)) return std::nullopt;
  auto agreed = std::static_pointer_cast<Agreed>(comm->attachment(kAgreed));
  if (!agreed) {
    auto mine = concat(device_name(problem, *comm), '\n');
    {
      Measured& all = measured();
      const std::lock_guard lock(all.mutex);
      mine += text_of(all.cache);
    }
    agreed = std::make_shared<Agreed>(OverlapGroup::of(comm)->exchange(kAgreed, mine).at(0));
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

}  // namespace torch_overlap::ops
