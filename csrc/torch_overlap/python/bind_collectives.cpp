#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

using at::Tensor;
using Tensors = std::vector<at::Tensor>;
// None on ranks that have no input or output.
using MaybeTensor = std::optional<at::Tensor>;
using MaybeTensors = std::optional<Tensors>;

// Runs an operation without the GIL. Options are built only if there are any: most calls have none.
template <typename Options, typename Operation>
WorkPtr run(std::string_view op, const py::handle& async_op, const py::handle& hints,
            const py::handle& timeout, const py::handle& options, const Operation& operation) {
  static const OpOptions kNone;
  const bool is_async = to_bool(op, "async_op", async_op);
  if (hints.is_none() && timeout.is_none() && options.is_none()) {
    return without_gil([&] { return operation(is_async, kNone); });
  }
  const OpOptions merged = to_options<Options>(op, hints, timeout, options);
  return without_gil([&] { return operation(is_async, merged); });
}

// The keyword takes precedence over the options. to_options() has checked the type of these.
template <typename Options>
int to_tag(std::string_view op, const std::optional<int64_t>& tag, const py::handle& options) {
  if (tag) return to_int(op, "tag", *tag);
  return py::isinstance<Options>(options) ? options.cast<const Options&>().tag : 0;
}

// Every operation ends with async_op, hints, timeout and options.
using H = const py::handle&;

void bind_in_place(py::class_<TorchComm, std::shared_ptr<TorchComm>>& comm) {
  comm.def("_send",
           [](TorchComm& self, const Tensor& tensor, int64_t dst, H async_op, H hints, H timeout,
              H options, const std::optional<int64_t>& tag) {
             const int message_tag = to_tag<SendOptions>("send", tag, options);
             return run<SendOptions>(
                 "send", async_op, hints, timeout, options, [&](bool is_async, const OpOptions& o) {
                   return self.send(tensor, to_int("send", "dst", dst), is_async, o, message_tag);
                 });
           })
      .def("_recv",
           [](TorchComm& self, const Tensor& tensor, int64_t src, H async_op, H hints, H timeout,
              H options, const std::optional<int64_t>& tag) {
             const int message_tag = to_tag<RecvOptions>("recv", tag, options);
             return run<RecvOptions>(
                 "recv", async_op, hints, timeout, options, [&](bool is_async, const OpOptions& o) {
                   return self.recv(tensor, to_int("recv", "src", src), is_async, o, message_tag);
                 });
           })
      .def("_broadcast",
           [](TorchComm& self, const Tensor& tensor, int64_t root, H async_op, H hints, H timeout,
              H options) {
             return run<BroadcastOptions>(
                 "broadcast", async_op, hints, timeout, options,
                 [&](bool is_async, const OpOptions& o) {
                   return self.broadcast(tensor, to_int("broadcast", "root", root), is_async, o);
                 });
           })
      .def("_all_reduce",
           [](TorchComm& self, const Tensor& tensor, H op, H async_op, H hints, H timeout,
              H options) {
             const ReduceOp& reduce_op = to_reduce_op("all_reduce", op);
             return run<AllReduceOptions>("all_reduce", async_op, hints, timeout, options,
                                          [&](bool is_async, const OpOptions& o) {
                                            return self.all_reduce(tensor, reduce_op, is_async, o);
                                          });
           })
      .def("_reduce",
           [](TorchComm& self, const Tensor& tensor, int64_t root, H op, H async_op, H hints,
              H timeout, H options) {
             const ReduceOp& reduce_op = to_reduce_op("reduce", op);
             return run<ReduceOptions>("reduce", async_op, hints, timeout, options,
                                       [&](bool is_async, const OpOptions& o) {
                                         return self.reduce(tensor, to_int("reduce", "root", root),
                                                            reduce_op, is_async, o);
                                       });
           })
      .def("_barrier", [](TorchComm& self, H async_op, H hints, H timeout, H options) {
        return run<BarrierOptions>(
            "barrier", async_op, hints, timeout, options,
            [&](bool is_async, const OpOptions& o) { return self.barrier(is_async, o); });
      });
}

