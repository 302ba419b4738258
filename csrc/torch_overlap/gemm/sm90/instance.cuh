#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

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

template <typename Kernel, typename T, typename In, typename Out, bool kLhsAlongK, bool kRhsAlongK>
KernelInfo instance() {
  using Config = TileConfig<In, Out, T::kRows, T::kColumns, T::kRowGroups, kLhsAlongK, kRhsAlongK,
                            T::kCluster, T::kStages, T::kStoreBuffers, T::kSets>;
  constexpr int kRhsBytes = 2;  // of an element that does not lie along k
  return {.kernel = Kernel::template of<Config>(),
          .rows = Config::kRows,
          .columns = Config::kColumns,
          .cluster = Config::kCluster,
          .rhs_box_bytes = Config::kRhsBlock * kRhsBytes,
          .depth = Config::kDepth,
          .threads = Config::kThreads,
          .shared_bytes = Config::kSharedBytes};
}

template <typename Kernel, typename In, typename Out, bool kLhsAlongK, bool kRhsAlongK,
          typename... Tiles>
const KernelInfo* find_tile(const KernelKey& key) {
  static const KernelInfo all[] = {instance<Kernel, Tiles, In, Out, kLhsAlongK, kRhsAlongK>()...};
  for (const KernelInfo& one : all) {
    if (one.rows == key.rows && one.columns == key.columns) return &one;
  }
  return nullptr;
}

// Calls act(In{}, Out{}, kRhsAlongK) with the types of a key, the last one as a type too; nothing
// of the kind is there for others.
template <typename Act>
auto for_types(const KernelKey& key, const Act& act)
    -> decltype(act(Bf16{}, __nv_bfloat16{}, std::true_type{})) {
  const auto of_16 = [&]<typename In, typename Out>(In in, Out out) {
    return key.rhs_along_k ? act(in, out, std::true_type{}) : act(in, out, std::false_type{});
  };
  const auto of_8 = [&]<typename In>(In in) -> decltype(of_16(Bf16{}, __nv_bfloat16{})) {
    if (!key.rhs_along_k) return {};
    if (key.out == VectorType::bf16) return act(in, __nv_bfloat16{}, std::true_type{});
    if (key.out == VectorType::f16) return act(in, __half{}, std::true_type{});
    return {};
  };
  const auto is = [&](OperandType lhs, OperandType rhs) {
    return key.lhs == lhs && key.rhs == rhs;
  };
  using enum OperandType;
  if (is(bf16, bf16) && key.out == VectorType::bf16) return of_16(Bf16{}, __nv_bfloat16{});
  if (is(f16, f16) && key.out == VectorType::f16) return of_16(F16{}, __half{});
  if (is(e4m3, e4m3)) return of_8(E4m3E4m3{});
  if (is(e4m3, e5m2)) return of_8(E4m3E5m2{});
  if (is(e5m2, e4m3)) return of_8(E5m2E4m3{});
  return {};
}

// Kernel::of<Config>() is the kernel's address.
template <typename Kernel, typename... Tiles>
const KernelInfo* find_instance(const KernelKey& key) {
  if (!key.lhs_along_k) return nullptr;
  return for_types(key, [&](auto in, auto out, auto along_k) {
    return find_tile<Kernel, decltype(in), decltype(out), true, along_k(), Tiles...>(key);
  });
}

// Those of which neither operand runs along k, too.
template <typename Kernel, typename... Tiles>
const KernelInfo* find_any_instance(const KernelKey& key) {
  if (key.lhs_along_k) return find_instance<Kernel, Tiles...>(key);
  if (key.rhs_along_k) return nullptr;
  return for_types(key, [&](auto in, auto out, auto) -> const KernelInfo* {
    using In = decltype(in);
    if constexpr (In::kBytes == 2) {
      return find_tile<Kernel, In, decltype(out), false, false, Tiles...>(key);
    } else {
      return nullptr;
    }
  });
}

// `kernel`: with kernel, cluster, threads and shared_bytes, as KernelInfo.
template <typename Info, typename Params>
cudaError_t launch(const Info& kernel, const Params& params, int blocks, cudaStream_t stream) {
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
