#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "torch_overlap/common/views.h"
#include "torch_overlap/gemm/checked_gemm.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"
#include "torch_overlap/ops/scaled.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kScaledGather = "scaled_all_gather_matmul";

struct ScaledGatherOutputs {
  std::vector<Tensor> products;
  Tensor gathered;
  Tensor gathered_scales;
  ScaledInput input;
};

ScaledGatherOutputs scaled_gather_out(const Tensor& x, const Tensor& x_scale_inv,
                                      at::TensorList weights, at::TensorList weights_scale_inv,
                                      const OptionalTensors& biases, int64_t group_size,
                                      int64_t gather_dim, at::ScalarType out_dtype,
                                      std::string_view algorithm, int64_t scaling_mode,
                                      bool return_gathered) {
  const auto [dim, modes] = check_scaled_x(kScaledGather, x, x_scale_inv, group_size, gather_dim,
                                           "gather_dim", out_dtype, algorithm, scaling_mode);
  check_weight_count(kScaledGather, weights.size(), biases.size());
  TORCH_OVERLAP_CHECK(weights_scale_inv.size() == weights.size(), kValue, kScaledGather,
                      ": expected one scale_inv for each of the ", weights.size(),
                      " weights in weights_scale_inv, got ", weights_scale_inv.size(),
                      ". Pass what quantize gave for each.");
  auto sizes = x.sym_sizes().vec();
  sizes[dim] *= group_size;
  ScaledGatherOutputs out;
  out.input = {.dim = dim, .modes = modes};
  out.gathered =
      return_gathered ? at::empty_symint(sizes, x.options()) : at::empty({0}, x.options());
  out.gathered_scales =
      return_gathered && modes.gathers_scales()
          ? at::empty_symint({x_scale_inv.sym_size(0) * group_size, x_scale_inv.sym_size(1)},
                             x_scale_inv.options())
          : at::empty({0}, x_scale_inv.options());
  for (size_t i = 0; i < weights.size(); ++i) {
    check_scaled_weight(kScaledGather, x, weights[i], weights_scale_inv[i],
                        biases.empty() ? std::nullopt : biases.get(i), out_dtype, modes,
                        static_cast<int64_t>(i));
    sizes.back() = weights[i].sym_size(0);
    out.products.push_back(at::empty_symint(sizes, x.options().dtype(out_dtype)));
  }
  return out;
}

// Products of some gathered rows: sets the arguments that differ by step.
struct ScaledSteps {
  std::vector<GemmArgs> gemms;  // for all rows, without lhs
  GemmArgs at(size_t i, const Tensor& data, const Tensor& scales, int64_t begin) const {
    GemmArgs part = gemms[i];
    part.lhs.data = data;
    if (scales.defined()) part.lhs.scale_inv = scales;
    part.out = row_view(gemms[i].out, begin, data.size(0));
    part.overlaps_communication = data.size(0) < gemms[i].out.size(0);
    return part;
  }
  void check(const Tensor& data, const Tensor& scales) const {
    for (size_t i = 0; i < gemms.size(); ++i) check_gemm(kScaledGather, at(i, data, scales, 0));
  }
  void multiply(const Tensor& data, const Tensor& scales, int64_t begin) const {
    for (size_t i = 0; i < gemms.size(); ++i) gemm(kScaledGather, at(i, data, scales, begin));
  }
};

// Gathers in pieces through the communicator, as bytes: not every backend supports 8-bit floats.
void pipelined_gather_multiply(TorchComm& comm, const GatherInput& input,
                               const ScaledSteps& steps) {
  std::optional<Tensor> bytes_of_all;
  std::optional<Tensor> scales_of_all;
  if (input.gathered.defined()) bytes_of_all = input.gathered.view(at::kByte);
  if (input.gathered_scales.defined()) scales_of_all = input.gathered_scales;
  steps.check(input.own, input.scales);  // before anything is sent
  std::optional<GatherPipeline> scales;
  if (input.scales.defined()) scales.emplace(comm, input.scales, scales_of_all);
  GatherPipeline data(comm, input.own.view(at::kByte), bytes_of_all);
  for (size_t step = 0; step < data.steps(); ++step) {
    const auto rows = data.wait(step).view(input.own.scalar_type());
    const auto scales_of_rows = scales ? scales->wait(step) : Tensor();
    const ProfilerRange span("chunk_gemm", step);
    steps.multiply(rows, scales_of_rows, data.chunk(step) * input.own.size(0));
  }
}

void gather_then_multiply(TorchComm& comm, const GatherInput& input, const ScaledSteps& steps) {
  const auto allocate_gathered = [&comm](const Tensor& own, const Tensor& asked) {
    if (asked.defined() || !own.defined()) return asked;
    return at::empty({comm.size() * own.size(0), own.size(1)}, own.options());
  };
  const auto data = allocate_gathered(input.own, input.gathered);
  const auto scales = allocate_gathered(input.scales, input.gathered_scales);
  std::vector<CheckedGemm> products;  // checked before anything is sent
  for (size_t i = 0; i < steps.gemms.size(); ++i) {
    products.emplace_back(kScaledGather, steps.at(i, data, scales, 0));
  }
  if (scales.defined()) comm.all_gather_single(scales, input.scales, /*async_op=*/false);
  comm.all_gather_single(data.view(at::kByte), input.own.view(at::kByte), /*async_op=*/false);
  for (const CheckedGemm& product : products) product.run();
}

