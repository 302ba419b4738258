#include "torch_overlap/build_config.h"
#include "torch_overlap/python/bindings.h"

namespace torch_overlap::python {

void register_build(pybind11::module_& module) {
  namespace py = pybind11;
  py::dict build;
  build["version"] = build_config::kVersion;
  build["torch"] = build_config::kTorchVersion;
  build["cuda"] = build_config::kCudaVersion;
  build["nccl"] = build_config::kNcclVersion;
  build["cuda_architectures"] = build_config::kCudaArchitectures;
  build["compiler"] = build_config::kCompiler;
  build["build_type"] = build_config::kBuildType;
  module.attr("build_config") = build;
}

}  // namespace torch_overlap::python
