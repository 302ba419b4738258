#include "gemm.h"

#include <cutlass/version.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace cutlass_gemm {
namespace {

const std::vector<Entry>& kernels() {
  static const std::vector<Entry> all = [] {
    std::vector<Entry> entries = bf16_kernels();
    for (Entry& entry : fp8_kernels()) entries.push_back(std::move(entry));
    return entries;
  }();
  return all;
}

}  // namespace
}  // namespace cutlass_gemm

const char* cutlass_version() {
  static const std::string version = std::to_string(CUTLASS_MAJOR) + "." +
                                     std::to_string(CUTLASS_MINOR) + "." +
                                     std::to_string(CUTLASS_PATCH);
  return version.c_str();
}

int cutlass_kernel_count() { return static_cast<int>(cutlass_gemm::kernels().size()); }

const char* cutlass_kernel_name(int kernel) { return cutlass_gemm::kernels()[kernel].name.c_str(); }

int cutlass_run(int kernel, const CutlassProduct* product) {
  return static_cast<int>(cutlass_gemm::kernels()[kernel].run(*product));
}
