#include "torch_overlap/gemm/sm90/tensor_maps.h"

#include <cuda_runtime_api.h>

#include <bit>
#include <vector>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::sm90 {
namespace {

CUtensorMapDataType tensor_map_type(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (dtype == at::kHalf) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return dtype == at::kInt ? CU_TENSOR_MAP_DATA_TYPE_INT32 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

CUtensorMapSwizzle swizzle_of(int box_bytes) {
  if (box_bytes > 128) return CU_TENSOR_MAP_SWIZZLE_NONE;
  return box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
}

decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto function = [] {
    constexpr unsigned int kSince = 12000;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                                kSince, cudaEnableDefault, &result);
    if (status != cudaSuccess) (void)cudaGetLastError();
    TORCH_OVERLAP_CHECK(status == cudaSuccess && result == cudaDriverEntryPointSuccess,
                        kUnsupported,
                        "gemm: expected a CUDA driver with cuTensorMapEncodeTiled, got one without "
                        "it; update the driver");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

// Everything that an encoding depends on: it is valid for any memory at that address. Addresses of
// all devices differ.
struct TensorMapKey {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
  at::ScalarType dtype = at::kByte;
  int box_rows = 0;  // 0 only in the key of an empty entry
  int box_bytes = 0;
  int l2_bytes = 0;

  bool operator==(const TensorMapKey&) const = default;
};

struct TensorMapEntry {
  TensorMapKey key;
  CUtensorMap map{};
};

constexpr size_t kNumCacheEntries = 1024;

size_t slot_of(const TensorMapKey& key) {
  const uint64_t words[] = {
      reinterpret_cast<uintptr_t>(key.data), static_cast<uint64_t>(key.rows),
      static_cast<uint64_t>(key.columns),    static_cast<uint64_t>(key.stride),
      static_cast<uint64_t>(key.dtype),      static_cast<uint64_t>(key.box_rows),
      static_cast<uint64_t>(key.box_bytes),  static_cast<uint64_t>(key.l2_bytes)};
  uint64_t hash = 0;
  for (const uint64_t word : words) hash = std::rotl((hash ^ word) * 0x9E3779B97F4A7C15U, 29);
  return (hash ^ (hash >> 32U)) % kNumCacheEntries;
}

CUtensorMap encode_tensor_map(const TensorMapKey& key) {
  const auto& [data, rows, columns, stride, dtype, box_rows, box_bytes, l2_bytes] = key;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const size_t element = c10::elementSize(dtype);
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * element};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(static_cast<size_t>(box_bytes) / element),
                            static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  const CUresult status = tensor_map_encoder()(
      &map, tensor_map_type(dtype), 2, const_cast<void*>(data), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(box_bytes),
      l2_bytes == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TORCH_OVERLAP_CHECK(status == CUDA_SUCCESS, kRuntime,
                      "gemm: expected a matrix that tensor copies take, got ", rows, " x ", columns,
                      " of ", dtype, " with rows ", stride, " elements apart (CUDA error ",
                      static_cast<int>(status), ")");
  return map;
}

}  // namespace

CUtensorMap make_tensor_map(const void* data, at::ScalarType dtype, int64_t rows, int64_t columns,
                            int64_t stride, int box_rows, int box_bytes, int l2_bytes) {
  // Direct-mapped by hash: nothing is shared with other threads, and the cache does not grow.
  thread_local std::vector<TensorMapEntry> entries(kNumCacheEntries);
  const TensorMapKey key{data, rows, columns, stride, dtype, box_rows, box_bytes, l2_bytes};
  TensorMapEntry& entry = entries[slot_of(key)];
  if (entry.key != key) entry = {key, encode_tensor_map(key)};
  return entry.map;
}

CUtensorMap make_tensor_map(const at::Tensor& matrix, int box_rows, int box_bytes) {
  return make_tensor_map(matrix.const_data_ptr(), matrix.scalar_type(), matrix.size(0),
                         matrix.size(1), matrix.stride(0), box_rows, box_bytes);
}

bool supports_tma_load(const void* data, at::ScalarType dtype, int64_t stride) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  return reinterpret_cast<uintptr_t>(data) % kTmaAlignmentBytes == 0 &&
         stride * element % kTmaAlignmentBytes == 0;
}

bool supports_tma_load(const at::Tensor& matrix) {
  return (matrix.size(1) == 1 || matrix.stride(1) == 1) && matrix.stride(0) >= matrix.size(1) &&
         supports_tma_load(matrix.const_data_ptr(), matrix.scalar_type(), matrix.stride(0));
}

bool supports_tma_store(const void* data, at::ScalarType dtype, int64_t columns, int64_t stride) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  return supports_tma_load(data, dtype, stride) && columns * element % kTmaAlignmentBytes == 0;
}

bool supports_tma_store(const at::Tensor& matrix) {
  return supports_tma_load(matrix) &&
         supports_tma_store(matrix.const_data_ptr(), matrix.scalar_type(), matrix.size(1),
                            matrix.stride(0));
}

}  // namespace torch_overlap::sm90
