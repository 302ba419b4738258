#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/ops/algorithm.h"

// Selection of the algorithm of an overlapped operator.
namespace torch_overlap::ops {

struct Choice {
  Algorithm algorithm;
  std::string why;
  // Source of the choice: "caller", "table" (shipped), "cache" (of `python -m torch_overlap tune`),
  // or "rule".
  std::string_view decided_by;
};

// While it lives, choose_algorithm() on this thread explains the choice, without communication, and
// the operators compute nothing; their operands may be Meta tensors. Assumes, where it is not known
// yet, that the ranks map each other's memory and have one GPU each (ranks exchange their devices
// only when they share memory), and that every rank has this rank's cache.
class TORCH_OVERLAP_API ExplainScope {
 public:
  ExplainScope();
  ~ExplainScope();
  ExplainScope(const ExplainScope&) = delete;
  ExplainScope& operator=(const ExplainScope&) = delete;
  static ExplainScope* current();
  // Empty: no operator has chosen.
  std::optional<Choice> choice;

 private:
  ExplainScope* const outer_;
};

// While it lives, choose_algorithm() on this thread chooses, and creates what the algorithm needs
// for eager and for captured calls, and the forward operators compute nothing. Collective.
class TORCH_OVERLAP_API PrepareScope {
 public:
  PrepareScope();
  ~PrepareScope();
  PrepareScope(const PrepareScope&) = delete;
  PrepareScope& operator=(const PrepareScope&) = delete;

 private:
  const bool outer_;
};

// True if a kernel is called for the shape and dtype of its results alone: on Meta tensors, unless
// they stand for real ones in explain.
bool is_shape_only(const at::Tensor& x);

// Returns the requested `algorithm`, or the one that "auto" selects: from the table, otherwise from
// the cache, otherwise from the nearest measured sizes in either, otherwise by a rule on the number
// of rows and the ranks' capabilities. The result is the same on all ranks. The call is collective
// if it uses channels that do not exist yet, or if the ranks have not exchanged their caches.
// Throws kUnsupported if the requested algorithm cannot run. The communicator caches the result
// until set_tuning() or until the capabilities of its channels change. `check`, if set, is called
// before anything is sent; its exceptions propagate. Empty in an ExplainScope or a PrepareScope:
// the operator returns without computing.
TORCH_OVERLAP_API std::optional<Algorithm> choose_algorithm(
    const OverlapProblem& problem, std::string_view algorithm,
    const std::shared_ptr<TorchComm>& comm, const std::function<void()>& check = {});
// The same for the forward pass of an operator whose gradient has "bulk": "bulk" overlaps only the
// communication of gradients.
std::optional<Algorithm> choose_forward(const OverlapProblem& problem, std::string_view algorithm,
                                        const std::shared_ptr<TorchComm>& comm);

// True if a chunk of this many rows takes longer than the launch of its transfer.
bool is_worth_chunks(int64_t rows);

}  // namespace torch_overlap::ops
