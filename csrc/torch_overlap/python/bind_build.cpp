#include "torch_overlap/base/env.h"
#include "torch_overlap/build_config.h"
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

// What the variables of base/env.h say now.
py::dict read_env() {
  const Env env = Env::read();
  py::dict out;
  out["abort_on_error"] = env.abort_on_error;
  out["timeout"] = from_timeout(env.timeout);
  out["rank"] = env.rank;
  out["size"] = env.size;
  out["local_rank"] = env.local_rank;
  out["launcher"] = env.launcher;
  out["master_addr"] = env.master_addr;
  out["master_port"] = env.master_port;
  out["serialization"] = env.serialization;
  out["tune_cache"] = Env::tune_cache();
  return out;
}

}  // namespace

void register_build(py::module_& module) {
  module.attr("build_config") = build();
  module.def("_read_env", &read_env);
  module.def("_streams_made", [] { return streams_made().load(); });
}

}  // namespace torch_overlap::python
