#include "torch_overlap/ops/choose.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/ops/tuning.h"
#include "torch_overlap/overlap/op_channels.h"

namespace torch_overlap::ops {
namespace {

// Below this many rows a chunk's product takes less time than issuing its transfer.
constexpr int64_t kMinChunkRows = 256;

constexpr std::string_view kCaller = "caller";
constexpr std::string_view kRule = "rule";
constexpr const char* kNotInACapture =
    "no memory can be shared during a capture; call the operator once before it";
constexpr const char* kCopiesNeedSms =
    "ranks share a GPU, where copies need SMs, and a kernel that waits for them has all of these";

// A channel as it is needed: made, or only looked for.
enum class Need { make, look };

struct NeededChannel {
  OperatorChannel which;
  int64_t bytes;  // 0: it is not needed
};

// Why these channels of a communicator cannot be used; empty if they can.
std::string obstacle_of(const std::vector<NeededChannel>& channels, const OverlapProblem& problem,
                        const std::shared_ptr<TorchComm>& comm, Need need) {
  if (!is_channel_dtype(problem.dtype)) {
    return concat("products of ", problem.dtype, " are torch's");
  }
  if (comm->backend_name() == "fake") return "the communicator has no peers";
  for (const auto& [which, bytes] : channels) {
    if (bytes == 0) continue;
    const auto channel = need == Need::make ? operator_channel(problem.op, comm, which, bytes)
                                            : existing_operator_channel(*comm, which);
    const bool is_missing = !channel || channel->bytes() < bytes;
    if (is_missing && (need == Need::make || comm->is_capturing())) return kNotInACapture;
    if (channel && !channel->transport().is_direct()) return channel->obstacle();
    if (channel && channel->is_broken()) {
      return "an earlier operation ended half way; reconfigure() the communicator, or make a new "
             "one";
    }
  }
  return {};
}

std::vector<NeededChannel> channels_of(const OverlapProblem& problem) {
  return {{OperatorChannel::gather, problem.gather_bytes},
          {OperatorChannel::scatter, problem.scatter_bytes}};
}

std::string channel_obstacle(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                             Need need) {
  return obstacle_of(channels_of(problem), problem, comm, need);
}

// Whether ranks share a GPU, as far as channels are there.
bool shares_devices(const OverlapProblem& problem, const TorchComm& comm) {
  for (const auto& [which, bytes] : channels_of(problem)) {
    const auto channel = bytes > 0 ? existing_operator_channel(comm, which) : nullptr;
    if (channel && channel->shares_devices()) return true;
  }
  return false;
}

std::string direct_obstacle(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                            Need need) {
  if (!problem.direct_bytes) {
    return concat("nothing of this part of ", problem.op, " lies in memory that ranks share");
  }
  const NeededChannel gathered{OperatorChannel::gather, problem.gather_bytes};
  const NeededChannel summed{OperatorChannel::sum, *problem.direct_bytes};
  return obstacle_of({summed.bytes > 0 ? summed : gathered}, problem, comm, need);
}

FusedShape fused_shape(const OverlapProblem& problem, const TorchComm& comm) {
  const int64_t rows = problem.local_m > 0 ? problem.local_m : problem.chunk_rows * comm.size();
  return {.device = comm.device(),
          .types = problem.types.value_or(FusedTypes::all(problem.dtype)),
          .rows = {rows, comm.size()},
          .n = problem.local_n,
          .k = problem.local_k};
}

// What a kernel that multiplies and sums needs of a channel; 0: there is none.
int64_t reduce_room(const OverlapProblem& problem, const TorchComm& comm, const FusedShape& shape) {
  if (!problem.reduces) return 0;
  return overlap_device(problem.op, comm.device().type()).reduce_room(shape);
}

// Whether that kernel is to be taken where nothing was measured.
bool reduce_pays(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm) {
  return problem.reduces &&
         overlap_device(problem.op, comm->device().type())
             .reduce_pays(fused_shape(problem, *comm), least_sm_count(problem, comm));
}

// Why the device has no fused kernel for it, or that cannot be used; empty if it can.
std::string fused_obstacle(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                           Need need) {
  if (problem.local_k == 0) return concat("there is no fused kernel for this part of ", problem.op);
  OverlapDevice& device = overlap_device(problem.op, comm->device().type());
  const FusedShape shape = fused_shape(problem, *comm);
  auto why = device.fused_obstacle(shape);
  if (!why.empty()) return why;
  if (const int64_t room = reduce_room(problem, *comm, shape); room > 0) {
    return obstacle_of({{OperatorChannel::reduce, room}}, problem, comm, need);
  }
  auto no_channel = channel_obstacle(problem, comm, need);
  if (!no_channel.empty() || !problem.waits_for_copies()) return no_channel;
  return shares_devices(problem, *comm) ? kCopiesNeedSms : "";
}

// An algorithm, and what says why it cannot be; null: it always can.
struct Kind {
  std::string_view name;
  std::string (*obstacle)(const OverlapProblem&, const std::shared_ptr<TorchComm>&, Need);
};

// By Algorithm.
constexpr std::array<Kind, 6> kKinds{{{"sequential", nullptr},
                                      {"chunked", nullptr},
                                      {"ring", channel_obstacle},
                                      {"bulk", channel_obstacle},
                                      {"fused", fused_obstacle},
                                      {"direct", direct_obstacle}}};

std::optional<Algorithm> algorithm_of(std::string_view name) {
  const auto* const found = std::find_if(kKinds.begin(), kKinds.end(),
                                         [name](const Kind& kind) { return kind.name == name; });
  if (found == kKinds.end()) return std::nullopt;
  return static_cast<Algorithm>(found - kKinds.begin());
}

bool has_obstacles(Algorithm algorithm) {
  return kKinds.at(static_cast<size_t>(algorithm)).obstacle != nullptr;
}

std::string obstacle(Algorithm algorithm, const OverlapProblem& problem,
                     const std::shared_ptr<TorchComm>& comm, Need need) {
  if (!has_obstacles(algorithm)) return {};
  return kKinds.at(static_cast<size_t>(algorithm)).obstacle(problem, comm, need);
}

// Whether "fused" is to be taken where nothing was measured, of rows that are worth it. Of what
// was, it is the quickest or, in gathers, near it, and the one that costs the host least. Kernels
// of ranks that share a GPU would wait for each other's SMs.
bool fused_pays(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm, Need need) {
  return problem.local_k > 0 && reduce_room(problem, *comm, fused_shape(problem, *comm)) == 0 &&
         obstacle(Algorithm::fused, problem, comm, need).empty() && !shares_devices(problem, *comm);
}

// Where nothing was measured.
Choice choose_by_rule(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                      Need need) {
  if (reduce_pays(problem, comm) && obstacle(Algorithm::fused, problem, comm, need).empty()) {
    return {Algorithm::fused,
            concat("one kernel multiplies and sums products of ", problem.m, " rows"), kRule};
  }
  if (!is_worth_chunks(problem.chunk_rows)) {
    return {Algorithm::sequential,
            concat("chunks of ", problem.chunk_rows, " rows are quicker computed than sent; ",
                   kMinChunkRows, " are worth it"),
            kRule};
  }
  // On a CPU nothing runs beside a product but the communicator's threads.
  if (comm->device().is_cpu()) return {Algorithm::chunked, "a CPU", kRule};
  if (fused_pays(problem, comm, need)) {
    return {Algorithm::fused, "a kernel waits for the other ranks by itself", kRule};
  }
  if (!problem.prefers_channels) {
    return {Algorithm::chunked, concat("pieces of ", problem.chunk_rows, " rows"), kRule};
  }
  const auto why = obstacle(Algorithm::ring, problem, comm, need);
  if (!why.empty()) return {Algorithm::chunked, why, kRule};
  return {Algorithm::ring, "ranks reach each other's memory", kRule};
}

std::optional<Tuned> measured(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                              bool in_graph, Need need) {
  return need == Need::make ? find_tuned(problem, comm, in_graph)
                            : look_for_tuned(problem, comm, in_graph);
}

// Of few rows "fused" is another kernel: what was measured of one says nothing of the other. Sizes
// that are known to half a power of two are rounded to what any kernel takes.
bool is_of_the_kernel(const Tuned& tuned, const OverlapProblem& problem, const TorchComm& comm) {
  constexpr int64_t kUnit = 64;
  const auto rounded = [](int64_t size) { return (size + kUnit - 1) / kUnit * kUnit; };
  const FusedShape shape = fused_shape(problem, comm);
  FusedShape measured = shape;
  measured.rows.rows = tuned.m;
  measured.n = rounded(tuned.n);
  measured.k = rounded(tuned.k / comm.size());
  return (reduce_room(problem, comm, measured) > 0) == (reduce_room(problem, comm, shape) > 0);
}

// Whether it is that kernel, where it may leave other streams no SM while it waits for ranks.
// Eagerly nothing orders it before kernels there that wait, too.
bool is_for_graphs(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm) {
  return reduce_room(problem, *comm, fused_shape(problem, *comm)) > 0 &&
         !reduce_pays(problem, comm);
}

// What was measured for captured calls, or for eager ones, and can be; else by rule. What the other
// mode was measured for is better than a rule.
Choice choose_for(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm,
                  bool in_graph, Need need) {
  std::string why_not;  // what was measured
  std::string passed_over;
  for (const bool mode : {in_graph, !in_graph}) {
    const auto tuned = measured(problem, comm, mode, need);
    const auto known = tuned ? algorithm_of(tuned->algorithm) : std::nullopt;
    if (!known) continue;
    if (*known == Algorithm::fused && (!is_of_the_kernel(*tuned, problem, *comm) ||
                                       (!in_graph && is_for_graphs(problem, comm)))) {
      continue;
    }
    const auto why = obstacle(*known, problem, comm, need);
    if (why.empty()) {
      const auto* const for_what = tuned->is_like ? " for a like size, " : ", ";
      return {*known, concat("measured as the quickest", for_what, tuned->source), tuned->source};
    }
    if (!why_not.empty()) continue;
    why_not = why;
    passed_over = concat("; '", to_string(*known), "' of the ", tuned->source, " cannot be: ", why);
  }
  Choice choice = choose_by_rule(problem, comm, need);
  if (choice.why != why_not) choice.why += passed_over;
  return choice;
}

Choice choose(const OverlapProblem& problem, std::string_view algorithm,
              const std::shared_ptr<TorchComm>& comm, Need need) {
  if (const auto asked = algorithm_of(algorithm)) {
    const auto why = obstacle(*asked, problem, comm, need);
    TORCH_OVERLAP_CHECK(why.empty(), kUnsupported, problem.op, ": expected what algorithm '",
                        algorithm, "' needs, got: ", why, ". Use 'auto' or 'sequential'.");
    return {*asked, "asked for", kCaller};
  }
  if (comm->size() == 1) return {Algorithm::sequential, "one rank", kRule};
  const bool in_graph = comm->is_capturing();
  // No memory can be shared in a capture: what a captured call would need is made by the eager one
  // before it, though that may go another way itself.
  if (need == Need::make && !in_graph) (void)choose_for(problem, comm, /*in_graph=*/true, need);
  return choose_for(problem, comm, in_graph, need);
}

// What a kept choice was made of, besides its question.
struct Facts {
  uint64_t tuning;
  uint64_t channels;
  bool operator==(const Facts&) const = default;
  static Facts now() { return {tuning_version(), OverlapChannel::changes()}; }
};

struct Question {
  OverlapProblem problem;
  std::optional<Algorithm> asked;  // none: "auto"
  bool in_graph;
  bool operator==(const Question&) const = default;
};

struct QuestionHash {
  size_t operator()(const Question& question) const noexcept {
    const OverlapProblem& problem = question.problem;
    return c10::get_hash(problem.op, problem.dtype, problem.m, problem.n, problem.k,
                         problem.chunk_rows, problem.local_n, question.asked.has_value(),
                         question.in_graph);
  }
};

// The choices of a communicator, which an eager call has no time to make again.
class KeptChoices final : public CommAttachment {
 public:
  static std::shared_ptr<KeptChoices> of(TorchComm& comm) {
    constexpr std::string_view kName = "choices";
    auto kept = std::static_pointer_cast<KeptChoices>(comm.attachment(kName));
    if (!kept) {
      kept = std::make_shared<KeptChoices>();
      comm.attach(kName, kept);
    }
    return kept;
  }
  void drain(std::chrono::milliseconds) noexcept override {}

