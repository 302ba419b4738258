#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "torch_overlap/gemm/sm90/kernels.h"
#include "torch_overlap/gemm/sm90/tile_scheduler.cuh"

// The compiled kernels, and functions to find one of them. For .cu files compiled for sm_90a.
namespace torch_overlap::sm90 {

inline constexpr int kMaxSharedBytes = 227 * 1024;

// The part of a TileConfig that does not depend on types and layouts. It has as many stages as fit.
template <int kRows_, int kColumns_, int kRowGroups_, int kCluster_, int kStoreBuffers_,
          int kNumAccumulatorSets_ = 1>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kStoreBuffers = kStoreBuffers_;
  static constexpr int kNumAccumulatorSets = kNumAccumulatorSets_;
  static constexpr int kStages =
      (kMaxSharedBytes - 1024 - 512 - 2 * kStoreBuffers * 64 * 128) / ((kRows + kColumns) * 128);
};

template <typename Kernel, typename T, typename In, typename Out, bool kIsLhsKMajor,
          bool kIsRhsKMajor>
KernelInfo instance() {
  using Config =
      TileConfig<In, Out, T::kRows, T::kColumns, T::kRowGroups, kIsLhsKMajor, kIsRhsKMajor,
                 T::kCluster, T::kStages, T::kStoreBuffers, T::kNumAccumulatorSets>;
  constexpr int kRhsBytes = 2;  // bytes of an element that is not K-major
  return {.kernel = Kernel::template of<Config>(),
          .rows = Config::kRows,
          .columns = Config::kColumns,
          .cluster = Config::kCluster,
          .rhs_box_bytes = Config::kRhsBlock * kRhsBytes,
          .depth = Config::kDepth,
          .threads = Config::kThreads,
          .shared_bytes = Config::kSharedBytes};
}

template <typename Kernel, typename In, typename Out, bool kIsLhsKMajor, bool kIsRhsKMajor,
          typename... Tiles>
const KernelInfo* find_kernel_tile(const KernelKey& key) {
  static const KernelInfo all[] = {
      instance<Kernel, Tiles, In, Out, kIsLhsKMajor, kIsRhsKMajor>()...};
  for (const KernelInfo& one : all) {
    if (one.rows == key.rows && one.columns == key.columns) return &one;
  }
  return nullptr;
}

// Calls act(In{}, Out{}, kIsRhsKMajor) with the types of a key, the last one as a type too. Returns
// an empty result if there is no kernel for these types.
template <typename Act>
auto dispatch_types(const KernelKey& key, const Act& act)
    -> decltype(act(Bf16{}, __nv_bfloat16{}, std::true_type{})) {
  const auto dispatch_16_bit = [&]<typename In, typename Out>(In in, Out out) {
    return key.is_rhs_k_major ? act(in, out, std::true_type{}) : act(in, out, std::false_type{});
  };
  const auto dispatch_8_bit =
      [&]<typename In>(In in) -> decltype(dispatch_16_bit(Bf16{}, __nv_bfloat16{})) {
    if (!key.is_rhs_k_major) return {};
    if (key.out == ElementType::bf16) return act(in, __nv_bfloat16{}, std::true_type{});
    if (key.out == ElementType::f16) return act(in, __half{}, std::true_type{});
    return {};
  };
  const auto is = [&](OperandType lhs, OperandType rhs) {
    return key.lhs == lhs && key.rhs == rhs;
  };
  using enum OperandType;
  if (is(bf16, bf16) && key.out == ElementType::bf16)
    return dispatch_16_bit(Bf16{}, __nv_bfloat16{});
  if (is(f16, f16) && key.out == ElementType::f16) return dispatch_16_bit(F16{}, __half{});
  if (is(e4m3, e4m3)) return dispatch_8_bit(E4m3E4m3{});
  if (is(e4m3, e5m2)) return dispatch_8_bit(E4m3E5m2{});
  if (is(e5m2, e4m3)) return dispatch_8_bit(E5m2E4m3{});
  return {};
}

// Kernel::of<Config>() returns the kernel's address.
template <typename Kernel, typename... Tiles>
const KernelInfo* find_kernel_instance(const KernelKey& key) {
  if (!key.is_lhs_k_major) return nullptr;
  return dispatch_types(key, [&](auto in, auto out, auto is_k_major) {
    return find_kernel_tile<Kernel, decltype(in), decltype(out), true, is_k_major(), Tiles...>(key);
  });
}

// Also finds kernels in which neither operand is K-major.
template <typename Kernel, typename... Tiles>
const KernelInfo* find_kernel_instance_any_layout(const KernelKey& key) {
  if (key.is_lhs_k_major) return find_kernel_instance<Kernel, Tiles...>(key);
  if (key.is_rhs_k_major) return nullptr;
  return dispatch_types(key, [&](auto in, auto out, auto) -> const KernelInfo* {
    using In = decltype(in);
    if constexpr (In::kBytes == 2) {
      return find_kernel_tile<Kernel, In, decltype(out), false, false, Tiles...>(key);
    } else {
      return nullptr;
    }
  });
}

// `kernel` has the fields kernel, cluster, threads and shared_bytes, like KernelInfo.
// `is_dependent`: by programmatic dependent launch.
template <typename Info, typename Params>
cudaError_t launch(const Info& kernel, const Params& params, int blocks, cudaStream_t stream,
                   bool is_dependent = false) {
  void* arguments[] = {const_cast<Params*>(&params)};
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned int>(kernel.cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned int>(blocks));
  config.blockDim = dim3(static_cast<unsigned int>(kernel.threads));
  config.dynamicSmemBytes = static_cast<size_t>(kernel.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = is_dependent ? 2 : 1;
  return cudaLaunchKernelExC(&config, kernel.kernel, arguments);
}

}  // namespace torch_overlap::sm90
