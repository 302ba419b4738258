#include <ATen/ops/empty.h>

#include "torch_overlap/ops/register.h"

// Point-to-point operators. Both are registered with ordered effects in torch_overlap/ops (Python):
// a compiler does not drop, merge or reorder them.
namespace torch_overlap::ops {
namespace {

void check_no_gradient(std::string_view op, const Tensor& x) {
  TORCH_OVERLAP_CHECK(
      !needs_autograd(x), kUnsupported, op,
      ": expected a tensor that needs no gradient, got one that requires it; detach ",
      "it, or use permute, which has a gradient");
}

void send_kernel(const Tensor& x, int64_t dst, std::string_view comm) {
  check_rank("send", "dst", dst);
  if (x.is_meta()) return;
  find_comm(comm)->send(x.contiguous(), static_cast<int>(dst), /*async_op=*/false);
}

void send_autograd(const Tensor& x, int64_t dst, std::string_view comm) {
  check_no_gradient("send", x);
  const BelowAutograd guard;
  ops::send(x, dst, comm);
}

// Functional form of recv_ for tracing: the result is copied into x.
Tensor recv_kernel(const Tensor& like, int64_t src, std::string_view comm) {
  check_rank("recv_", "src", src);
  auto out = at::empty_symint(like.sym_sizes(), like.options());
  if (!like.is_meta()) find_comm(comm)->recv(out, static_cast<int>(src), /*async_op=*/false);
  return out;
}

Tensor& recv_(Tensor& x, int64_t src, std::string_view comm) {
  check_no_gradient("recv_", x);
  check_rank("recv_", "src", src);
  static const auto functional = find_op<decltype(recv_kernel)>("_recv");
  if (can_start_async(x)) check_no_overlap("recv_", x);
  if (!can_start_async(x) || !x.is_contiguous() || x.is_conj() || x.is_neg()) {
    return x.copy_(functional.call(x, src, comm));
  }
  const BelowAutograd guard;
  find_comm(comm)->recv(x, static_cast<int>(src), /*async_op=*/false);
  return x;
}

}  // namespace

void send(const Tensor& x, int64_t dst, std::string_view comm) {
  static const auto handle = find_op<decltype(send_kernel)>("send");
  handle.call(x, dst, comm);
}

}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS("send(Tensor x, int dst, str comm) -> ()",
                      "recv_(Tensor(a!) x, int src, str comm) -> Tensor(a!)",
                      "_recv(Tensor like, int src, str comm) -> Tensor")

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("send", torch_overlap::ops::send_kernel);
  m.impl("_recv", torch_overlap::ops::recv_kernel);
}

TORCH_OVERLAP_KERNELS(Autograd, m) { m.impl("send", torch_overlap::ops::send_autograd); }

TORCH_OVERLAP_COMPOSITE("recv_", torch_overlap::ops::recv_)