  template <typename Choose>
  Algorithm keep(const Question& question, const Choose& choose) {
    const Facts facts = Facts::now();
    {
      const std::lock_guard lock(mutex_);
      if (facts_ != facts) answers_.clear();
      facts_ = facts;
      if (const auto known = answers_.find(question); known != answers_.end()) return known->second;
    }
    const Algorithm answer = choose();
    const std::lock_guard lock(mutex_);
    constexpr size_t kMost = 4096;  // shapes without end are chosen for again
    if (facts_ == facts && answers_.size() < kMost) answers_.emplace(question, answer);
    return answer;
  }

 private:
  std::mutex mutex_;
  Facts facts_{};
  std::unordered_map<Question, Algorithm, QuestionHash> answers_;
};

}  // namespace

std::string_view to_string(Algorithm algorithm) {
  return kKinds.at(static_cast<size_t>(algorithm)).name;
}

std::vector<std::string> algorithm_names() {
  std::vector<std::string> names;
  for (const Kind& kind : kKinds) names.emplace_back(kind.name);
  return names;
}

void check_algorithm(std::string_view op, std::string_view algorithm) {
  if (algorithm == "auto" || algorithm_of(algorithm)) return;
  std::string known = "auto";
  for (const Kind& kind : kKinds) known += concat(", ", kind.name);
  fail(ErrorKind::kValue, op, ": expected algorithm to be one of ", known, ", got '", algorithm,
       "'. Use one of them.");
}

Algorithm choose_algorithm(const OverlapProblem& problem, std::string_view algorithm,
                           const std::shared_ptr<TorchComm>& comm,
                           const std::function<void()>& check) {
  check_algorithm(problem.op, algorithm);
  const auto asked = algorithm_of(algorithm);
  if (asked && !has_obstacles(*asked)) return *asked;
  return KeptChoices::of(*comm)->keep({problem, asked, comm->is_capturing()}, [&] {
    if (check) check();
    return choose(problem, algorithm, comm, Need::make).algorithm;
  });
}

Choice explain_algorithm(const OverlapProblem& problem, std::string_view algorithm,
                         const std::shared_ptr<TorchComm>& comm) {
  check_algorithm(problem.op, algorithm);
  return choose(problem, algorithm, comm, Need::look);
}

bool is_channel_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

bool is_worth_chunks(int64_t rows) { return rows >= kMinChunkRows; }

}  // namespace torch_overlap::ops
