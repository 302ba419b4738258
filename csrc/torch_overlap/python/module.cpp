// torch_overlap._C: the Python bindings of libtorch_overlap.so, which torch_overlap/__init__.py
// loads first.

#include "torch_overlap/python/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace torch_overlap::python;
  // Registers the types of Store, Backend and Tensor that the signatures use.
  pybind11::module_::import("torch.distributed");
  register_errors(module);
  register_build(module);
  register_reduce_op(module);
  register_options(module);
  register_work(module);
  register_comm(module);
  register_collectives(module);
  register_batch(module);
  register_window(module);
  register_hooks(module);
  register_reconfigure(module);
  register_recorder(module);
  register_backends(module);
  register_gloo(module);
  register_c10d(module);
  register_gemm(module);
  register_mesh(module);
  register_spmd(module);
  register_overlap_config(module);
  register_overlap(module);
  install_stack_writer();
}
