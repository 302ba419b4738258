#include "torch_overlap/python/arguments.h"

#include <ATen/core/grad_mode.h>

namespace torch_overlap::python {
namespace {

namespace py = pybind11;

py::object tensor_or_none(const at::Tensor& tensor) {
  return tensor.defined() ? py::cast(tensor) : py::none();
}

py::object block_list(const RankTensors& blocks, int size) { return py::cast(blocks.all(size)); }

// Returns the number of slices of dimension 0, rank by rank.
py::object split_sizes(const RankTensors& blocks, int size) {
  std::vector<int64_t> splits;
  for (const auto& part : blocks.parts) splits.push_back(part.size(0));
  if (splits.empty()) splits.assign(size, blocks.flat.size(0) / size);
  return py::cast(splits);
}

}  // namespace

Arguments arguments_of(const Call& call, int size) {
  const at::NoGradGuard no_grad;
  Arguments args;
  const auto add = [&args](const char* name, py::object value) {
    args.emplace_back(name, std::move(value));
  };
  switch (call.name) {
    case OpName::send:
    case OpName::recv:
      add("tensor", py::cast(call.p2p.at(0).tensor));
      add("peer", py::cast(call.p2p.at(0).peer));
      break;
    case OpName::broadcast:
    case OpName::all_reduce:
    case OpName::reduce:
      add("tensor", py::cast(call.tensor));
      break;
    case OpName::all_reduce_rms_norm:
      add("tensor", py::cast(call.tensor));
      add("residual", py::cast(call.norm->residual));
      add("residual_out", py::cast(call.norm->residual_out));
      add("weight", py::cast(call.norm->weight));
      add("bias", tensor_or_none(call.norm->bias));
      add("eps", py::cast(call.norm->eps));
      break;
    case OpName::all_gather:
    case OpName::all_gather_v:
    case OpName::gather:
      add("output", block_list(call.out, size));
      add("input", py::cast(call.tensor));
      break;
    case OpName::all_gather_single:
    case OpName::gather_single:
      add("output", tensor_or_none(call.out.flat));
      add("input", py::cast(call.tensor));
      break;
    case OpName::reduce_scatter:
    case OpName::reduce_scatter_v:
    case OpName::scatter:
      add("output", py::cast(call.tensor));
      add("input", block_list(call.in, size));
      break;
    case OpName::reduce_scatter_single:
      add("output", py::cast(call.tensor));
      add("input", py::cast(call.in.flat));
      break;
    case OpName::all_to_all:
      add("output", block_list(call.out, size));
      add("input", block_list(call.in, size));
      break;
    case OpName::all_to_all_single:
      add("output", py::cast(call.out.flat));
      add("input", py::cast(call.in.flat));
      break;
    case OpName::all_to_all_v_single:
      add("output", py::cast(call.out.flat));
      add("input", py::cast(call.in.flat));
      add("output_split_sizes", split_sizes(call.out, size));
      add("input_split_sizes", split_sizes(call.in, size));
      break;
    case OpName::batch_op_issue:
      add("ops", py::cast(call.p2p));
      break;
    case OpName::put:
      add("tensor", py::cast(call.tensor));
      add("peer", py::cast(call.peer));
      add("offset", py::cast(call.offset / static_cast<int64_t>(call.tensor.element_size())));
      break;
    case OpName::signal:
    case OpName::wait_signal:
      add("peer", py::cast(call.peer));
      break;
    case OpName::barrier:
    case OpName::split:
    case OpName::new_window:
    case OpName::finalize:
      break;
  }
  switch (call.primitive) {
    case Primitive::broadcast:
    case Primitive::scatter:
    case Primitive::gather:
      add("root", py::cast(call.root));
      break;
    case Primitive::reduce:
      add("root", py::cast(call.root));
      add("op", py::cast(call.reduce_op));
      break;
    case Primitive::all_reduce:
    case Primitive::reduce_scatter:
      add("op", py::cast(call.reduce_op));
      break;
    case Primitive::p2p:
    case Primitive::all_gather:
    case Primitive::all_to_all:
    case Primitive::barrier:
    case Primitive::put:
    case Primitive::signal:
    case Primitive::wait_signal:
      break;
  }
  add("async_op", py::cast(call.async_op));
  return args;
}

}  // namespace torch_overlap::python
