#include "torch_overlap/comm/window.h"

#include "torch_overlap/ops/register.h"

// One-sided operations. `x` is the window's own tensor and stands for the window. The schemas
// declare that all three modify x, so a compiler keeps them in program order relative to every
// other use of x.
namespace torch_overlap::ops {
namespace {

void check_put(const Tensor& x, const Tensor& source, int64_t dst, int64_t offset) {
  check_dtype("put", "source", x, source);
  check_rank("put", "dst", dst);
  TORCH_OVERLAP_CHECK(offset >= 0, kValue, "put: expected offset >= 0, got ", offset,
                      ". It counts elements from the beginning of the window.");
}

void refuse_gradient(std::string_view op, const Tensor& x) {
  TORCH_OVERLAP_CHECK(!needs_autograd(x), kUnsupported, op,
                      ": expected a tensor that needs no gradient, got one that requires it; "
                      "detach it");
}

// The data arrives in the window's memory, not in a copy that a compiler made of it.
std::shared_ptr<TorchCommWindow> find_window(std::string_view op, const Tensor& x,
                                             std::string_view name) {
  auto window = get_window(std::string(name));
  const Tensor own = window->tensor();
  TORCH_OVERLAP_CHECK(
      x.is_alias_of(own) && x.const_data_ptr() == own.const_data_ptr() &&
          x.sizes() == own.sizes() && x.scalar_type() == own.scalar_type(),
      kValue, op, ": expected x to be the tensor of window '", name,
      "', got another, or a copy. Pass window.get_tensor(), to a compiled function "
      "as an argument. Compilers copy x if another operation in the function changes "
      "it (put to the own rank instead), or if a result needs values of x from "
      "before and after; aot_eager always does (use inductor).");
  return window;
}

void put_kernel(const Tensor& x, const Tensor& source, int64_t dst, int64_t offset,
                std::string_view window) {
  check_put(x, source, dst, offset);
  if (x.is_meta()) return;
  find_window("put", x, window)
      ->put(source.contiguous(), static_cast<int>(dst), offset, /*async_op=*/false);
}

void signal_kernel(const Tensor& x, int64_t dst, std::string_view window) {
  check_rank("signal", "dst", dst);
  if (x.is_meta()) return;
  find_window("signal", x, window)->signal(static_cast<int>(dst), /*async_op=*/false);
}

void wait_signal_kernel(const Tensor& x, int64_t src, std::string_view window) {
  check_rank("wait_signal", "src", src);
  if (x.is_meta()) return;
  find_window("wait_signal", x, window)->wait_signal(static_cast<int>(src), /*async_op=*/false);
}

void mark_modified(const Tensor& x) {
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

void put_autograd(const Tensor& x, const Tensor& source, int64_t dst, int64_t offset,
                  std::string_view window) {
  refuse_gradient("put", x);
  refuse_gradient("put", source);
  static const auto op = find_op<decltype(put_kernel)>("put");
  const BelowAutograd guard;
  op.call(x, source, dst, offset, window);
  mark_modified(x);
}

void signal_autograd(const Tensor& x, int64_t dst, std::string_view window) {
  refuse_gradient("signal", x);
  static const auto op = find_op<decltype(signal_kernel)>("signal");
  const BelowAutograd guard;
  op.call(x, dst, window);
  mark_modified(x);
}

void wait_signal_autograd(const Tensor& x, int64_t src, std::string_view window) {
  refuse_gradient("wait_signal", x);
  static const auto op = find_op<decltype(wait_signal_kernel)>("wait_signal");
  const BelowAutograd guard;
  op.call(x, src, window);
  mark_modified(x);
}

}  // namespace
}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS("put(Tensor(a!) x, Tensor source, int dst, int offset, str window) -> ()",
                      "signal(Tensor(a!) x, int dst, str window) -> ()",
                      "wait_signal(Tensor(a!) x, int src, str window) -> ()")

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("put", torch_overlap::ops::put_kernel);
  m.impl("signal", torch_overlap::ops::signal_kernel);
  m.impl("wait_signal", torch_overlap::ops::wait_signal_kernel);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("put", torch_overlap::ops::put_autograd);
  m.impl("signal", torch_overlap::ops::signal_autograd);
  m.impl("wait_signal", torch_overlap::ops::wait_signal_autograd);
}