void bind_gathering(py::class_<TorchComm, std::shared_ptr<TorchComm>>& comm) {
  comm.def("_all_gather",
           [](TorchComm& self, const Tensors& outputs, const Tensor& input, H async_op, H hints,
              H timeout, H options) {
             return run<AllGatherOptions>("all_gather", async_op, hints, timeout, options,
                                          [&](bool is_async, const OpOptions& o) {
                                            return self.all_gather(outputs, input, is_async, o);
                                          });
           })
      .def("_all_gather_v",
           [](TorchComm& self, const Tensors& outputs, const Tensor& input, H async_op, H hints,
              H timeout, H options) {
             return run<AllGatherOptions>("all_gather_v", async_op, hints, timeout, options,
                                          [&](bool is_async, const OpOptions& o) {
                                            return self.all_gather_v(outputs, input, is_async, o);
                                          });
           })
      .def("_all_gather_single",
           [](TorchComm& self, const Tensor& output, const Tensor& input, H async_op, H hints,
              H timeout, H options) {
             return run<AllGatherSingleOptions>("all_gather_single", async_op, hints, timeout,
                                                options, [&](bool is_async, const OpOptions& o) {
                                                  return self.all_gather_single(output, input,
                                                                                is_async, o);
                                                });
           })
      .def("_gather",
           [](TorchComm& self, const MaybeTensors& outputs, const Tensor& input, int64_t root,
              H async_op, H hints, H timeout, H options) {
             return run<GatherOptions>("gather", async_op, hints, timeout, options,
                                       [&](bool is_async, const OpOptions& o) {
                                         return self.gather(outputs.value_or(Tensors{}), input,
                                                            to_int("gather", "root", root),
                                                            is_async, o);
                                       });
           })
      .def("_gather_single", [](TorchComm& self, const MaybeTensor& output, const Tensor& input,
                                int64_t root, H async_op, H hints, H timeout, H options) {
        return run<GatherSingleOptions>("gather_single", async_op, hints, timeout, options,
                                        [&](bool is_async, const OpOptions& o) {
                                          return self.gather_single(
                                              output.value_or(Tensor{}), input,
                                              to_int("gather_single", "root", root), is_async, o);
                                        });
      });
}

void bind_scattering(py::class_<TorchComm, std::shared_ptr<TorchComm>>& comm) {
  comm.def("_reduce_scatter",
           [](TorchComm& self, const Tensor& output, const Tensors& inputs, H op, H async_op,
              H hints, H timeout, H options) {
             const ReduceOp& reduce_op = to_reduce_op("reduce_scatter", op);
             return run<ReduceScatterOptions>("reduce_scatter", async_op, hints, timeout, options,
                                              [&](bool is_async, const OpOptions& o) {
                                                return self.reduce_scatter(output, inputs,
                                                                           reduce_op, is_async, o);
                                              });
           })
      .def("_reduce_scatter_v",
           [](TorchComm& self, const Tensor& output, const Tensors& inputs, H op, H async_op,
              H hints, H timeout, H options) {
             const ReduceOp& reduce_op = to_reduce_op("reduce_scatter_v", op);
             return run<ReduceScatterOptions>("reduce_scatter_v", async_op, hints, timeout, options,
                                              [&](bool is_async, const OpOptions& o) {
                                                return self.reduce_scatter_v(
                                                    output, inputs, reduce_op, is_async, o);
                                              });
           })
      .def("_reduce_scatter_single",
           [](TorchComm& self, const Tensor& output, const Tensor& input, H op, H async_op, H hints,
              H timeout, H options) {
             const ReduceOp& reduce_op = to_reduce_op("reduce_scatter_single", op);
             return run<ReduceScatterSingleOptions>(
                 "reduce_scatter_single", async_op, hints, timeout, options,
                 [&](bool is_async, const OpOptions& o) {
                   return self.reduce_scatter_single(output, input, reduce_op, is_async, o);
                 });
           })
      .def("_scatter", [](TorchComm& self, const Tensor& output, const MaybeTensors& inputs,
                          int64_t root, H async_op, H hints, H timeout, H options) {
        return run<ScatterOptions>(
            "scatter", async_op, hints, timeout, options, [&](bool is_async, const OpOptions& o) {
              return self.scatter(output, inputs.value_or(Tensors{}),
                                  to_int("scatter", "root", root), is_async, o);
            });
      });
}

void bind_all_to_all(py::class_<TorchComm, std::shared_ptr<TorchComm>>& comm) {
  comm.def("_all_to_all",
           [](TorchComm& self, const Tensors& outputs, const Tensors& inputs, H async_op, H hints,
              H timeout, H options) {
             return run<AllToAllOptions>("all_to_all", async_op, hints, timeout, options,
                                         [&](bool is_async, const OpOptions& o) {
                                           return self.all_to_all(outputs, inputs, is_async, o);
                                         });
           })
      .def("_all_to_all_single",
           [](TorchComm& self, const Tensor& output, const Tensor& input, H async_op, H hints,
              H timeout, H options) {
             return run<AllToAllSingleOptions>("all_to_all_single", async_op, hints, timeout,
                                               options, [&](bool is_async, const OpOptions& o) {
                                                 return self.all_to_all_single(output, input,
                                                                               is_async, o);
                                               });
           })
      .def("_all_to_all_v_single",
           [](TorchComm& self, const Tensor& output, const Tensor& input,
              const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
              H async_op, H hints, H timeout, H options) {
             return run<AllToAllvSingleOptions>("all_to_all_v_single", async_op, hints, timeout,
                                                options, [&](bool is_async, const OpOptions& o) {
                                                  return self.all_to_all_v_single(
                                                      output, input, output_splits, input_splits,
                                                      is_async, o);
                                                });
           });
}

}  // namespace

void register_collectives(py::module_& module) {
  py::class_<TorchComm, std::shared_ptr<TorchComm>> comm(module.attr("TorchComm"));
  bind_in_place(comm);
  bind_gathering(comm);
  bind_scattering(comm);
  bind_all_to_all(comm);
}

}  // namespace torch_overlap::python
