#include <pybind11/stl.h>

#include "torch_overlap/base/env.h"
#include "torch_overlap/build_config.h"
#include "torch_overlap/common/memory_overlap.h"
#include "torch_overlap/common/stream_count.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

py::dict build() {
  py::dict out;
  out["version"] = build_config::kVersion;
  out["torch"] = build_config::kTorchVersion;
  out["cuda"] = build_config::kCudaVersion;
  out["nccl"] = build_config::kNcclVersion;
  out["cuda_architectures"] = build_config::kCudaArchitectures;
  out["compiler"] = build_config::kCompiler;
  out["build_type"] = build_config::kBuildType;
  return out;
}

// Returns the launcher's variables as a dict; None if the launcher set none.
py::object read_launcher() {
  const auto launcher = Env::launcher();
  if (!launcher) return py::none();
  return py::dict(py::arg("family") = launcher->family, py::arg("rank") = launcher->rank,
                  py::arg("size") = launcher->size, py::arg("local_rank") = launcher->local_rank);
}

}  // namespace

void register_build(py::module_& module) {
  module.attr("build_config") = build();
  // Current values of the variables of base/env.h that Python needs.
  auto env = module.def_submodule("_env");
  env.def("abort_on_error", &Env::abort_on_error);
  env.def("timeout", [] { return from_timeout(Env::timeout()); });
  env.def("launcher", &read_launcher);
  env.def("master_addr", &Env::master_addr);
  env.def("master_port", &Env::master_port);
  env.def("serialization", &Env::serialization);
  env.def("tune_cache", &Env::tune_cache);
  module.def("_streams_made", [] { return num_streams_created().load(); });
  module.def("_joined_memory", &joined_memory);
}

}  // namespace torch_overlap::python