std::tuple<std::vector<Tensor>, Tensor, Tensor> scaled_gather_kernel(
    const Tensor& x, const Tensor& x_scale_inv, at::TensorList weights,
    at::TensorList weights_scale_inv, const OptionalTensors& biases, std::string_view comm,
    int64_t group_size, int64_t gather_dim, at::ScalarType out_dtype, bool use_split_accumulator,
    std::string_view algorithm, int64_t scaling_mode, bool return_gathered) {
  auto out = scaled_gather_out(x, x_scale_inv, weights, weights_scale_inv, biases, group_size,
                               gather_dim, out_dtype, algorithm, scaling_mode, return_gathered);
  const auto [dim, modes] = out.input;
  const auto communicator = find_comm(kScaledGather, comm, group_size);
  GatherInput input{.own = to_rows(x, dim),
                    .scales = scale_rows(x, x_scale_inv, dim, modes),
                    .gathered = {},
                    .gathered_scales = {}};
  const int64_t rows = input.own.size(0);
  Tensor scales_out;  // gathered scales in the shape of the gathered x
  if (return_gathered) {
    input.gathered = writable_rows(out.gathered, dim);
    if (input.scales.defined()) {
      auto sizes = out.gathered.sizes().vec();
      sizes.back() = input.scales.size(1);
      scales_out = out.gathered_scales.view(input.scales.scalar_type()).view(sizes);
      input.gathered_scales = writable_rows(scales_out, dim);
    }
  }
  ScaledSteps steps;
  int64_t features = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    auto args =
        scaled_product(x_scale_inv, weights[i], weights_scale_inv[i], modes, use_split_accumulator);
    args.out = writable_rows(out.products[i], dim);
    if (!biases.empty()) {
      args.epilogue.bias = std::optional<Tensor>(biases.get(i)).value_or(Tensor());
    }
    features += weights[i].size(0);
    steps.gemms.push_back(std::move(args));
  }
  // Every algorithm checks its products before it sends, because 8-bit products restrict sizes.
  // With block scales the rows of a chunk must be valid for every algorithm, so the check runs
  // before the choice.
  const auto check = [&] { steps.check(input.own, input.scales); };
  if (row_unit(modes) > 1) check();
  const auto chosen = choose_algorithm(
      {.op = kScaledGather,
       .dtype = out_dtype,
       .m = rows * group_size,
       .n = features * group_size,
       .k = input.own.size(1),
       .chunk_rows = rows,
       .gather_bytes = gather_bytes(*communicator, input.own, input.scales),
       .local_n = features,
       .local_k = input.own.size(1),
       .types = scaled_types(x, weights[0], out_dtype, modes, use_split_accumulator)},
      algorithm, communicator, check);
  input.method = gather_method(chosen);
  if (chosen == Algorithm::p2p || chosen == Algorithm::fused) {
    channel_gather_gemms(kScaledGather, communicator, input, steps.gemms);
  } else if (chosen == Algorithm::pipelined) {
    pipelined_gather_multiply(*communicator, input, steps);
  } else {
    gather_then_multiply(*communicator, input, steps);
  }
  for (size_t i = 0; i < weights.size(); ++i)
    copy_rows_back(steps.gemms[i].out, out.products[i], dim);
  if (return_gathered) copy_rows_back(input.gathered, out.gathered, dim);
  if (scales_out.defined()) copy_rows_back(input.gathered_scales, scales_out, dim);
  return {std::move(out.products), std::move(out.gathered), std::move(out.gathered_scales)};
}

std::tuple<std::vector<Tensor>, Tensor, Tensor> scaled_gather_meta(
    const Tensor& x, const Tensor& x_scale_inv, at::TensorList weights,
    at::TensorList weights_scale_inv, const OptionalTensors& biases, std::string_view,
    int64_t group_size, int64_t gather_dim, at::ScalarType out_dtype, bool,
    std::string_view algorithm, int64_t scaling_mode, bool return_gathered) {
  auto out = scaled_gather_out(x, x_scale_inv, weights, weights_scale_inv, biases, group_size,
                               gather_dim, out_dtype, algorithm, scaling_mode, return_gathered);
  return {std::move(out.products), std::move(out.gathered), std::move(out.gathered_scales)};
}

}  // namespace
}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "scaled_all_gather_matmul(Tensor x, Tensor x_scale_inv, Tensor[] weights,"
      " Tensor[] weights_scale_inv, Tensor?[] biases, str comm, int group_size, int gather_dim=0,"
      " ScalarType out_dtype=bfloat16, bool use_split_accumulator=False, str algorithm=\"auto\","
      " int scaling_mode=3, bool return_gathered=False) -> (Tensor[], Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("scaled_all_gather_matmul", torch_overlap::ops::scaled_gather_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("scaled_all_gather_matmul", torch_overlap::ops::scaled_gather_meta);
}

// The operator has no gradient: a backward pass raises an error.
TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("scaled_all_gather_matmul", torch::autograd::autogradNotImplementedFallback());
}
