#include "torch_overlap/ops/choose.h"

#include <c10/util/hash.h>

#include <iterator>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/rounding.h"
#include "torch_overlap/ops/tuning.h"

namespace torch_overlap::ops {
namespace {

thread_local ExplainScope* explain_scope = nullptr;  // the innermost one of this thread
thread_local bool is_in_prepare_scope = false;

// A chunk with fewer rows takes less time to multiply than the launch of its transfer.
constexpr int64_t kMinChunkRows = 256;

constexpr std::string_view kCaller = "caller";
constexpr std::string_view kRule = "rule";

// An algorithm that "auto" takes if it can run. The last candidate can always run.
struct Candidate {
  Choice choice;  // empty `why`: the reason why the previous candidate cannot run
  bool is_measured = false;
  bool needs_gpu_per_rank = false;
};

// True if the kernel that multiplies and sums is the default when nothing was measured.
bool should_fuse_allreduce(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm) {
  return problem.is_all_reduce && problem.can_fuse() &&
         overlap_device(problem.op, comm->device().type())
             .should_fuse_allreduce(fused_allreduce_shape(problem, *comm),
                                    min_sm_count(problem, comm));
}

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
        concat("one kernel multiplies and sums products of ", problem.global_shape->m, " rows"));
  }
  if (!is_worth_chunks(problem.chunk_rows)) {
    add(Algorithm::sequential,
        concat("chunks of ", problem.chunk_rows, " rows are quicker computed than sent; ",
               kMinChunkRows, " are worth it"));
    return found;
  }
  if (!problem.can_pipeline) {
    add(Algorithm::sequential, unsupported_reason(Algorithm::pipelined, problem, *comm));
    return found;
  }
  if (problem.can_fuse() && fused_allreduce_bytes(problem, *comm) == 0) {
    add(Algorithm::fused, "a kernel waits for the other ranks by itself",
        /*needs_gpu_per_rank=*/true);
  }
  // On a CPU only the communicator's threads run concurrently with a product.
  if (comm->device().is_cpu()) {
    add(Algorithm::pipelined, "a CPU");
  } else if (problem.is_all_reduce) {
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
  if (!problem.is_all_reduce || !problem.can_fuse()) return true;
  FusedShape measured = fused_allreduce_shape(problem, comm);
  measured.rows.rows = tuned.m;
  measured.n = round_up(tuned.n, kUnit);
  measured.k = round_up(tuned.k / comm.size(), kUnit);
  return (fused_allreduce_bytes(problem, comm, measured) > 0) ==
         (fused_allreduce_bytes(problem, comm) > 0);
}

// True if the kernel that multiplies and sums is for graphs only: while it waits for ranks it may
// leave no SM to other streams, and in eager mode nothing orders it before kernels there that wait,
// too.
bool is_graph_only(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm) {
  return fused_allreduce_bytes(problem, *comm) > 0 && !should_fuse_allreduce(problem, comm);
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
    const GemmShape shape = problem.global_shape.value_or(GemmShape{});
    return c10::get_hash(problem.op, problem.dtype, shape.m, shape.n, shape.k, problem.chunk_rows,
                         key.asked.has_value(), key.in_graph);
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

ExplainScope::ExplainScope() : outer_(std::exchange(explain_scope, this)) {}
ExplainScope::~ExplainScope() { explain_scope = outer_; }
ExplainScope* ExplainScope::current() { return explain_scope; }

PrepareScope::PrepareScope() : outer_(std::exchange(is_in_prepare_scope, true)) {}
PrepareScope::~PrepareScope() { is_in_prepare_scope = outer_; }

bool is_shape_only(const at::Tensor& x) { return x.is_meta() && explain_scope == nullptr; }

std::optional<Algorithm> choose_algorithm(const OverlapProblem& problem, std::string_view algorithm,
                                          const std::shared_ptr<TorchComm>& comm,
                                          const std::function<void()>& check) {
  check_algorithm(problem.op, algorithm);
  const auto asked = algorithm_of(algorithm);
  if (ExplainScope* const scope = ExplainScope::current()) {
    scope->choice = choose(problem, asked, comm);
    return std::nullopt;
  }
  if (asked && !can_be_unsupported(*asked)) {
    return is_in_prepare_scope ? std::nullopt : asked;
  }
  const auto chosen = ChoiceCache::of(*comm)->keep({problem, asked, comm->is_capturing()}, [&] {
    if (check) check();
    prepare(problem, asked, comm);
    return choose(problem, asked, comm).algorithm;
  });
  return is_in_prepare_scope ? std::nullopt : std::optional(chosen);
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
  return is_in_prepare_scope ? std::nullopt : std::optional(Algorithm::sequential);
}

bool is_worth_chunks(int64_t rows) { return rows >= kMinChunkRows; }

}  // namespace torch_overlap::ops
