#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/scaling.h"

// Matrix products with all that a linear layer and its gradients need around them, in one value.
// The product is written row-major, as torch's tensors lie:
//
//   out [m, n] = epilogue( op(lhs) [m, k] * op(rhs) [k, n] )          op: as it is, or transposed
//
//                      lhs                    rhs
//   forward   y  =     x  [tokens, in]        w  [out, in]   transposed
//   gradient  dx =     dy [tokens, out]       w  [out, in]
//   gradient  dw =     dy [tokens, out] tr.   x  [tokens, in]
namespace torch_overlap {

// A matrix of 2 dimensions whose rows are contiguous (stride(1) == 1); rows may be part of longer
// ones.
struct GemmOperand {
  at::Tensor data{};
  bool transposed = false;  // op(X) = data^T
  ScalingMode scaling = ScalingMode::NO_SCALING;
  // Undefined without scaling. One factor for the tensor: fp32 of one element. Else of the matrix
  // [rows, k] as it is multiplied, [rows, blocks along k]; see quantize.h. Blocks of 1 x 128 are
  // read as they lie with strides (1, rows), blocks of 128 x 128 with a row stride that is a
  // multiple of 4; others are copied into that order at each call.
  at::Tensor scale_inv{};
  // MXFP8: whether scale_inv is in the order that the tensor cores read.
  bool swizzled = false;
  // The same matrix in the other orientation: data^T, contiguous, quantized along its own rows.
  // Hopper multiplies 8-bit operands only along contiguous k; this is read where `data` is not so,
  // on every device. One factor for the tensor may be left out here: it is the same.
  at::Tensor columnwise_data{};
  at::Tensor columnwise_scale_inv{};
};

// Vectors and matrices of the epilogue are fp32, fp16 or bf16 (fp64 where the operands are), of
// unit stride in their last dimension. Everything is computed in fp32 (fp64) and rounded once.
struct GemmEpilogue {
  // [n], added to the product.
  at::Tensor bias{};
  // GELU (tanh form) of product + bias; pre_gelu_out [m, n], if defined, becomes what went in. Not
  // with gelu_input.
  bool gelu = false;
  at::Tensor pre_gelu_out{};
  // [m, n]: the product is multiplied with the derivative of GELU there. Not with bias.
  at::Tensor gelu_input{};
  // Becomes the gradient of a bias: with gelu_input [n], the sum of the rows of what is put in out,
  // a residual left out; else [m], the sum of op(lhs) over k, which for dw = dy^T x is that of dy
  // over tokens.
  at::Tensor bias_grad{};
  // [m, n], of out's dtype: added behind all of that. It may be out itself, as a whole: that is
  // `accumulate`. Not for 8-bit out.
  at::Tensor residual{};
};

struct GemmArgs {
  GemmOperand lhs;
  GemmOperand rhs;
  // [m, n], stride(1) == 1; a view of anything, a communication buffer too. fp64 operands: fp64;
  // fp32: fp32; fp16 and bf16: their own or fp32; 8-bit: fp32, fp16 or bf16. All but fp64 also
  // e4m3 or e5m2.
  at::Tensor out;
  GemmEpilogue epilogue;
  // out += epilogue(...) instead of out =: out is the residual. On Hopper cuBLASLt rounds the
  // product to the type of a 16-bit out before it adds a residual: add in fp32 where that matters.
  bool accumulate = false;
  // 8-bit operands on Hopper: partial sums are promoted to fp32 as they grow. Slower, more exact.
  bool use_split_accumulator = false;
  // 8-bit out = value * out_scale, rounded, at most the largest value of the type; out_amax, if
  // defined, becomes the largest |value|. fp32, one element each.
  at::Tensor out_scale;
  at::Tensor out_amax;
  // How many SMs the product is made for; 0: all.
  int sm_target = 0;
  // Data travel beside it: what is quickest alone need not be so then, and is not measured.
  bool beside_transfers = false;
  // Contiguous memory for the library to work in; it is used from its first 256-byte boundary on.
  // Undefined: a cached one of the device and stream.
  at::Tensor workspace;
};

// Checks `args` and computes, on the current stream. Capture-safe. Throws before anything is
// computed: messages begin with `op`. Nothing to do where m or n is 0; k = 0 makes the product 0.
// 8-bit operands: k a multiple of 16 (MXFP8: 32), rows of operands and out 16-byte aligned; e5m2 is
// not multiplied with e5m2; blocks: n, and m where lhs has 1 x 128, a multiple of 8, and not
// 128 x 128 on both sides.
// Threads: any. No gradients: below autograd.
TORCH_OVERLAP_API void gemm(std::string_view op, const GemmArgs& args);
// Kernels of our own that take the problem where it is, by name, and running one of them: for tests
// and benchmarks. gemm() takes them where they were measured as the fastest (options.h).
TORCH_OVERLAP_API std::vector<std::string> own_gemm_kernels(std::string_view op,
                                                            const GemmArgs& args);
// Throws kUnsupported, naming those that there are, for another.
TORCH_OVERLAP_API void run_own_gemm_kernel(std::string_view op, const GemmArgs& args,
                                           std::string_view kernel);
// The checks alone.
TORCH_OVERLAP_API void check_gemm(std::string_view op, const GemmArgs& args);

// The same problem for the rows [begin, begin + length) of out (and so of op(lhs)), or for its
// columns (of op(rhs) and the bias). They are views: nothing is copied. Throws where the scales of
// the operand cannot be cut there (swizzled, or blocks of 128 x 128: multiples of 128), where a
// piece would overwrite what belongs to the whole (out_amax, bias_grad as the sum of rows), and for
// what gemm() refuses. bias_grad as the sum over k stays with the columns that begin at 0.
TORCH_OVERLAP_API GemmArgs gemm_rows(std::string_view op, const GemmArgs& args, int64_t begin,
                                     int64_t length);
TORCH_OVERLAP_API GemmArgs gemm_columns(std::string_view op, const GemmArgs& args, int64_t begin,
                                        int64_t length);

// One's part of memory that as many products side by side share; nothing of nothing.
TORCH_OVERLAP_API at::Tensor workspace_part(const at::Tensor& workspace, int64_t part,
                                            int64_t parts);

// Of a problem: what the shapes say.
struct GemmShape {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
};
TORCH_OVERLAP_API GemmShape gemm_shape(const GemmArgs& args);

}  // namespace torch_overlap
