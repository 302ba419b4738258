#include "torch_overlap/ops/reshard.h"

#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

// Converts from one layout to another by the cheapest plan. It is composed of other operators, so
// autograd, tracing and vmap decompose it.
Tensor reshard_kernel(const Tensor& x, std::string_view mesh, std::string_view from,
                      std::string_view to, c10::SymIntArrayRef sym_shape) {
  const auto comms = spmd::MeshComms::find(mesh);
  mesh::Shape shape;
  for (const c10::SymInt& n : sym_shape) shape.push_back(n.guard_int(__FILE__, __LINE__));
  const auto plan = comms->plan(from, to, shape, static_cast<int64_t>(x.element_size()));
  const auto extents = mesh::extents_at(plan->from, shape, comms->index());
  bool fits = x.dim() == static_cast<int64_t>(extents.size());
  for (size_t d = 0; fits && d < extents.size(); ++d) {
    fits = x.sym_size(static_cast<int64_t>(d)).guard_int(__FILE__, __LINE__) == extents[d].size;
  }
  TORCH_OVERLAP_CHECK(
      fits, kValue, "reshard: expected the local part of ", list_string(shape), " under ", from,
      ", ", list_string(mesh::local_shape(plan->from, shape, comms->rank())), ", for x, got shape ",
      x.sym_sizes(), ". Pass the layout that x has, and the shape of the whole tensor.");
  Tensor y = x;
  for (const mesh::Step& step : plan->steps) y = run_step(y, step, shape, *comms);
  return y;
}

}  // namespace

Tensor reshard(const Tensor& x, std::string_view mesh, std::string_view from, std::string_view to,
               c10::SymIntArrayRef shape) {
  static const auto handle = find_op<decltype(reshard_kernel)>("reshard");
  return handle.call(x, mesh, from, to, shape);
}

}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS(
    "reshard(Tensor x, str mesh, str from_layout, str to_layout, SymInt[] shape) -> Tensor")

TORCH_OVERLAP_COMPOSITE("reshard", torch_overlap::ops::reshard_kernel)
