#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/early_start.h"
#include "torch_overlap/gemm/scaling.h"

// GEMMs with everything that a linear layer and its gradients need around them, in one value. The
// result is row-major, like torch's tensors:
//
//   out [m, n] = epilogue( op(lhs) [m, k] * op(rhs) [k, n] )       op: identity or transpose
//
//                      lhs                    rhs
//   forward   y  =     x  [tokens, in]        w  [out, in]   transposed
//   gradient  dx =     dy [tokens, out]       w  [out, in]
//   gradient  dw =     dy [tokens, out] tr.   x  [tokens, in]
namespace torch_overlap {

// A matrix of 2 dimensions whose rows are contiguous (stride(1) == 1). The row stride may
// exceed the row length.
struct GemmOperand {
  at::Tensor data{};
  bool transposed = false;  // op(X) = data^T
  ScalingMode scaling = ScalingMode::NO_SCALING;
  // Inverse scale; undefined without scaling. Tensor scaling: fp32 of one element. Otherwise [rows,
  // blocks along k] of the matrix [rows, k] as it is multiplied; see quantize.h. Scales of 1 x 128
  // blocks are used in place if their strides are (1, rows), scales of 128 x 128 blocks if their
  // row stride is a multiple of 4; others are copied into that layout by each call.
  at::Tensor scale_inv{};
  // MXFP8: true if scale_inv is in the swizzled order that the tensor cores read.
  bool swizzled = false;
  // The same matrix in the other orientation: data^T, contiguous, quantized along its own rows.
  // Hopper multiplies 8-bit operands only if both are K-major; this is used instead of `data` if
  // `data` is not, on every device. With tensor scaling its scale may be omitted: it is the same.
  at::Tensor columnwise_data{};
  at::Tensor columnwise_scale_inv{};
};

// Vectors and matrices of the epilogue are fp32, fp16 or bf16 (fp64 if the operands are), with unit
// stride in the last dimension. Everything is computed in fp32 (fp64) and rounded once.
struct GemmEpilogue {
  // [n], added to the product.
  at::Tensor bias{};
  // Applies GELU (tanh form) to product + bias. pre_gelu_out [m, n], if defined, receives its
  // input. Not with gelu_input.
  bool gelu = false;
  at::Tensor pre_gelu_out{};
  // [m, n]: the product is multiplied by the derivative of GELU at this input. Not with bias.
  at::Tensor gelu_input{};
  // Receives the gradient of a bias. With gelu_input: [n], the sum of the rows of the result
  // without the residual. Otherwise: [m], the sum of op(lhs) over k, which for dw = dy^T x is the
  // sum of dy over tokens.
  at::Tensor bias_grad{};
  // [m, n], of out's dtype: added after the rest of the epilogue. It may be exactly out, which is
  // the same as `accumulate`. Not for 8-bit out.
  at::Tensor residual{};
};

struct GemmArgs {
  GemmOperand lhs;
  GemmOperand rhs;
  // [m, n], stride(1) == 1; may be a view, for example of a communication buffer. Its dtype is fp64
  // for fp64 operands; fp32 for fp32; the operands' or fp32 for fp16 and bf16; fp32, fp16 or bf16
  // for 8-bit operands. For all but fp64 it may also be e4m3 or e5m2.
  at::Tensor out;
  GemmEpilogue epilogue;
  // out += epilogue(...) instead of out =: out is the residual. On Hopper, cuBLASLt rounds the
  // product to a 16-bit out before it adds a residual; use an fp32 out if that matters.
  bool accumulate = false;
  // 8-bit operands on Hopper: partial sums are promoted to fp32. Slower and more accurate.
  bool use_split_accumulator = false;
  // 8-bit out = value * out_scale, rounded and saturated. out_amax, if defined, receives the
  // largest |value|. Both are fp32 of one element.
  at::Tensor out_scale;
  at::Tensor out_amax;
  // Number of SMs that the GEMM is planned for; 0: all.
  int sm_target = 0;
  // Communication runs concurrently. The algorithm that is fastest without it need not be the
  // fastest then, so algorithms are not measured.
  bool overlaps_communication = false;
  // Start of the kernel of a product with few rows.
  EarlyStart early_start = EarlyStart::none;
  // Contiguous memory for the library, used from its first 256-byte boundary on. Undefined: a
  // cached workspace of the device and stream.
  at::Tensor workspace;
};

// Checks `args` and computes, on the current stream. Capture-safe. Throws before anything is
// computed; messages begin with `op`. A no-op if m or n is 0; with k = 0 the product is 0. 8-bit
// operands: k must be a multiple of 16 (MXFP8: 32), and rows of operands and out 16-byte aligned;
// e5m2 by e5m2 is not supported. Block scaling: n, and m if lhs has 1 x 128 blocks, must be
// multiples of 8, and 128 x 128 blocks may not be on both sides. Thread-safe. Runs below autograd:
// no gradients.
TORCH_OVERLAP_API void gemm(std::string_view op, const GemmArgs& args);
// custom_gemm_kernels() returns the names of this project's kernels that support the problem;
// run_custom_gemm_kernel() runs one. For tests and benchmarks: gemm() uses them if they were
// measured as the fastest (options.h).
TORCH_OVERLAP_API std::vector<std::string> custom_gemm_kernels(std::string_view op,
                                                               const GemmArgs& args);
// Throws kUnsupported, naming the available kernels, if `kernel` is not one of them.
TORCH_OVERLAP_API void run_custom_gemm_kernel(std::string_view op, const GemmArgs& args,
                                              std::string_view kernel);
// Runs only the checks of gemm().
TORCH_OVERLAP_API void check_gemm(std::string_view op, const GemmArgs& args);

// Returns the same problem for the rows [begin, begin + length) of out (and so of op(lhs)), or for
// its columns (and so of op(rhs) and the bias). The tensors are views: nothing is copied. Throws if
// the scales of the operand cannot be cut there (swizzled, or 128 x 128 blocks: only at multiples
// of 128), if a piece would overwrite a result of the whole (out_amax, bias_grad as the sum of
// rows), and what gemm() throws. bias_grad as the sum over k stays with the columns that begin at
// 0.
TORCH_OVERLAP_API GemmArgs gemm_rows(std::string_view op, const GemmArgs& args, int64_t begin,
                                     int64_t length);
TORCH_OVERLAP_API GemmArgs gemm_columns(std::string_view op, const GemmArgs& args, int64_t begin,
                                        int64_t length);

// Returns part `part` of a workspace that `parts` concurrent GEMMs share; undefined if it is
// undefined.
TORCH_OVERLAP_API at::Tensor workspace_part(const at::Tensor& workspace, int64_t part,
                                            int64_t parts);

// Sizes of a GEMM.
struct GemmShape {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  bool operator==(const GemmShape&) const = default;
};
TORCH_OVERLAP_API GemmShape gemm_shape(const GemmArgs& args);

}  // namespace torch_overlap
