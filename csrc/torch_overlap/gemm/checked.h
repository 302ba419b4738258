#pragma once

#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/backend.h"

namespace torch_overlap {

// A product whose checks are done, once: by callers that communicate before they multiply. What it
// reads and writes stays as it was checked, but for the values. `op` outlives it.
class TORCH_OVERLAP_API CheckedGemm {
 public:
  // Throws as gemm() does.
  CheckedGemm(std::string_view op, GemmArgs args);

  // Products side by side have a part each of the workspace that they were given.
  void take_workspace_part(int64_t part, int64_t parts) {
    args_.workspace = workspace_part(args_.workspace, part, parts);
  }
  // What gemm() does then.
  void run() const;

  // gemm_rows() and gemm_columns() of it.
  GemmArgs rows(int64_t begin, int64_t length) const;
  GemmArgs columns(int64_t begin, int64_t length) const;

  const GemmArgs& args() const { return args_; }

 private:
  std::string_view op_;
  GemmArgs args_;
  GemmShape shape_;
  OperandView lhs_;
  OperandView rhs_;
};

}  // namespace torch_overlap
