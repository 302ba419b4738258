#include "torch_overlap/ops/choose.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/rounding.h"
#include "torch_overlap/ops/tuning.h"
#include "torch_overlap/overlap/op_channels.h"

namespace torch_overlap::ops {
namespace {

// A chunk with fewer rows takes less time to multiply than the launch of its transfer.
constexpr int64_t kMinChunkRows = 256;

constexpr std::string_view kCaller = "caller";
constexpr std::string_view kRule = "rule";
constexpr const char* kUnsupportedInCapture =
    "no memory can be shared during a capture; call the operator once before it";
constexpr const char* kSharedGpuCopiesNeedSms =
    "ranks share a GPU, where copies need SMs, and a kernel that waits for them has all of these";

struct ChannelRequirement {
  OperatorChannel which;
  int64_t bytes;
};
using ChannelRequirements = std::vector<ChannelRequirement>;

// Returns why the problem cannot use channels at all; empty if it can.
std::string no_channels_reason(const OverlapProblem& problem, const TorchComm& comm) {
  if (!is_channel_dtype(problem.dtype)) {
    return concat("products of ", problem.dtype, " are torch's");
  }
  return comm.backend_name() == "fake" ? "the communicator has no peers" : "";
}

// Returns why this channel of a communicator cannot be used; empty if it can. A channel that does
// not exist is assumed to be usable, unless a capture keeps it from being created.
std::string channel_unsupported_reason(const ChannelRequirement& required, const TorchComm& comm) {
  const auto channel = existing_operator_channel(comm, required.which);
  const bool is_missing = !channel || channel->bytes() < required.bytes;
  if (is_missing && comm.is_capturing()) return kUnsupportedInCapture;
  if (!channel) return {};
  if (!channel->transport().is_peer_mapped()) return channel->unsupported_reason();
  if (channel->is_broken()) {
    return "an earlier operation ended half way; reconfigure() the communicator, or make a new one";
  }
  return {};
}

ChannelRequirements channels_of(const OverlapProblem& problem, const TorchComm&) {
  ChannelRequirements channels;
  if (problem.gather_bytes > 0) channels.push_back({OperatorChannel::gather, problem.gather_bytes});
  if (problem.scatter_bytes > 0) {
    channels.push_back({OperatorChannel::scatter, problem.scatter_bytes});
  }
  return channels;
}

// True if ranks share a GPU, as far as existing channels know.
bool shares_devices(const OverlapProblem& problem, const TorchComm& comm) {
  for (const auto& required : channels_of(problem, comm)) {
    const auto channel = existing_operator_channel(comm, required.which);
    if (channel && channel->shares_devices()) return true;
  }
  return false;
}

std::string low_latency_unsupported_reason(const OverlapProblem& problem, const TorchComm&) {
  if (problem.low_latency_bytes) return {};
  return concat("nothing of this part of ", problem.op, " lies in memory that ranks share");
}

ChannelRequirements low_latency_channels(const OverlapProblem& problem, const TorchComm& comm) {
  const int64_t sum_bytes = problem.low_latency_bytes.value_or(0);
  if (sum_bytes > 0) return {{OperatorChannel::sum, sum_bytes}};
  ChannelRequirements channels = channels_of(problem, comm);
  std::erase_if(channels, [](const auto& one) { return one.which != OperatorChannel::gather; });
  return channels;
}

// The shape of the fused kernel of a product with `columns`.
FusedShape fused_shape(const OverlapProblem& problem, const TorchComm& comm, int64_t columns) {
  const int64_t rows = problem.local_m > 0 ? problem.local_m : problem.chunk_rows * comm.size();
  return {.device = comm.device(),
          .types = problem.types.value_or(FusedTypes::all(problem.dtype)),
          .rows = {rows, comm.size()},
          .n = columns,
          .k = problem.local_k};
}

// The shape of the kernel that multiplies and sums.
FusedShape fused_allreduce_shape(const OverlapProblem& problem, const TorchComm& comm) {
  FusedShape shape = fused_shape(problem, comm, problem.local_n.at(0));
  shape.rows.rows = problem.m;
  return shape;
}

int64_t fused_allreduce_bytes(const OverlapProblem& problem, const TorchComm& comm,
                              const FusedShape& shape) {
  return overlap_device(problem.op, comm.device().type()).required_fused_allreduce_bytes(shape);
}

// True if that kernel is the default when nothing was measured.
bool should_fuse_allreduce(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm) {
  return problem.is_all_reduce && problem.local_k > 0 &&
         overlap_device(problem.op, comm->device().type())
             .should_fuse_allreduce(fused_allreduce_shape(problem, *comm),
                                    min_sm_count(problem, comm));
}

// Returns why the device has no fused kernel for the problem; empty if it has one.
std::string fused_unsupported_reason(const OverlapProblem& problem, const TorchComm& comm) {
  if (problem.local_k == 0) return concat("there is no fused kernel for this part of ", problem.op);
  OverlapDevice& device = overlap_device(problem.op, comm.device().type());
  for (const int64_t columns : problem.local_n) {
    auto why = device.fused_unsupported_reason(fused_shape(problem, comm, columns));
    if (!why.empty()) return why;
  }
  return {};
}

ChannelRequirements fused_channels(const OverlapProblem& problem, const TorchComm& comm) {
  const int64_t reduce_bytes = ops::fused_allreduce_bytes(problem, comm);
  if (reduce_bytes > 0) return {{OperatorChannel::reduce, reduce_bytes}};
  return channels_of(problem, comm);
}

std::string pipelined_unsupported_reason(const OverlapProblem& problem, const TorchComm&) {
  if (problem.can_pipeline) return {};
  return concat("products of ", problem.dtype, " are torch's");
}

struct AlgorithmInfo {
  std::string_view name;
  // Returns why the operator or the device does not have it; null: they always do.
  std::string (*unsupported_reason)(const OverlapProblem&, const TorchComm&);
  // Returns the channels that it uses; null: it uses none.
  ChannelRequirements (*channels)(const OverlapProblem&, const TorchComm&);
};

// Indexed by Algorithm.
constexpr std::array<AlgorithmInfo, 6> kAlgorithms{
    {{"sequential", nullptr, nullptr},
     {"pipelined", pipelined_unsupported_reason, nullptr},
     {"p2p", nullptr, channels_of},
     {"bulk", nullptr, channels_of},
     {"fused", fused_unsupported_reason, fused_channels},
     {"low_latency", low_latency_unsupported_reason, low_latency_channels}}};

const AlgorithmInfo& info_of(Algorithm algorithm) {
  return kAlgorithms.at(static_cast<size_t>(algorithm));
}

std::optional<Algorithm> algorithm_of(std::string_view name) {
  const auto* const found =
      std::find_if(kAlgorithms.begin(), kAlgorithms.end(),
                   [name](const AlgorithmInfo& info) { return info.name == name; });
  if (found == kAlgorithms.end()) return std::nullopt;
  return static_cast<Algorithm>(found - kAlgorithms.begin());
}

bool can_be_unsupported(Algorithm algorithm) {
  const AlgorithmInfo& info = info_of(algorithm);
  return info.unsupported_reason != nullptr || info.channels != nullptr;
}

// Returns why the algorithm cannot run, apart from the state of its channels; empty if it can.
std::string static_unsupported_reason(Algorithm algorithm, const OverlapProblem& problem,
                                      const TorchComm& comm) {
  const AlgorithmInfo& info = info_of(algorithm);
  if (info.unsupported_reason != nullptr) {
    auto why = info.unsupported_reason(problem, comm);
    if (!why.empty()) return why;
  }
  return info.channels == nullptr ? "" : no_channels_reason(problem, comm);
}

// Returns why the algorithm cannot run; empty if it can.
std::string unsupported_reason(Algorithm algorithm, const OverlapProblem& problem,
                               const TorchComm& comm) {
  auto why = static_unsupported_reason(algorithm, problem, comm);
  const AlgorithmInfo& info = info_of(algorithm);
  if (!why.empty() || info.channels == nullptr) return why;
  for (const auto& required : info.channels(problem, comm)) {
    why = channel_unsupported_reason(required, comm);
    if (!why.empty()) return why;
  }
  const bool waits_for_copies = algorithm == Algorithm::fused &&
                                problem.fused_kernel_waits_for_copies() &&
                                ops::fused_allreduce_bytes(problem, comm) == 0;
  return waits_for_copies && shares_devices(problem, comm) ? kSharedGpuCopiesNeedSms : "";
}

// Creates the channels that the algorithm uses and that do not exist, up to the first one that
// cannot be used. Collective. Creates none if the algorithm cannot run anyway, or in a capture.
void ensure_channels(Algorithm algorithm, const OverlapProblem& problem,
                     const std::shared_ptr<TorchComm>& comm) {
  const AlgorithmInfo& info = info_of(algorithm);
  if (info.channels == nullptr) return;
  if (!static_unsupported_reason(algorithm, problem, *comm).empty()) return;
  for (const auto& required : info.channels(problem, *comm)) {
    operator_channel(problem.op, comm, required.which, required.bytes);
    if (!channel_unsupported_reason(required, *comm).empty()) return;
  }
}

// An algorithm that "auto" takes if it can run. The last candidate can always run.
struct Candidate {
  Choice choice;  // empty `why`: the reason why the previous candidate cannot run
  bool is_measured = false;
  bool needs_gpu_per_rank = false;
};

// Returns the candidates when nothing was measured. "fused" is the default for enough rows: it
// costs the host the least and is the fastest measured algorithm or, for gathers, close to it. If
// ranks share a GPU, their kernels would wait for each other's SMs.
std::vector<Candidate> candidates_by_rule(const OverlapProblem& problem,
                                          const std::shared_ptr<TorchComm>& comm) {
  std::vector<Candidate> found;
  const auto add = [&](Algorithm algorithm, std::string why, bool needs_gpu_per_rank = false) {
    found.push_back(
        {.choice = {algorithm, std::move(why), kRule}, .needs_gpu_per_rank = needs_gpu_per_rank});
  };
  if (should_fuse_allreduce(problem, comm)) {
    add(Algorithm::fused,
        concat("one kernel multiplies and sums products of ", problem.m, " rows"));
  }
  if (!is_worth_chunks(problem.chunk_rows)) {
    add(Algorithm::sequential,
        concat("chunks of ", problem.chunk_rows, " rows are quicker computed than sent; ",
               kMinChunkRows, " are worth it"));
    return found;
  }
  if (!problem.can_pipeline) {
    add(Algorithm::sequential, pipelined_unsupported_reason(problem, *comm));
    return found;
  }
  if (problem.local_k > 0 && ops::fused_allreduce_bytes(problem, *comm) == 0) {
    add(Algorithm::fused, "a kernel waits for the other ranks by itself",
        /*needs_gpu_per_rank=*/true);
  }
  // On a CPU only the communicator's threads run concurrently with a product.
  if (comm->device().is_cpu()) {
    add(Algorithm::pipelined, "a CPU");
  } else if (!problem.prefers_channels) {
    add(Algorithm::pipelined, concat("pieces of ", problem.chunk_rows, " rows"));
  } else {
    add(Algorithm::p2p, "ranks reach each other's memory");
    add(Algorithm::pipelined, "");
  }
  return found;
}

// False if the measurement ran another kernel: for few rows "fused" is a different one, and a
// measurement of one does not apply to the other. Sizes known to half a power of two are rounded to
// multiples that any kernel supports.
bool is_same_fused_kernel(const TunedAlgorithm& tuned, const OverlapProblem& problem,
                          const TorchComm& comm) {
  constexpr int64_t kUnit = 64;
  if (!problem.is_all_reduce || problem.local_k == 0) return true;
  FusedShape measured = fused_allreduce_shape(problem, comm);
  measured.rows.rows = tuned.m;
  measured.n = round_up(tuned.n, kUnit);
  measured.k = round_up(tuned.k / comm.size(), kUnit);
  return (fused_allreduce_bytes(problem, comm, measured) > 0) ==
         (ops::fused_allreduce_bytes(problem, comm) > 0);
}

// True if the kernel that multiplies and sums is for graphs only: while it waits for ranks it may
// leave no SM to other streams, and in eager mode nothing orders it before kernels there that wait,
// too.
bool is_graph_only(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm) {
  return ops::fused_allreduce_bytes(problem, *comm) > 0 && !should_fuse_allreduce(problem, comm);
}

// Returns the candidates of a mode (captured or eager): the measured algorithm of this mode, that
// of the other mode, which is better than a rule, and those of the rule.
std::vector<Candidate> candidates_of(const OverlapProblem& problem,
                                     const std::shared_ptr<TorchComm>& comm, bool in_graph) {
  std::vector<Candidate> found;
  for (const bool mode : {in_graph, !in_graph}) {
    const auto tuned = find_tuned(problem, comm, mode);
    const auto known = tuned ? algorithm_of(tuned->algorithm) : std::nullopt;
    if (!known) continue;
    if (*known == Algorithm::fused && (!is_same_fused_kernel(*tuned, problem, *comm) ||
                                       (!in_graph && is_graph_only(problem, comm)))) {
      continue;
    }
    const auto* const for_what = tuned->is_other_size ? " for a like size, " : ", ";
    found.push_back({.choice = {*known, concat("measured as the quickest", for_what, tuned->source),
                                tuned->source},
                     .is_measured = true});
  }
  auto by_rule = candidates_by_rule(problem, comm);
  std::move(by_rule.begin(), by_rule.end(), std::back_inserter(found));
  return found;
}

// Returns why "auto" does not take the candidate; empty if it does.
std::string unsupported_reason(const Candidate& candidate, const OverlapProblem& problem,
                               const TorchComm& comm) {
  auto why = unsupported_reason(candidate.choice.algorithm, problem, comm);
  if (!why.empty() || !candidate.needs_gpu_per_rank) return why;
  return shares_devices(problem, comm) ? "ranks share a GPU" : "";
}

// Creates the channels of the candidates of a mode, up to the first one that can run. Collective.
void ensure_channels(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                     bool in_graph) {
  for (const Candidate& candidate : candidates_of(problem, comm, in_graph)) {
    ensure_channels(candidate.choice.algorithm, problem, comm);
    if (unsupported_reason(candidate, problem, *comm).empty()) return;
  }
}

// Chooses for a mode.
Choice choose_for_mode(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                       bool in_graph) {
  std::string previous;                  // why the previous candidate cannot run
  std::string tuned_unsupported_reason;  // why the measured one cannot run
  std::string tuned_note;
  for (Candidate& candidate : candidates_of(problem, comm, in_graph)) {
    Choice& choice = candidate.choice;
    const auto why = unsupported_reason(candidate, problem, *comm);
    if (why.empty()) {
      if (choice.why.empty()) choice.why = previous;
      if (!candidate.is_measured && choice.why != tuned_unsupported_reason) {
        choice.why += tuned_note;
      }
      return choice;
    }
    previous = why;
    if (!candidate.is_measured || !tuned_unsupported_reason.empty()) continue;
    tuned_unsupported_reason = why;
    tuned_note = concat("; '", to_string(choice.algorithm), "' of the ", choice.decided_by,
                        " cannot be: ", why);
  }
  fail(ErrorKind::kRuntime, problem.op, ": expected an algorithm that can run, got none");
}

// Creates and exchanges what choose() asks for. Collective.
void prepare(const OverlapProblem& problem, std::optional<Algorithm> asked,
             const std::shared_ptr<TorchComm>& comm) {
  if (asked) return ensure_channels(*asked, problem, comm);
  if (comm->size() == 1) return;
  share_tuning(problem, comm);
  const bool in_graph = comm->is_capturing();
  // No memory can be shared during a capture. The eager call before a capture therefore creates the
  // channels that the captured call needs, even if it uses another algorithm itself.
  if (!in_graph) ensure_channels(problem, comm, /*in_graph=*/true);
  ensure_channels(problem, comm, in_graph);
}

Choice choose(const OverlapProblem& problem, std::optional<Algorithm> asked,
              const std::shared_ptr<TorchComm>& comm) {
  if (asked) {
    const auto why = unsupported_reason(*asked, problem, *comm);
    TORCH_OVERLAP_CHECK(why.empty(), kUnsupported, problem.op, ": expected what algorithm '",
                        to_string(*asked), "' needs, got: ", why, ". Use 'auto' or 'sequential'.");
    return {*asked, "asked for", kCaller};
  }
  if (comm->size() == 1) return {Algorithm::sequential, "one rank", kRule};
  return choose_for_mode(problem, comm, comm->is_capturing());
}

// The state that a cached choice depends on, apart from its key.
struct CacheVersion {
  uint64_t tuning;
  uint64_t channels;
  bool operator==(const CacheVersion&) const = default;
  static CacheVersion now() { return {tuning_version(), OverlapChannel::changes()}; }
};

struct ChoiceKey {
  OverlapProblem problem;
  std::optional<Algorithm> asked;  // empty: "auto"
  bool in_graph;
  bool operator==(const ChoiceKey&) const = default;
};

struct ChoiceKeyHash {
  size_t operator()(const ChoiceKey& key) const noexcept {
    const OverlapProblem& problem = key.problem;
    return c10::get_hash(problem.op, problem.dtype, problem.m, problem.n, problem.k,
                         problem.chunk_rows, problem.local_k, key.asked.has_value(), key.in_graph);
  }
};

// Caches the choices of a communicator, so that eager calls do not repeat them.
class ChoiceCache final : public CommAttachment {
 public:
  static std::shared_ptr<ChoiceCache> of(TorchComm& comm) {
    constexpr std::string_view kName = "choices";
    auto kept = std::static_pointer_cast<ChoiceCache>(comm.attachment(kName));
    if (!kept) {
      kept = std::make_shared<ChoiceCache>();
      comm.attach(kName, kept);
    }
    return kept;
  }
  void drain(std::chrono::milliseconds) noexcept override {}

