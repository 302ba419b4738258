#include <ATen/autocast_mode.h>

#include "torch_overlap/ops/register.h"

// The fused operators under torch.autocast: operands are cast to the autocast dtype, as in
// torch.nn.functional.linear. Collectives keep their dtype.
namespace torch_overlap::ops {
namespace {

using at::autocast::cached_cast;

template <c10::DeviceType kDevice>
struct Autocast {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  const c10::impl::ExcludeDispatchKeyGuard below{
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice)};

  Tensor operator()(const Tensor& tensor) const { return cached_cast(dtype, tensor, kDevice); }
  std::optional<Tensor> operator()(const std::optional<Tensor>& tensor) const {
    return tensor ? std::optional((*this)(*tensor)) : std::nullopt;
  }
  std::vector<Tensor> operator()(at::TensorList tensors) const {
    std::vector<Tensor> cast;
    for (const auto& tensor : tensors) cast.push_back((*this)(tensor));
    return cast;
  }
  OptionalTensors operator()(const OptionalTensors& tensors) const {
    OptionalTensors cast;
    for (size_t i = 0; i < tensors.size(); ++i) cast.push_back((*this)(tensors.get(i)));
    return cast;
  }
};

template <c10::DeviceType kDevice>
std::tuple<std::vector<Tensor>, Tensor> all_gather_matmul_autocast(
    const Tensor& x, at::TensorList weights, const OptionalTensors& biases, std::string_view comm,
    int64_t group_size, int64_t gather_dim, bool return_gathered, std::string_view algorithm) {
  const Autocast<kDevice> cast;
  return ops::all_gather_matmul(cast(x), cast(weights), cast(biases), comm, group_size, gather_dim,
                                return_gathered, algorithm);
}

template <c10::DeviceType kDevice>
Tensor matmul_reduce_scatter_autocast(const Tensor& x, const Tensor& weight,
                                      const std::optional<Tensor>& bias, std::string_view comm,
                                      int64_t group_size, int64_t scatter_dim, std::string_view op,
                                      std::string_view algorithm) {
  const Autocast<kDevice> cast;
  return ops::matmul_reduce_scatter(cast(x), cast(weight), cast(bias), comm, group_size,
                                    scatter_dim, op, algorithm);
}

template <c10::DeviceType kDevice>
Tensor matmul_all_reduce_autocast(const Tensor& x, const Tensor& weight,
                                  const std::optional<Tensor>& bias, std::string_view comm,
                                  int64_t group_size, std::string_view op,
                                  std::string_view algorithm) {
  const Autocast<kDevice> cast;
  return ops::matmul_all_reduce(cast(x), cast(weight), cast(bias), comm, group_size, op, algorithm);
}

template <c10::DeviceType kDevice>
std::tuple<Tensor, Tensor> matmul_all_reduce_rms_norm_autocast(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
    const Tensor& residual, const Tensor& norm_weight, std::string_view comm, int64_t group_size,
    double eps, std::string_view algorithm) {
  const Autocast<kDevice> cast;
  return ops::matmul_all_reduce_rms_norm(cast(x), cast(weight), cast(bias), cast(residual),
                                         cast(norm_weight), comm, group_size, eps, algorithm);
}

template <c10::DeviceType kDevice>
Tensor all_to_all_matmul_autocast(const Tensor& x, const Tensor& weight,
                                  const std::optional<Tensor>& bias, std::string_view comm,
                                  int64_t group_size, std::string_view algorithm) {
  const Autocast<kDevice> cast;
  return ops::all_to_all_matmul(cast(x), cast(weight), cast(bias), comm, group_size, algorithm);
}

template <c10::DeviceType kDevice>
std::vector<Tensor> matmul_all_to_all_autocast(const Tensor& x, at::TensorList weights,
                                               const OptionalTensors& biases, std::string_view comm,
                                               int64_t group_size, std::string_view algorithm) {
  const Autocast<kDevice> cast;
  return ops::matmul_all_to_all(cast(x), cast(weights), cast(biases), comm, group_size, algorithm);
}

// `other` keeps its dtype, as in a plain collective.
template <c10::DeviceType kDevice>
std::tuple<Tensor, Tensor> bulk_overlap_matmul_autocast(const Tensor& x, const Tensor& weight,
                                                        const std::optional<Tensor>& bias,
                                                        const Tensor& other,
                                                        std::string_view collective,
                                                        std::string_view comm, int64_t group_size,
                                                        int64_t dim, std::string_view algorithm) {
  const Autocast<kDevice> cast;
  return ops::bulk_overlap_matmul(cast(x), cast(weight), cast(bias), other, collective, comm,
                                  group_size, dim, algorithm);
}

template <c10::DeviceType kDevice>
void register_autocast(Kernels m) {
  m.impl("all_gather_matmul", all_gather_matmul_autocast<kDevice>);
  m.impl("matmul_reduce_scatter", matmul_reduce_scatter_autocast<kDevice>);
  m.impl("matmul_all_reduce", matmul_all_reduce_autocast<kDevice>);
  m.impl("matmul_all_reduce_rms_norm", matmul_all_reduce_rms_norm_autocast<kDevice>);
  m.impl("all_to_all_matmul", all_to_all_matmul_autocast<kDevice>);
  m.impl("matmul_all_to_all", matmul_all_to_all_autocast<kDevice>);
  m.impl("bulk_overlap_matmul", bulk_overlap_matmul_autocast<kDevice>);
}

}  // namespace
}  // namespace torch_overlap::ops

TORCH_OVERLAP_KERNELS(AutocastCPU, m) { torch_overlap::ops::register_autocast<at::kCPU>(m); }

TORCH_OVERLAP_KERNELS(AutocastCUDA, m) { torch_overlap::ops::register_autocast<at::kCUDA>(m); }
