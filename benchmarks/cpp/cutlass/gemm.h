#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// CUTLASS's products behind plain C, for benchmarks/own_gemm.py --cutlass: lhs rhs^T times the
// scales of both, sums in float32. No part of the build: docs/results.md has the command.
extern "C" {

// Pointers are to the device.
struct CutlassProduct {
  const void* lhs;         // [m, k]
  const void* rhs;         // [n, k], of the same type
  const float* lhs_scale;  // one number; null: 1
  const float* rhs_scale;
  void* out;  // [m, n], bfloat16
  void* workspace;
  cudaStream_t stream;
  int64_t workspace_bytes;
  int m;
  int n;
  int k;
  int swizzle;  // max_swizzle_size of the tile scheduler: 1, 2, 4 or 8
  int along_n;  // raster order: along n, or along m
};

const char* cutlass_version();
int cutlass_kernel_count();
// "<bf16 or fp8>_<schedule>_<rows>x<columns>_<cluster>" of the kernel with this index.
const char* cutlass_kernel_name(int kernel);
// Enqueues the product, and nothing else but the zeros that the stream-K scheduler counts from.
// Returns a cutlass::Status, 0 for success.
int cutlass_run(int kernel, const CutlassProduct* product);
}
