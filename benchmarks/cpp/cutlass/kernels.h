#pragma once

#include <cutlass/cutlass.h>

#include <string>
#include <vector>

#include "gemm.h"

namespace cutlass_gemm {

struct Entry {
  std::string name;
  cutlass::Status (*run)(const CutlassProduct&);
};

std::vector<Entry> bf16_kernels();
std::vector<Entry> fp8_kernels();

}  // namespace cutlass_gemm
