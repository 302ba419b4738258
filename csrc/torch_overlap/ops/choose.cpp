#include "torch_overlap/ops/choose.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <array>
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

// make: creates a channel that does not exist. find: only looks for it.
enum class ChannelLookup { make, find };

struct ChannelRequirement {
  OperatorChannel which;
  int64_t bytes;  // 0: not needed
};

// Returns why these channels of a communicator cannot be used; empty if they can.
std::string unsupported_reason_of(const std::vector<ChannelRequirement>& channels,
                                  const OverlapProblem& problem,
                                  const std::shared_ptr<TorchComm>& comm, ChannelLookup lookup) {
  if (!is_channel_dtype(problem.dtype)) {
    return concat("products of ", problem.dtype, " are torch's");
  }
  if (comm->backend_name() == "fake") return "the communicator has no peers";
  for (const auto& [which, bytes] : channels) {
    if (bytes == 0) continue;
    const auto channel = lookup == ChannelLookup::make
                             ? operator_channel(problem.op, comm, which, bytes)
                             : existing_operator_channel(*comm, which);
    const bool is_missing = !channel || channel->bytes() < bytes;
    if (is_missing && (lookup == ChannelLookup::make || comm->is_capturing()))
      return kUnsupportedInCapture;
    if (channel && !channel->transport().is_peer_mapped()) return channel->unsupported_reason();
    if (channel && channel->is_broken()) {
      return "an earlier operation ended half way; reconfigure() the communicator, or make a new "
             "one";
    }
  }
  return {};
}

std::vector<ChannelRequirement> channels_of(const OverlapProblem& problem) {
  return {{OperatorChannel::gather, problem.gather_bytes},
          {OperatorChannel::scatter, problem.scatter_bytes}};
}

std::string channel_unsupported_reason(const OverlapProblem& problem,
                                       const std::shared_ptr<TorchComm>& comm,
                                       ChannelLookup lookup) {
  return unsupported_reason_of(channels_of(problem), problem, comm, lookup);
}

// True if ranks share a GPU, as far as existing channels know.
bool shares_devices(const OverlapProblem& problem, const TorchComm& comm) {
  for (const auto& [which, bytes] : channels_of(problem)) {
    const auto channel = bytes > 0 ? existing_operator_channel(comm, which) : nullptr;
    if (channel && channel->shares_devices()) return true;
  }
  return false;
}

