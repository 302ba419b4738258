#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/gemm.h"

// The arguments of the operator gemm as one value, and code that its kernels share.
namespace torch_overlap::ops {

// Tensors and attributes under the names and in the order of the schema.
// docs/reference/operators.md documents them.
struct GemmOp {
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
  // Tensors to write the results to; null: they are allocated. Not an argument of the operator.
  const std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>* into = nullptr;
};

// output, bias_grad, pre_gelu_out, aux_out. Absent results have shape [0].
using GemmResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Calls the operator through the dispatcher: autograd, autocast, tracing and the Meta kernel see
// it.
TORCH_OVERLAP_API GemmResults gemm(const GemmOp& call);
// Computes what gemm() returns into contiguous tensors of the caller, which have the sizes, dtypes
// and device of those that gemm() would allocate. An absent result may have any shape without
// elements, or be undefined. For runtimes that own the memory of results: below the dispatcher, so
// without autograd and autocast.
TORCH_OVERLAP_API void gemm_into(const GemmOp& call, const GemmResults& results);

// The matrix into which a tensor is collapsed at an axis boundary.
struct CollapsedOperand {
  int64_t boundary = 0;  // number of leading dimensions that form the rows
  c10::SymInt rows;
  c10::SymInt cols;
};
// A negative boundary counts from the end.
CollapsedOperand collapse(std::string_view op, std::string_view what, const at::Tensor& tensor,
                          int64_t boundary);

// Shape and dtype of the results of a call without communication. gemm_result_shape() checks
// everything that needs no data, for symbolic shapes and Meta tensors too. Messages begin with
// `op`.
struct GemmResultShape {
  c10::SymInt m;
  c10::SymInt n;
  std::vector<c10::SymInt> sizes;  // sizes of the output
  at::ScalarType dtype;
  at::ScalarType saved_dtype;  // dtype of the tensors saved with the output; never 8-bit
};
TORCH_OVERLAP_API GemmResultShape gemm_result_shape(const GemmOp& call,
                                                    std::string_view op = "gemm");
// Allocates the results, or returns those of call.into.
GemmResults empty_gemm_results(const GemmOp& call, std::string_view op = "gemm");
// Allocates result number `index` of GemmResults, or returns that of call.into. Throws unless the
// latter fits.
at::Tensor gemm_result(const GemmOp& call, size_t index, c10::SymIntArrayRef sizes,
                       const at::TensorOptions& options, std::string_view op = "gemm");

// Returns the GEMM arguments of a call without communication. `results`: from empty_gemm_results.
GemmArgs gemm_args(const GemmOp& call, const GemmResults& results, std::string_view op = "gemm");
// Swizzles scales into the buffers that the call passes for them. This modifies tensors, so it runs
// after all checks.
void swizzle_operands(const GemmOp& call, GemmArgs& args);

// Runs a call with a comm_type other than NONE: checks it and, unless the operands are Meta
// tensors, computes and communicates.
GemmResults run_overlapped(const GemmOp& call);

}  // namespace torch_overlap::ops
