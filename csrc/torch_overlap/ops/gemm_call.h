#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/gemm.h"

// The operator gemm as one value, and what its kernels share.
namespace torch_overlap::ops {

// Tensors and attributes under the names and in the order of the schema; docs/ops.md says what they
// mean.
struct GemmCall {
  at::Tensor lhs;
  std::optional<at::Tensor> lhs_scale_inv;
  at::Tensor rhs;
  std::optional<at::Tensor> rhs_scale_inv;
  std::optional<at::Tensor> bias;
  std::optional<at::Tensor> gelu_input;
  std::optional<at::Tensor> aux_in;
  std::optional<at::Tensor> lhs_swizzle;
  std::optional<at::Tensor> rhs_swizzle;
  std::optional<at::Tensor> workspace;
  int64_t scaling_mode = 0;
  int64_t comm_overlap_method = 0;
  int64_t comm_type = 0;
  int64_t comm_overlap_id = 0;
  int64_t lhs_axis_boundary = -1;
  int64_t rhs_axis_boundary = -1;
  int64_t aux_axis_boundary = -1;
  bool lhs_transposed = false;
  bool rhs_transposed = false;
  bool fuse_bias = false;
  bool fuse_gelu = false;
  bool grad = false;
  bool use_split_accumulator = false;
  bool scales_swizzled = false;
  std::optional<at::ScalarType> out_dtype;
  std::optional<at::Tensor> out_scale;
  std::optional<at::Tensor> out_amax;
};

// output, bias_grad, pre_gelu_out, aux_out; those that do not exist have shape [0].
using GemmResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Through the dispatcher: autograd, autocast, tracing and the Meta kernel see it.
TORCH_OVERLAP_API GemmResults gemm(const GemmCall& call);

// The matrix that a tensor becomes at an axis boundary.
struct CollapsedOperand {
  int64_t boundary = 0;  // dimensions before it are rows
  c10::SymInt rows;
  c10::SymInt cols;
};
// A negative boundary counts from the end.
CollapsedOperand collapse(std::string_view op, std::string_view what, const at::Tensor& tensor,
                          int64_t boundary);

// What a call without communication results in. Checks what needs no data; symbolic shapes and Meta
// tensors too. Messages begin with `op`.
struct GemmResultShape {
  c10::SymInt m;
  c10::SymInt n;
  std::vector<c10::SymInt> sizes;  // of the output
  at::ScalarType dtype;
  at::ScalarType beside;  // of what is kept beside the output: never 8-bit
};
GemmResultShape gemm_result_shape(const GemmCall& call, std::string_view op = "gemm");
// Allocates them.
GemmResults empty_gemm_results(const GemmCall& call, std::string_view op = "gemm");

// An operand for the GEMM layer. Without a copy where its rows, or without block scales its
// columns, are contiguous.
GemmOperand gemm_operand(const at::Tensor& matrix, bool transposed, ScalingMode scaling,
                         const std::optional<at::Tensor>& scale_inv, bool swizzled);

// The problem that a call without communication is. `results` are those of empty_gemm_results.
GemmArgs gemm_args(const GemmCall& call, const GemmResults& results, std::string_view op = "gemm");
// Swizzles scales into the buffers that the call gives for them: a change, so behind all checks.
void swizzle_operands(const GemmCall& call, GemmArgs& args, std::string_view op = "gemm");

// A call with a comm_type other than NONE: checks and, unless the operands are Meta tensors,
// computes and communicates.
GemmResults run_overlapped(const GemmCall& call);

}  // namespace torch_overlap::ops
