#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <string_view>

#include "torch_overlap/gemm/checked_gemm.h"

// The operands of products as matrices: [rows, features].
namespace torch_overlap::ops {

// A named range of host time in a profile, e.g. "torch_overlap::chunk_gemm[2]". Free when no
// profiler is active. In a timeline these ranges show that transfer i+1 is issued before GEMM i
// ends.
class ProfilerRange {
 public:
  ProfilerRange(std::string_view name, size_t index);

 private:
  at::RecordFunction record_;
};

// Returns `x` as [rows, features]: all dimensions but the last are flattened.
at::Tensor as_rows(const at::Tensor& x);
// Returns `x` as [rows, features]: dimension `dim` first, then all dimensions but the last are
// flattened.
at::Tensor to_rows(const at::Tensor& x, int64_t dim);
// The inverse. writable_rows() returns memory for the rows of a contiguous result: the result
// itself if its rows are in order, otherwise a temporary from which copy_rows_back() copies them.
at::Tensor writable_rows(const at::Tensor& out, int64_t dim);
void copy_rows_back(const at::Tensor& rows, const at::Tensor& out, int64_t dim);

// Returns a contiguous bias; undefined if there is none.
at::Tensor contiguous_or_undefined(const std::optional<at::Tensor>& bias);

// op(x) as an operand: x [m, k] itself, or the transpose of the stored matrix.
GemmOperand operand(const at::Tensor& x);
// op(x) = x^T: the operand that a linear layer multiplies by.
GemmOperand transposed_operand(const at::Tensor& x);

// Returns the product of rows [begin, begin + length) of the left operand, with `out` in place of
// its result. Scales of rows are cut, too.
GemmArgs product_of_rows(const GemmArgs& whole, int64_t begin, int64_t length,
                         const at::Tensor& out);

// A product that is checked before anything is sent. The GEMM layer multiplies floats on GPUs and
// 8-bit floats; torch multiplies the rest.
class Product {
 public:
  // Throws what gemm() throws.
  Product(std::string_view op, GemmArgs args);
  void run() const;
  // True if its kernel can start while the last one on the stream runs (GemmArgs::early_start).
  bool starts_early() const { return gemm_ && gemm_->starts_early(); }

 private:
  std::optional<CheckedGemm> gemm_;
  GemmArgs args_;  // without `gemm_`
};

}  // namespace torch_overlap::ops