std::string low_latency_unsupported_reason(const OverlapProblem& problem,
                                           const std::shared_ptr<TorchComm>& comm,
                                           ChannelLookup lookup) {
  if (!problem.low_latency_bytes) {
    return concat("nothing of this part of ", problem.op, " lies in memory that ranks share");
  }
  const ChannelRequirement gathered{OperatorChannel::gather, problem.gather_bytes};
  const ChannelRequirement summed{OperatorChannel::sum, *problem.low_latency_bytes};
  return unsupported_reason_of({summed.bytes > 0 ? summed : gathered}, problem, comm, lookup);
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

// Returns why the device has no fused kernel for the problem, or why it cannot be used; empty if it
// can.
std::string fused_unsupported_reason(const OverlapProblem& problem,
                                     const std::shared_ptr<TorchComm>& comm, ChannelLookup lookup) {
  if (problem.local_k == 0) return concat("there is no fused kernel for this part of ", problem.op);
  OverlapDevice& device = overlap_device(problem.op, comm->device().type());
  for (const int64_t columns : problem.local_n) {
    auto why = device.fused_unsupported_reason(fused_shape(problem, *comm, columns));
    if (!why.empty()) return why;
  }
  if (const int64_t required_bytes = ops::fused_allreduce_bytes(problem, *comm);
      required_bytes > 0) {
    return unsupported_reason_of({{OperatorChannel::reduce, required_bytes}}, problem, comm,
                                 lookup);
  }
  auto no_channel = channel_unsupported_reason(problem, comm, lookup);
  if (!no_channel.empty() || !problem.fused_kernel_waits_for_copies()) return no_channel;
  return shares_devices(problem, *comm) ? kSharedGpuCopiesNeedSms : "";
}

std::string pipelined_unsupported_reason(const OverlapProblem& problem,
                                         const std::shared_ptr<TorchComm>&, ChannelLookup) {
  if (problem.can_pipeline) return {};
  return concat("products of ", problem.dtype, " are torch's");
}

// An algorithm and the function that returns why it cannot run; null: it always can.
struct AlgorithmInfo {
  std::string_view name;
  std::string (*unsupported_reason)(const OverlapProblem&, const std::shared_ptr<TorchComm>&,
                                    ChannelLookup);
};

// Indexed by Algorithm.
constexpr std::array<AlgorithmInfo, 6> kAlgorithms{
    {{"sequential", nullptr},
     {"pipelined", pipelined_unsupported_reason},
     {"p2p", channel_unsupported_reason},
     {"bulk", channel_unsupported_reason},
     {"fused", fused_unsupported_reason},
     {"low_latency", low_latency_unsupported_reason}}};

std::optional<Algorithm> algorithm_of(std::string_view name) {
  const auto* const found =
      std::find_if(kAlgorithms.begin(), kAlgorithms.end(),
                   [name](const AlgorithmInfo& info) { return info.name == name; });
  if (found == kAlgorithms.end()) return std::nullopt;
  return static_cast<Algorithm>(found - kAlgorithms.begin());
}

bool can_be_unsupported(Algorithm algorithm) {
  return kAlgorithms.at(static_cast<size_t>(algorithm)).unsupported_reason != nullptr;
}

std::string unsupported_reason(Algorithm algorithm, const OverlapProblem& problem,
                               const std::shared_ptr<TorchComm>& comm, ChannelLookup lookup) {
  if (!can_be_unsupported(algorithm)) return {};
  return kAlgorithms.at(static_cast<size_t>(algorithm)).unsupported_reason(problem, comm, lookup);
}

// True if "fused" is the default when nothing was measured, for enough rows. It costs the host the
// least and is the fastest measured algorithm or, for gathers, close to it. If ranks share a GPU,
// their kernels would wait for each other's SMs.
bool should_use_fused(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                      ChannelLookup lookup) {
  return problem.local_k > 0 && ops::fused_allreduce_bytes(problem, *comm) == 0 &&
         unsupported_reason(Algorithm::fused, problem, comm, lookup).empty() &&
         !shares_devices(problem, *comm);
}

// Chooses when nothing was measured.
Choice choose_by_rule(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                      ChannelLookup lookup) {
  if (should_fuse_allreduce(problem, comm) &&
      unsupported_reason(Algorithm::fused, problem, comm, lookup).empty()) {
    return {Algorithm::fused,
            concat("one kernel multiplies and sums products of ", problem.m, " rows"), kRule};
  }
  if (!is_worth_chunks(problem.chunk_rows)) {
    return {Algorithm::sequential,
            concat("chunks of ", problem.chunk_rows, " rows are quicker computed than sent; ",
                   kMinChunkRows, " are worth it"),
            kRule};
  }
  if (!problem.can_pipeline) {
    return {Algorithm::sequential, pipelined_unsupported_reason(problem, comm, lookup), kRule};
  }
  if (should_use_fused(problem, comm, lookup)) {
    return {Algorithm::fused, "a kernel waits for the other ranks by itself", kRule};
  }
  // On a CPU only the communicator's threads run concurrently with a product.
  if (comm->device().is_cpu()) return {Algorithm::pipelined, "a CPU", kRule};
  if (!problem.prefers_channels) {
    return {Algorithm::pipelined, concat("pieces of ", problem.chunk_rows, " rows"), kRule};
  }
  const auto why = unsupported_reason(Algorithm::p2p, problem, comm, lookup);
  if (!why.empty()) return {Algorithm::pipelined, why, kRule};
  return {Algorithm::p2p, "ranks reach each other's memory", kRule};
}

std::optional<TunedAlgorithm> measured(const OverlapProblem& problem,
                                       const std::shared_ptr<TorchComm>& comm, bool in_graph,
                                       ChannelLookup lookup) {
  return lookup == ChannelLookup::make ? find_tuned(problem, comm, in_graph)
                                       : find_tuned_local(problem, comm, in_graph);
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

// Chooses the measured algorithm of this mode (captured or eager) if it can run, otherwise that of
// the other mode, which is better than a rule, otherwise by the rule.
Choice choose_for_mode(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                       bool in_graph, ChannelLookup lookup) {
  std::string tuned_unsupported_reason;  // why the measured one cannot run
  std::string tuned_note;
  for (const bool mode : {in_graph, !in_graph}) {
    const auto tuned = measured(problem, comm, mode, lookup);
    const auto known = tuned ? algorithm_of(tuned->algorithm) : std::nullopt;
    if (!known) continue;
    if (*known == Algorithm::fused && (!is_same_fused_kernel(*tuned, problem, *comm) ||
                                       (!in_graph && is_graph_only(problem, comm)))) {
      continue;
    }
    const auto why = unsupported_reason(*known, problem, comm, lookup);
    if (why.empty()) {
      const auto* const for_what = tuned->is_other_size ? " for a like size, " : ", ";
      return {*known, concat("measured as the quickest", for_what, tuned->source), tuned->source};
    }
    if (!tuned_unsupported_reason.empty()) continue;
    tuned_unsupported_reason = why;
    tuned_note = concat("; '", to_string(*known), "' of the ", tuned->source, " cannot be: ", why);
  }
  Choice choice = choose_by_rule(problem, comm, lookup);
  if (choice.why != tuned_unsupported_reason) choice.why += tuned_note;
  return choice;
}

Choice choose(const OverlapProblem& problem, std::string_view algorithm,
              const std::shared_ptr<TorchComm>& comm, ChannelLookup lookup) {
  if (const auto asked = algorithm_of(algorithm)) {
    const auto why = unsupported_reason(*asked, problem, comm, lookup);
    TORCH_OVERLAP_CHECK(why.empty(), kUnsupported, problem.op, ": expected what algorithm '",
                        algorithm, "' needs, got: ", why, ". Use 'auto' or 'sequential'.");
    return {*asked, "asked for", kCaller};
  }
  if (comm->size() == 1) return {Algorithm::sequential, "one rank", kRule};
  const bool in_graph = comm->is_capturing();
  // No memory can be shared during a capture. The eager call before a capture therefore creates the
  // channels that the captured call needs, even if it uses another algorithm itself.
  if (lookup == ChannelLookup::make && !in_graph)
    (void)choose_for_mode(problem, comm, /*in_graph=*/true, lookup);
  return choose_for_mode(problem, comm, in_graph, lookup);
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
  if (ExplainScope* const scope = ExplainScope::current()) {
    scope->choice = choose(problem, algorithm, comm, ChannelLookup::find);
    return std::nullopt;
  }
  const auto asked = algorithm_of(algorithm);
  if (asked && !can_be_unsupported(*asked)) return asked;
  return ChoiceCache::of(*comm)->keep({problem, asked, comm->is_capturing()}, [&] {
    if (check) check();
    return choose(problem, algorithm, comm, ChannelLookup::make).algorithm;
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
