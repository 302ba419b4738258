#include "torch_overlap/gemm/aliasing.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/memory_overlap.h"

namespace torch_overlap {
namespace {

constexpr std::string_view kWorkspace = "workspace";

struct NamedTensor {
  std::string_view name;
  const at::Tensor& tensor;
};

std::array<NamedTensor, 5> written_by(const GemmArgs& args) {
  return {{{"out", args.out},
           {"pre_gelu_out", args.epilogue.pre_gelu_out},
           {"bias_grad", args.epilogue.bias_grad},
           {"out_amax", args.out_amax},
           {kWorkspace, args.workspace}}};
}

std::array<NamedTensor, 8> read_by(const GemmProblem& problem) {
  const GemmEpilogue& epilogue = problem.args.epilogue;
  return {{{"lhs", problem.lhs.data},
           {"rhs", problem.rhs.data},
           {"scale_inv of lhs", problem.lhs.scale_inv},
           {"scale_inv of rhs", problem.rhs.scale_inv},
           {"bias", epilogue.bias},
           {"gelu_input", epilogue.gelu_input},
           {"residual", epilogue.residual},
           {"out_scale", problem.args.out_scale}}};
}

// True if the residual is exactly out, as with `accumulate`: elements are read where they are
// written.
bool is_in_place(const GemmArgs& args) {
  const at::Tensor& residual = args.epilogue.residual;
  return residual.defined() && residual.const_data_ptr() == args.out.const_data_ptr() &&
         (args.out.size(0) <= 1 || residual.stride(0) == args.out.stride(0));
}

// A tensor that a GEMM of a group reads or writes.
struct MemoryAccess {
  MemoryRange range;
  const at::Tensor* tensor;
  std::string_view name;
  size_t product;
  bool is_written;
};

// GEMMs of a group may name the same workspace, which is divided into parts; see grouped_gemm().
bool is_same_workspace(const MemoryAccess& a, const MemoryAccess& b) {
  return a.name == kWorkspace && b.name == kWorkspace && a.range.begin == b.range.begin &&
         a.range.end == b.range.end;
}

void append_accesses(std::vector<MemoryAccess>& accesses, const GemmProblem& problem,
                     size_t product) {
  const auto add = [&](const NamedTensor& one, bool is_written) {
    const MemoryRange range = memory_range(one.tensor);
    if (!range.empty()) accesses.push_back({range, &one.tensor, one.name, product, is_written});
  };
  for (const NamedTensor& one : written_by(problem.args)) add(one, true);
  for (const NamedTensor& one : read_by(problem)) add(one, false);
}

}  // namespace

void check_no_aliasing(const GemmProblem& problem) {
  const auto check = [&](const NamedTensor& one, const NamedTensor& other) {
    TORCH_OVERLAP_CHECK(!memory_overlaps(one.tensor, other.tensor), kValue, problem.op,
                        ": expected ", one.name, " not to overlap ", other.name,
                        ", got memory of both in one place; write to another tensor");
  };
  const GemmArgs& args = problem.args;
  const auto written = written_by(args);
  const at::Tensor* in_place = is_in_place(args) ? &args.epilogue.residual : nullptr;
  for (size_t i = 0; i < written.size(); ++i) {
    if (!written[i].tensor.defined()) continue;
    for (const NamedTensor& one : read_by(problem)) {
      if (&written[i].tensor != &args.out || &one.tensor != in_place) check(written[i], one);
    }
    for (size_t j = i + 1; j < written.size(); ++j) check(written[i], written[j]);
  }
}

void check_no_aliasing_in_group(std::string_view op, const std::vector<GemmProblem>& group) {
  std::vector<MemoryAccess> accesses;
  for (size_t i = 0; i < group.size(); ++i) append_accesses(accesses, group[i], i);
  std::sort(accesses.begin(), accesses.end(), [](const MemoryAccess& a, const MemoryAccess& b) {
    return a.range.begin < b.range.begin;
  });
  for (auto one = accesses.begin(); one != accesses.end(); ++one) {
    for (auto other = one + 1; other != accesses.end() && other->range.begin < one->range.end;
         ++other) {
      if (one->product == other->product || !(one->is_written || other->is_written)) continue;
      if (is_same_workspace(*one, *other)) continue;
      const auto& [writer, user] =
          one->is_written ? std::tie(*one, *other) : std::tie(*other, *one);
      TORCH_OVERLAP_CHECK(!memory_overlaps(*one->tensor, *other->tensor), kValue, op, ": expected ",
                          writer.name, " of product ", writer.product,
                          " of the group not to overlap ", user.name, " of product ", user.product,
                          ", got memory of both in one place; products of a group ",
                          "run side by side: write to another tensor");
    }
  }
}

}  // namespace torch_overlap
