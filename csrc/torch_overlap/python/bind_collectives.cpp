#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

using at::Tensor;
using Tensors = std::vector<at::Tensor>;
// None on the ranks that give or get nothing.
using MaybeTensor = std::optional<at::Tensor>;
using MaybeTensors = std::optional<Tensors>;

// Runs an operation without the GIL, with its options if there are any: most calls have none.
template <typename Options, typename Operation>
WorkPtr run(std::string_view op, const py::handle& hints, const py::handle& timeout,
            const py::handle& options, const Operation& operation) {
  static const OpOptions kNone;
  if (hints.is_none() && timeout.is_none() && options.is_none()) {
    const py::gil_scoped_release no_gil;
    return operation(kNone);
  }
  const OpOptions merged = to_options<Options>(op, hints, timeout, options);
  return without_gil([&] { return operation(merged); });
}

using H = const py::handle&;

// The arguments that every operation ends with.
#define TORCH_OVERLAP_TAIL                                                             \
  py::arg("async_op"), py::arg("hints") = py::none(), py::arg("timeout") = py::none(), \
                       py::arg("options") = py::none()

void bind_in_place(py::class_<TorchComm, std::shared_ptr<TorchComm>>& comm) {
  comm.def(
          "send",
          [](TorchComm& self, const Tensor& tensor, int dst, bool async_op, H hints, H timeout,
             H options) {
            return run<SendOptions>("send", hints, timeout, options, [&](const OpOptions& o) {
              return self.send(tensor, dst, async_op, o);
            });
          },
          py::arg("tensor"), py::arg("dst"), TORCH_OVERLAP_TAIL,
          "Sends `tensor` to rank `dst`, whose recv has the same number of bytes. Any dtype.")
      .def(
          "recv",
          [](TorchComm& self, const Tensor& tensor, int src, bool async_op, H hints, H timeout,
             H options) {
            return run<RecvOptions>("recv", hints, timeout, options, [&](const OpOptions& o) {
              return self.recv(tensor, src, async_op, o);
            });
          },
          py::arg("tensor"), py::arg("src"), TORCH_OVERLAP_TAIL,
          "Receives into `tensor` what rank `src` sends. Sends and receives between two ranks "
          "match in order.")
      .def(
          "broadcast",
          [](TorchComm& self, const Tensor& tensor, int root, bool async_op, H hints, H timeout,
             H options) {
            return run<BroadcastOptions>(
                "broadcast", hints, timeout, options,
                [&](const OpOptions& o) { return self.broadcast(tensor, root, async_op, o); });
          },
          py::arg("tensor"), py::arg("root"), TORCH_OVERLAP_TAIL,
          "Every rank's `tensor` becomes that of `root`. In place; any dtype.")
      .def(
          "all_reduce",
          [](TorchComm& self, const Tensor& tensor, H op, bool async_op, H hints, H timeout,
             H options) {
            const ReduceOp& reduce_op = to_reduce_op("all_reduce", op);
            return run<AllReduceOptions>("all_reduce", hints, timeout, options,
                                         [&](const OpOptions& o) {
                                           return self.all_reduce(tensor, reduce_op, async_op, o);
                                         });
          },
          py::arg("tensor"), py::arg("op"), TORCH_OVERLAP_TAIL,
          "Every rank's `tensor` becomes the reduction of all. In place. A sparse COO tensor (SUM) "
          "becomes the "
          "coalesced sum.")
      .def(
          "reduce",
          [](TorchComm& self, const Tensor& tensor, int root, H op, bool async_op, H hints,
             H timeout, H options) {
            const ReduceOp& reduce_op = to_reduce_op("reduce", op);
            return run<ReduceOptions>("reduce", hints, timeout, options, [&](const OpOptions& o) {
              return self.reduce(tensor, root, reduce_op, async_op, o);
            });
          },
          py::arg("tensor"), py::arg("root"), py::arg("op"), TORCH_OVERLAP_TAIL,
          "The `tensor` of `root` becomes the reduction of all. In place there; the other ranks' "
          "stay as they are.")
      .def(
          "barrier",
          [](TorchComm& self, bool async_op, H hints, H timeout, H options) {
            return run<BarrierOptions>("barrier", hints, timeout, options, [&](const OpOptions& o) {
              return self.barrier(async_op, o);
            });
          },
          TORCH_OVERLAP_TAIL,
          "CPU: no rank gets past it before all have come. CUDA: the same on the stream; the host "
          "does not wait.");
}

