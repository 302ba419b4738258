#pragma once

#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/backend.h"

namespace torch_overlap {

// A GEMM that is checked once, for callers that communicate before they multiply. Only the values
// of its tensors may change after the check. `op` must outlive it.
class TORCH_OVERLAP_API CheckedGemm {
 public:
  // Throws what gemm() throws.
  CheckedGemm(std::string_view op, GemmArgs args);

  // Selects part `part` of the workspace, for GEMMs that run concurrently.
  void take_workspace_part(int64_t part, int64_t parts) {
    args_.workspace = workspace_part(args_.workspace, part, parts);
  }
  // Runs what gemm() runs after its checks.
  void run() const;

  // gemm_rows() and gemm_columns() of the checked GEMM.
  GemmArgs rows(int64_t begin, int64_t length) const;
  GemmArgs columns(int64_t begin, int64_t length) const;

  const GemmArgs& args() const { return args_; }
  // True if the device has a kernel for GemmArgs::early_start. It is then loaded.
  bool starts_early() const { return starts_early_; }

 private:
  std::string_view op_;
  GemmArgs args_;
  GemmShape shape_;
  OperandView lhs_;
  OperandView rhs_;
  bool starts_early_ = false;
};

}  // namespace torch_overlap
