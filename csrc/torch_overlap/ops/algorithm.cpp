#include "torch_overlap/ops/algorithm.h"

#include <algorithm>
#include <array>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::ops {
namespace {

constexpr const char* kUnsupportedInCapture =
    "no memory can be shared during a capture; call the operator once before it";
constexpr const char* kSharedGpuCopiesNeedSms =
    "ranks share a GPU, where copies need SMs, and a kernel that waits for them has all of these";

using ChannelRequirements = std::vector<ChannelRequirement>;

// Returns why the problem cannot use channels at all; empty if it can.
std::string no_channels_reason(const OverlapProblem& problem, const TorchComm& comm) {
  if (!is_channel_dtype(problem.dtype)) {
    return concat("products of ", problem.dtype, " are torch's");
  }
  return comm.backend_name() == "fake" ? "the communicator has no peers" : "";
}

// Returns why this channel of a communicator cannot be used; empty if it can.
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
  if (problem.gather_bytes) channels.push_back({OperatorChannel::gather, *problem.gather_bytes});
  if (problem.reduce_scatter_bytes)
    channels.push_back({OperatorChannel::reduce_scatter, *problem.reduce_scatter_bytes});
  return channels;
}

std::string low_latency_unsupported_reason(const OverlapProblem& problem, const TorchComm&) {
  if (problem.low_latency) return {};
  return concat("nothing of this part of ", problem.op, " lies in memory that ranks share");
}

ChannelRequirements low_latency_channels(const OverlapProblem& problem, const TorchComm&) {
  return {problem.low_latency.value()};
}

// Returns the shape of the fused kernel of a product with `columns`.
FusedShape fused_shape(const OverlapProblem& problem, const TorchComm& comm, int64_t columns) {
  const FusedProducts& products = problem.fused.value();
  return {.device = comm.device(),
          .types = products.types,
          .rows = {products.rows.value_or(problem.chunk_rows * comm.size()), comm.size()},
          .n = columns,
          .k = products.k};
}

// Returns why the device has no fused kernel for the problem; empty if it has one.
std::string fused_unsupported_reason(const OverlapProblem& problem, const TorchComm& comm) {
  if (!problem.can_fuse()) {
    return concat("there is no fused kernel for this part of ", problem.op);
  }
  OverlapDevice& device = overlap_device(problem.op, comm.device().type());
  for (const int64_t columns : problem.fused->n) {
    auto why = device.fused_unsupported_reason(fused_shape(problem, comm, columns));
    if (!why.empty()) return why;
  }
  return {};
}

ChannelRequirements fused_channels(const OverlapProblem& problem, const TorchComm& comm) {
  const int64_t reduce_bytes = fused_allreduce_bytes(problem, comm);
  if (reduce_bytes > 0) return {{OperatorChannel::fused_all_reduce, reduce_bytes}};
  return channels_of(problem, comm);
}

// True if a fused kernel waits for data that copies deliver.
bool waits_for_copies(const OverlapProblem& problem, const TorchComm& comm) {
  return problem.gather_bytes && !problem.reduce_scatter_bytes &&
         fused_allreduce_bytes(problem, comm) == 0;
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

}  // namespace

std::string_view to_string(Algorithm algorithm) {
  return kAlgorithms.at(static_cast<size_t>(algorithm)).name;
}

std::vector<std::string> algorithm_names() {
  std::vector<std::string> names;
  for (const AlgorithmInfo& info : kAlgorithms) names.emplace_back(info.name);
  return names;
}

std::optional<Algorithm> algorithm_of(std::string_view name) {
  const auto* const found =
      std::find_if(kAlgorithms.begin(), kAlgorithms.end(),
                   [name](const AlgorithmInfo& info) { return info.name == name; });
  if (found == kAlgorithms.end()) return std::nullopt;
  return static_cast<Algorithm>(found - kAlgorithms.begin());
}

void check_algorithm(std::string_view op, std::string_view algorithm) {
  if (algorithm == "auto" || algorithm_of(algorithm)) return;
  std::string known = "auto";
  for (const AlgorithmInfo& info : kAlgorithms) known += concat(", ", info.name);
  fail(ErrorKind::kValue, op, ": expected algorithm to be one of ", known, ", got '", algorithm,
       "'. Use one of them.");
}

bool can_be_unsupported(Algorithm algorithm) {
  const AlgorithmInfo& info = info_of(algorithm);
  return info.unsupported_reason != nullptr || info.channels != nullptr;
}

std::string unsupported_reason(Algorithm algorithm, const OverlapProblem& problem,
                               const TorchComm& comm) {
  auto why = static_unsupported_reason(algorithm, problem, comm);
  const AlgorithmInfo& info = info_of(algorithm);
  if (!why.empty() || info.channels == nullptr) return why;
  for (const auto& required : info.channels(problem, comm)) {
    why = channel_unsupported_reason(required, comm);
    if (!why.empty()) return why;
  }
  return algorithm == Algorithm::fused && waits_for_copies(problem, comm) &&
                 shares_devices(problem, comm)
             ? kSharedGpuCopiesNeedSms
             : "";
}

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

bool shares_devices(const OverlapProblem& problem, const TorchComm& comm) {
  for (const auto& required : channels_of(problem, comm)) {
    const auto channel = existing_operator_channel(comm, required.which);
    if (channel && channel->shares_devices()) return true;
  }
  return false;
}

FusedShape fused_allreduce_shape(const OverlapProblem& problem, const TorchComm& comm) {
  FusedShape shape = fused_shape(problem, comm, problem.fused.value().n.at(0));
  shape.rows.rows = problem.global_shape.value().m;
  return shape;
}

int64_t fused_allreduce_bytes(const OverlapProblem& problem, const TorchComm& comm) {
  if (!problem.is_all_reduce || !problem.can_fuse()) return 0;
  return fused_allreduce_bytes(problem, comm, fused_allreduce_shape(problem, comm));
}

int64_t fused_allreduce_bytes(const OverlapProblem& problem, const TorchComm& comm,
                              const FusedShape& shape) {
  return overlap_device(problem.op, comm.device().type()).required_fused_allreduce_bytes(shape);
}

bool is_channel_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

}  // namespace torch_overlap::ops
