#include <tuple>
#include <utility>

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

// The keyword takes precedence over the options. to_options() has checked the type of these.
template <typename Options>
int to_tag(std::string_view op, const std::optional<int64_t>& tag, const py::handle& options) {
  if (tag) return to_int(op, "tag", *tag);
  return py::isinstance<Options>(options) ? options.cast<const Options&>().tag : 0;
}

// Every operation ends with async_op, hints, timeout and options.
using H = const py::handle&;
using CommClass = py::class_<TorchComm, std::shared_ptr<TorchComm>>;

// Converts the arguments of a binding to those of the operation. The only integer is the root.
template <typename T>
struct CallArgument {
  using Type = T;
  static T convert(const char* /*op*/, T value) { return static_cast<T>(value); }
};
template <>
struct CallArgument<int> {
  using Type = int64_t;
  static int convert(const char* op, int64_t value) { return to_int(op, "root", value); }
};
template <>
struct CallArgument<const ReduceOp&> {
  using Type = H;
  static const ReduceOp& convert(const char* op, H value) { return to_reduce_op(op, value); }
};

// Binds "_<name>", whose arguments are those of a method that ends with async_op and options.
template <typename Options, typename... All>
void bind_method(CommClass& comm, const char* name, WorkPtr (TorchComm::*method)(All...)) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    using Types = std::tuple<All...>;
    comm.def(
        concat("_", name).c_str(),
        [name, method](TorchComm& self,
                       typename CallArgument<std::tuple_element_t<I, Types>>::Type... arguments,
                       H async_op, H hints, H timeout, H options) {
          const std::tuple<std::tuple_element_t<I, Types>...> converted{
              CallArgument<std::tuple_element_t<I, Types>>::convert(name, arguments)...};
          return run_operation<Options>(
              name, async_op, hints, timeout, options, [&](bool is_async, const OpOptions& o) {
                return (self.*method)(std::get<I>(converted)..., is_async, o);
              });
        });
  }(std::make_index_sequence<sizeof...(All) - 2>());
}

}  // namespace

void register_collectives(py::module_& module) {
  CommClass comm(module.attr("TorchComm"));
  bind_method<BroadcastOptions>(comm, "broadcast", &TorchComm::broadcast);
  bind_method<AllReduceOptions>(comm, "all_reduce", &TorchComm::all_reduce);
  bind_method<ReduceOptions>(comm, "reduce", &TorchComm::reduce);
  bind_method<BarrierOptions>(comm, "barrier", &TorchComm::barrier);
  bind_method<AllGatherOptions>(comm, "all_gather", &TorchComm::all_gather);
  bind_method<AllGatherOptions>(comm, "all_gather_v", &TorchComm::all_gather_v);
  bind_method<AllGatherSingleOptions>(comm, "all_gather_single", &TorchComm::all_gather_single);
  bind_method<ReduceScatterOptions>(comm, "reduce_scatter", &TorchComm::reduce_scatter);
  bind_method<ReduceScatterOptions>(comm, "reduce_scatter_v", &TorchComm::reduce_scatter_v);
  bind_method<ReduceScatterSingleOptions>(comm, "reduce_scatter_single",
                                          &TorchComm::reduce_scatter_single);
  bind_method<AllToAllOptions>(comm, "all_to_all", &TorchComm::all_to_all);
  bind_method<AllToAllSingleOptions>(comm, "all_to_all_single", &TorchComm::all_to_all_single);
  bind_method<AllToAllvSingleOptions>(comm, "all_to_all_v_single", &TorchComm::all_to_all_v_single);
  comm.def("_send",
           [](TorchComm& self, const Tensor& tensor, int64_t dst, H async_op, H hints, H timeout,
              H options, const std::optional<int64_t>& tag) {
             const int message_tag = to_tag<SendOptions>("send", tag, options);
             return run_operation<SendOptions>(
                 "send", async_op, hints, timeout, options, [&](bool is_async, const OpOptions& o) {
                   return self.send(tensor, to_int("send", "dst", dst), is_async, o, message_tag);
                 });
           })
      .def("_recv",
           [](TorchComm& self, const Tensor& tensor, int64_t src, H async_op, H hints, H timeout,
              H options, const std::optional<int64_t>& tag) {
             const int message_tag = to_tag<RecvOptions>("recv", tag, options);
             return run_operation<RecvOptions>(
                 "recv", async_op, hints, timeout, options, [&](bool is_async, const OpOptions& o) {
                   return self.recv(tensor, to_int("recv", "src", src), is_async, o, message_tag);
                 });
           })
      .def("_gather",
           [](TorchComm& self, const MaybeTensors& outputs, const Tensor& input, int64_t root,
              H async_op, H hints, H timeout, H options) {
             return run_operation<GatherOptions>("gather", async_op, hints, timeout, options,
                                                 [&](bool is_async, const OpOptions& o) {
                                                   return self.gather(
                                                       outputs.value_or(Tensors{}), input,
                                                       to_int("gather", "root", root), is_async, o);
                                                 });
           })
      .def("_gather_single",
           [](TorchComm& self, const MaybeTensor& output, const Tensor& input, int64_t root,
              H async_op, H hints, H timeout, H options) {
             return run_operation<GatherSingleOptions>(
                 "gather_single", async_op, hints, timeout, options,
                 [&](bool is_async, const OpOptions& o) {
                   return self.gather_single(output.value_or(Tensor{}), input,
                                             to_int("gather_single", "root", root), is_async, o);
                 });
           })
      .def("_scatter", [](TorchComm& self, const Tensor& output, const MaybeTensors& inputs,
                          int64_t root, H async_op, H hints, H timeout, H options) {
        return run_operation<ScatterOptions>(
            "scatter", async_op, hints, timeout, options, [&](bool is_async, const OpOptions& o) {
              return self.scatter(output, inputs.value_or(Tensors{}),
                                  to_int("scatter", "root", root), is_async, o);
            });
      });
}

}  // namespace torch_overlap::python
