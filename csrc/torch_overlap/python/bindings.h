#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torch_overlap {
class TorchWork;
}

// All works have one Python class, so that operations do not pay for a lookup of the dynamic type.
template <>
struct pybind11::polymorphic_type_hook<torch_overlap::TorchWork> {
  static const void* get(const torch_overlap::TorchWork* work, const std::type_info*& /*type*/) {
    return work;
  }
};

// One function per concept. module.cpp calls them in an order in which every signature finds its
// types. A method whose name begins with an underscore requires all its arguments by position:
// torch_overlap/_methods has the public method, with its signature, defaults and documentation.
namespace torch_overlap::python {

void register_errors(
    pybind11::module_& module);  // Error, its subclasses, and the translation of C++ errors
void register_build(pybind11::module_& module);  // build configuration and environment variables
void register_reduce_op(pybind11::module_& module);  // RedOpType, ReduceOp
// CommOptions and one options class per operation.
void register_options(pybind11::module_& module);
void register_work(pybind11::module_& module);         // WorkStatus, TorchWork
void register_comm(pybind11::module_& module);         // OpName, TorchComm, _new_comm, _abort_all
void register_collectives(pybind11::module_& module);  // the operations of TorchComm
void register_batch(pybind11::module_& module);        // P2POpType, P2POp, BatchSendRecv
void register_window(pybind11::module_& module);       // TorchCommWindow, TorchComm.new_window
void register_hooks(pybind11::module_& module);        // RemovableHandle, TorchComm.register_*_hook
void register_reconfigure(pybind11::module_& module);  // TorchComm.reconfigure, set_timeout, ...
void register_recorder(pybind11::module_& module);     // flight recorder, log of calls, health
void register_backends(pybind11::module_& module);     // built_backends, backends written in Python
void register_gloo(pybind11::module_& module);         // factory of torch's gloo
void register_c10d(pybind11::module_& module);         // the torch.distributed backend
void register_gemm(pybind11::module_& module);         // ScalingMode, GemmArgs, the GEMM functions
void register_mesh(pybind11::module_& module);         // the planner: _C._mesh
void register_spmd(pybind11::module_& module);         // MeshComms: a connected mesh
void register_overlap_config(pybind11::module_& module);  // CommOverlapConfig and its enums
void register_overlap(pybind11::module_& module);         // CommOverlap classes and their registry

// Installs Python's part of abort_process() (comm/process_abort.h).
void install_stack_writer();

}  // namespace torch_overlap::python
