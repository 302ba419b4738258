#include "torch_overlap/comm/profile.h"

#include <c10/util/accumulate.h>

#include <array>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <tuple>
#include <vector>

#include "torch_overlap/base/process.h"
#include "torch_overlap/base/strings.h"

namespace torch_overlap {
namespace {

using Tensors = std::vector<at::Tensor>;

// The text lives as long as the process.
const char* span_name(OpName name) {
  const auto& names = lazy_leaky_singleton([] {
    std::array<std::string, kNumOpNames> made;
    for (size_t i = 0; i < made.size(); ++i) {
      made[i] = concat("TorchComm::", to_string(static_cast<OpName>(i)));
    }
    return made;
  });
  return names[static_cast<size_t>(name)].c_str();
}

struct Sides {
  Tensors input;
  Tensors output;
};

Tensors parts_of(const RankTensors& tensors) {
  if (!tensors.parts.empty()) return tensors.parts;
  return tensors.flat.defined() ? Tensors{tensors.flat} : Tensors{};
}

// Returns the tensors that the call reads and those that it writes.
Sides sides_of(const Call& call) {
  switch (call.primitive) {
    case Primitive::p2p: {
      Sides sides;
      for (const P2POp& op : call.p2p) {
        (op.type == P2POp::Type::SEND ? sides.input : sides.output).push_back(op.tensor);
      }
      return sides;
    }
    case Primitive::broadcast:
    case Primitive::all_reduce:
    case Primitive::reduce:
      return {{call.tensor}, {call.tensor}};
    case Primitive::all_gather:
    case Primitive::gather:
      return {{call.tensor}, parts_of(call.out)};
    case Primitive::reduce_scatter:
    case Primitive::scatter:
      return {parts_of(call.in), {call.tensor}};
    case Primitive::all_to_all:
      return {parts_of(call.in), parts_of(call.out)};
    case Primitive::put:
      return {{call.tensor}, {}};
    case Primitive::barrier:
    case Primitive::signal:
    case Primitive::wait_signal:
      break;
  }
  return {};
}

std::vector<int64_t> numels(const Tensors& tensors) {
  std::vector<int64_t> result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.numel());
  return result;
}

// Returns the distance of neighbouring ranks in the world; 1 for a single rank, -1 if it varies.
int64_t stride_of(const std::vector<int>& ranks) {
  if (ranks.size() < 2) return 1;
  for (size_t i = 2; i < ranks.size(); ++i) {
    if (ranks[i] - ranks[i - 1] != ranks[1] - ranks[0]) return -1;
  }
  return ranks[1] - ranks[0];
}

}  // namespace

void ProfileScope::begin(const Call& call, const CommRecord& comm) {
  const Sides sides = sides_of(call);
  if (span_.needsInputs()) {
    const std::vector<c10::IValue> inputs(sides.input.begin(), sides.input.end());
    span_.before(span_name(call.name), &inputs);
  } else {
    span_.before(span_name(call.name));
  }

  const auto name = std::make_tuple(comm.name, comm.backend);
  const std::string op(to_string(call.name));
  const auto input_numels = numels(sides.input);
  const auto output_numels = numels(sides.output);
  const int64_t first = comm.ranks_in_world.front();
  const int64_t stride = stride_of(comm.ranks_in_world);
  const auto size = static_cast<int64_t>(comm.ranks_in_world.size());
  const Tensors& any = sides.input.empty() ? sides.output : sides.input;
  const auto dtype = any.empty() ? at::kByte : any.front().scalar_type();
  info_.emplace(c10::DebugInfoKind::PARAM_COMMS_INFO,
                std::make_shared<torch::ParamCommsDebugInfo>(
                    name, comm.rank, std::string(op), c10::sum_integers(input_numels),
                    c10::sum_integers(output_numels), dtype, input_numels, output_numels,
                    static_cast<int>(first), static_cast<int>(stride), static_cast<int>(size)));
  params_.emplace(at::RecordScope::FUNCTION);
  if (!params_->isActive()) return;
  if (params_->needsInputs()) {
    // The order is that of RECORD_PARAM_COMMS_DATA, which readers of traces expect.
    const auto sequence =
        std::make_tuple(static_cast<int64_t>(call.sequence), call.primitive == Primitive::p2p);
    const std::vector<c10::IValue> values{c10::IValue(sides.input),
                                          sequence,
                                          name,
                                          static_cast<int64_t>(comm.rank),
                                          op,
                                          input_numels,
                                          output_numels,
                                          first,
                                          stride,
                                          size};
    params_->before(at::kParamCommsCallName, &values);
  } else {
    params_->before(at::kParamCommsCallName);
  }
  if (params_->needsOutputs()) {
    params_->setOutputs(std::vector<c10::IValue>{c10::IValue(sides.output)});
  }
}

}  // namespace torch_overlap