void bind_gathering(py::class_<TorchComm, std::shared_ptr<TorchComm>>& comm) {
  comm.def(
          "all_gather",
          [](TorchComm& self, const Tensors& outputs, const Tensor& input, bool async_op, H hints,
             H timeout, H options) {
            return run<AllGatherOptions>(
                "all_gather", hints, timeout, options,
                [&](const OpOptions& o) { return self.all_gather(outputs, input, async_op, o); });
          },
          py::arg("tensor_list"), py::arg("tensor"), TORCH_OVERLAP_TAIL,
          "tensor_list[r] becomes the `tensor` of rank r, of the same number of elements on every "
          "rank. Fastest when "
          "the list's tensors lie one behind the other in memory.")
      .def(
          "all_gather_v",
          [](TorchComm& self, const Tensors& outputs, const Tensor& input, bool async_op, H hints,
             H timeout, H options) {
            return run<AllGatherOptions>(
                "all_gather_v", hints, timeout, options,
                [&](const OpOptions& o) { return self.all_gather_v(outputs, input, async_op, o); });
          },
          py::arg("tensor_list"), py::arg("tensor"), TORCH_OVERLAP_TAIL,
          "all_gather with sizes that differ by rank: tensor_list[r] has rank r's size, on every "
          "rank.")
      .def(
          "all_gather_single",
          [](TorchComm& self, const Tensor& output, const Tensor& input, bool async_op, H hints,
             H timeout, H options) {
            return run<AllGatherSingleOptions>(
                "all_gather_single", hints, timeout, options, [&](const OpOptions& o) {
                  return self.all_gather_single(output, input, async_op, o);
                });
          },
          py::arg("output"), py::arg("input"), TORCH_OVERLAP_TAIL,
          "The r-th of get_size() equal pieces of `output` becomes the `input` of rank r.")
      .def(
          "gather",
          [](TorchComm& self, const MaybeTensors& outputs, const Tensor& input, int root,
             bool async_op, H hints, H timeout, H options) {
            return run<GatherOptions>("gather", hints, timeout, options, [&](const OpOptions& o) {
              return self.gather(outputs.value_or(Tensors{}), input, root, async_op, o);
            });
          },
          py::arg("output_tensor_list"), py::arg("input_tensor"), py::arg("root"),
          TORCH_OVERLAP_TAIL,
          "output_tensor_list[r] of rank `root` becomes the `input_tensor` of rank r. Elsewhere "
          "the list is not looked "
          "at: [] or None.")
      .def(
          "gather_single",
          [](TorchComm& self, const MaybeTensor& output, const Tensor& input, int root,
             bool async_op, H hints, H timeout, H options) {
            return run<GatherSingleOptions>(
                "gather_single", hints, timeout, options, [&](const OpOptions& o) {
                  return self.gather_single(output.value_or(Tensor{}), input, root, async_op, o);
                });
          },
          py::arg("output"), py::arg("input"), py::arg("root"), TORCH_OVERLAP_TAIL,
          "The r-th piece of the `output` of rank `root` becomes the `input` of rank r. Elsewhere "
          "`output` may be "
          "None.");
}

