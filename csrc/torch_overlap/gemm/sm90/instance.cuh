#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "torch_overlap/gemm/sm90/kernels.h"
#include "torch_overlap/gemm/sm90/tiles.cuh"

// Which kernels are compiled, and finding one of them. For .cu files made for sm_90a.
namespace torch_overlap::sm90 {

inline constexpr int kSharedBytesOfBlock = 227 * 1024;

// What of a TileConfig does not depend on types and layouts. As many stages as there is room for.
template <int kRows_, int kColumns_, int kRowGroups_, int kCluster_, int kStoreBuffers_,
          int kSets_ = 1>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kStoreBuffers = kStoreBuffers_;
  static constexpr int kSets = kSets_;
  static constexpr int kStages = (kSharedBytesOfBlock - 1024 - 512 - 2 * kStoreBuffers * 64 * 128) /
                                 ((kRows + kColumns) * 128);
};

template <typename Kernel, typename T, typename In, typename Out, bool kRhsAlongK>
KernelInfo instance() {
  using Config = TileConfig<In, Out, T::kRows, T::kColumns, T::kRowGroups, kRhsAlongK, T::kCluster,
                            T::kStages, T::kStoreBuffers, T::kSets>;
  return {Kernel::template of<Config>(),
          Config::kRows,
          Config::kColumns,
          Config::kCluster,
          Config::kDepth,
          Config::kThreads,
          Config::kSharedBytes};
}

template <typename Kernel, typename In, typename Out, bool kRhsAlongK, typename... Tiles>
const KernelInfo* find_tile(const KernelKey& key) {
  static const KernelInfo all[] = {instance<Kernel, Tiles, In, Out, kRhsAlongK>()...};
  for (const KernelInfo& one : all) {
    if (one.rows == key.rows && one.columns == key.columns) return &one;
  }
  return nullptr;
}

// By 16-bit types and the way that rhs lies.
// Kernel::of<Config>() is the kernel's address.
template <typename Kernel, typename... Tiles>
const KernelInfo* find_instance(const KernelKey& key) {
  const auto of = [&]<typename In, typename Out>(In, Out) {
    return key.rhs_along_k ? find_tile<Kernel, In, Out, true, Tiles...>(key)
                           : find_tile<Kernel, In, Out, false, Tiles...>(key);
  };
  if (key.in == OperandType::bf16 && key.out == VectorType::bf16)
    return of(Bf16{}, __nv_bfloat16{});
  if (key.in == OperandType::f16 && key.out == VectorType::f16) return of(F16{}, __half{});
  return nullptr;
}

template <typename Params>
cudaError_t launch(const KernelInfo& kernel, const Params& params, int blocks,
                   cudaStream_t stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned int>(kernel.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned int>(blocks));
  config.blockDim = dim3(static_cast<unsigned int>(kernel.threads));
  config.dynamicSmemBytes = static_cast<size_t>(kernel.shared_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, kernel.kernel, arguments);
}

}  // namespace torch_overlap::sm90
