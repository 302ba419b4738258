#include "torch_overlap/ops/swiglu.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "torch_overlap/ops/cuda/dense_rows.h"
#include "torch_overlap/ops/cuda/swiglu.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Writes to `out` the result, or with `grad` the gradients.
void run_swiglu(cuda::RowType type, const GateAndUp& parts, const Tensor& grad, Tensor& out) {
  if (out.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(out.device());
  const int64_t features = parts.gate.size(-1);
  const auto gate = cuda::dense_rows(parts.gate, features);
  const auto up = cuda::dense_rows(parts.up, features);
  cuda::SwigluParams p{.type = type,
                       .rows = gate.size(0),
                       .features = features,
                       .gate = cuda::rows_of(gate),
                       .up = cuda::rows_of(up),
                       .grad = {},
                       .out = out.data_ptr()};
  const auto grad_rows = grad.defined() ? cuda::dense_rows(grad, features) : grad;
  if (grad.defined()) p.grad = cuda::rows_of(grad_rows);
  C10_CUDA_CHECK(cuda::launch_swiglu(p, c10::cuda::getCurrentCUDAStream()));
}

Tensor swiglu_cuda(const Tensor& gate, const OptionalTensor& up) {
  const auto parts = gate_and_up("swiglu", gate, up);
  const auto type = cuda::row_type(gate.scalar_type());
  if (!type) return composed_swiglu(gate, up);
  auto out = at::empty(parts.gate.sizes(), gate.options());
  run_swiglu(*type, parts, Tensor(), out);
  return out;
}

Tensor swiglu_backward_cuda(const Tensor& grad, const Tensor& gate, const OptionalTensor& up) {
  const auto parts = gate_and_up("swiglu", gate, up);
  const auto type = cuda::row_type(gate.scalar_type());
  if (!type) return composed_swiglu_backward(grad, gate, up);
  TORCH_OVERLAP_CHECK(grad.sizes() == parts.gate.sizes(), kValue,
                      "_swiglu_backward: expected grad of shape ", parts.gate.sizes(), ", got ",
                      grad.sizes(), ".");
  TORCH_OVERLAP_CHECK(grad.scalar_type() == gate.scalar_type() && grad.device() == gate.device(),
                      kType, "_swiglu_backward: expected grad of dtype ", gate.scalar_type(),
                      " on ", gate.device(), ", got ", grad.scalar_type(), " on ", grad.device(),
                      ".");
  auto sizes = parts.gate.sizes().vec();
  sizes.back() *= 2;
  auto out = at::empty(sizes, gate.options());
  run_swiglu(*type, parts, grad, out);
  return out;
}

}  // namespace
}  // namespace torch_overlap::ops

TORCH_OVERLAP_KERNELS(CUDA, m) {
  m.impl("swiglu", torch_overlap::ops::swiglu_cuda);
  m.impl("_swiglu_backward", torch_overlap::ops::swiglu_backward_cuda);
}