void bind_scattering(py::class_<TorchComm, std::shared_ptr<TorchComm>>& comm) {
  comm.def(
          "reduce_scatter",
          [](TorchComm& self, const Tensor& output, const Tensors& inputs, H op, bool async_op,
             H hints, H timeout, H options) {
            const ReduceOp& reduce_op = to_reduce_op("reduce_scatter", op);
            return run<ReduceScatterOptions>(
                "reduce_scatter", hints, timeout, options, [&](const OpOptions& o) {
                  return self.reduce_scatter(output, inputs, reduce_op, async_op, o);
                });
          },
          py::arg("output"), py::arg("input_list"), py::arg("op"), TORCH_OVERLAP_TAIL,
          "The `output` of rank r becomes the reduction of all ranks' input_list[r].")
      .def(
          "reduce_scatter_v",
          [](TorchComm& self, const Tensor& output, const Tensors& inputs, H op, bool async_op,
             H hints, H timeout, H options) {
            const ReduceOp& reduce_op = to_reduce_op("reduce_scatter_v", op);
            return run<ReduceScatterOptions>(
                "reduce_scatter_v", hints, timeout, options, [&](const OpOptions& o) {
                  return self.reduce_scatter_v(output, inputs, reduce_op, async_op, o);
                });
          },
          py::arg("output"), py::arg("input_list"), py::arg("op"), TORCH_OVERLAP_TAIL,
          "reduce_scatter with sizes that differ by rank: input_list[r] has the size of rank r's "
          "`output`, on every "
          "rank.")
      .def(
          "reduce_scatter_single",
          [](TorchComm& self, const Tensor& output, const Tensor& input, H op, bool async_op,
             H hints, H timeout, H options) {
            const ReduceOp& reduce_op = to_reduce_op("reduce_scatter_single", op);
            return run<ReduceScatterSingleOptions>(
                "reduce_scatter_single", hints, timeout, options, [&](const OpOptions& o) {
                  return self.reduce_scatter_single(output, input, reduce_op, async_op, o);
                });
          },
          py::arg("output"), py::arg("input"), py::arg("op"), TORCH_OVERLAP_TAIL,
          "The `output` of rank r becomes the reduction of the r-th pieces of all ranks' `input`.")
      .def(
          "scatter",
          [](TorchComm& self, const Tensor& output, const MaybeTensors& inputs, int root,
             bool async_op, H hints, H timeout, H options) {
            return run<ScatterOptions>("scatter", hints, timeout, options, [&](const OpOptions& o) {
              return self.scatter(output, inputs.value_or(Tensors{}), root, async_op, o);
            });
          },
          py::arg("output_tensor"), py::arg("input_tensor_list"), py::arg("root"),
          TORCH_OVERLAP_TAIL,
          "The `output_tensor` of rank r becomes input_tensor_list[r] of rank `root`. Elsewhere "
          "the list is not looked "
          "at: [] or None.");
}

void bind_all_to_all(py::class_<TorchComm, std::shared_ptr<TorchComm>>& comm) {
  comm.def(
          "all_to_all",
          [](TorchComm& self, const Tensors& outputs, const Tensors& inputs, bool async_op, H hints,
             H timeout, H options) {
            return run<AllToAllOptions>(
                "all_to_all", hints, timeout, options,
                [&](const OpOptions& o) { return self.all_to_all(outputs, inputs, async_op, o); });
          },
          py::arg("output_tensor_list"), py::arg("input_tensor_list"), TORCH_OVERLAP_TAIL,
          "output_tensor_list[r] becomes rank r's input_tensor_list of this rank. Sizes may differ "
          "by pair.")
      .def(
          "all_to_all_single",
          [](TorchComm& self, const Tensor& output, const Tensor& input, bool async_op, H hints,
             H timeout, H options) {
            return run<AllToAllSingleOptions>(
                "all_to_all_single", hints, timeout, options, [&](const OpOptions& o) {
                  return self.all_to_all_single(output, input, async_op, o);
                });
          },
          py::arg("output"), py::arg("input"), TORCH_OVERLAP_TAIL,
          "The r-th piece of `output` becomes the piece of rank r's `input` that has this rank's "
          "number.")
      .def(
          "all_to_all_v_single",
          [](TorchComm& self, const Tensor& output, const Tensor& input,
             const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
             bool async_op, H hints, H timeout, H options) {
            return run<AllToAllvSingleOptions>(
                "all_to_all_v_single", hints, timeout, options, [&](const OpOptions& o) {
                  return self.all_to_all_v_single(output, input, output_splits, input_splits,
                                                  async_op, o);
                });
          },
          py::arg("output"), py::arg("input"), py::arg("output_split_sizes"),
          py::arg("input_split_sizes"), TORCH_OVERLAP_TAIL,
          "all_to_all_single with pieces that differ: input_split_sizes[r] slices of dimension 0 "
          "go to rank r, "
          "output_split_sizes[r] come from it. [] means equal pieces.");
}

#undef TORCH_OVERLAP_TAIL

}  // namespace

void register_collectives(py::module_& module) {
  py::class_<TorchComm, std::shared_ptr<TorchComm>> comm(module.attr("TorchComm"));
  bind_in_place(comm);
  bind_gathering(comm);
  bind_scattering(comm);
  bind_all_to_all(comm);
}

}  // namespace torch_overlap::python