  template <typename Choose>
  Algorithm keep(const ChoiceKey& key, const Choose& choose) {
    const CacheVersion version = CacheVersion::now();
    {
      const std::lock_guard lock(mutex_);
      if (version_ != version) choices_.clear();
      version_ = version;
      if (const auto known = choices_.find(key); known != choices_.end()) return known->second;
    }
    const Algorithm answer = choose();
    const std::lock_guard lock(mutex_);
    constexpr size_t kMaxChoices = 4096;  // beyond this, new shapes are not cached
    if (version_ == version && choices_.size() < kMaxChoices) choices_.emplace(key, answer);
    return answer;
  }

 private:
  std::mutex mutex_;
  CacheVersion version_{};
  std::unordered_map<ChoiceKey, Algorithm, ChoiceKeyHash> choices_;
};

}  // namespace

std::string_view to_string(Algorithm algorithm) {
  return kAlgorithms.at(static_cast<size_t>(algorithm)).name;
}

std::vector<std::string> algorithm_names() {
  std::vector<std::string> names;
  for (const AlgorithmInfo& info : kAlgorithms) names.emplace_back(info.name);
  return names;
}

void check_algorithm(std::string_view op, std::string_view algorithm) {
  if (algorithm == "auto" || algorithm_of(algorithm)) return;
  std::string known = "auto";
  for (const AlgorithmInfo& info : kAlgorithms) known += concat(", ", info.name);
  fail(ErrorKind::kValue, op, ": expected algorithm to be one of ", known, ", got '", algorithm,
       "'. Use one of them.");
}

thread_local ExplainScope* explain_scope = nullptr;

ExplainScope::ExplainScope() : outer_(std::exchange(explain_scope, this)) {}
ExplainScope::~ExplainScope() { explain_scope = outer_; }
ExplainScope* ExplainScope::current() { return explain_scope; }

bool is_shape_only(const at::Tensor& x) { return x.is_meta() && explain_scope == nullptr; }

int64_t fused_allreduce_bytes(const OverlapProblem& problem, const TorchComm& comm) {
  if (!problem.is_all_reduce || problem.local_k == 0) return 0;
  return fused_allreduce_bytes(problem, comm, fused_allreduce_shape(problem, comm));
}

std::optional<Algorithm> choose_algorithm(const OverlapProblem& problem, std::string_view algorithm,
                                          const std::shared_ptr<TorchComm>& comm,
                                          const std::function<void()>& check) {
  check_algorithm(problem.op, algorithm);
  const auto asked = algorithm_of(algorithm);
  if (ExplainScope* const scope = ExplainScope::current()) {
    scope->choice = choose(problem, asked, comm);
    return std::nullopt;
  }
  if (asked && !can_be_unsupported(*asked)) return asked;
  return ChoiceCache::of(*comm)->keep({problem, asked, comm->is_capturing()}, [&] {
    if (check) check();
    prepare(problem, asked, comm);
    return choose(problem, asked, comm).algorithm;
  });
}

std::optional<Algorithm> choose_forward(const OverlapProblem& problem, std::string_view algorithm,
                                        const std::shared_ptr<TorchComm>& comm) {
  if (algorithm != "bulk") return choose_algorithm(problem, algorithm, comm);
  if (ExplainScope* const scope = ExplainScope::current()) {
    scope->choice = {Algorithm::sequential,
                     "bulk hides the communication of gradients, and a forward pass has none",
                     kCaller};
    return std::nullopt;
  }
  return Algorithm::sequential;
}

bool is_channel_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

bool is_worth_chunks(int64_t rows) { return rows >= kMinChunkRows; }

}  // namespace torch_overlap::ops
