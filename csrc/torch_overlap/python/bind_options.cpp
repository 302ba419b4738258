#include <pybind11/chrono.h>

#include <tuple>

#include "torch_overlap/base/env.h"
#include "torch_overlap/comm/options.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

template <typename Options>
constexpr bool kHasTag = requires(Options options) { options.tag; };

template <typename Options>
Options make_options(const char* name, const py::object& hints, const py::object& timeout) {
  Options options;
  options.hints = to_hints(name, hints);
  options.timeout = to_timeout(name, timeout).value_or(Milliseconds{0});
  return options;
}

template <typename Options>
py::tuple state_of(const Options& options) {
  if constexpr (kHasTag<Options>) {
    return py::make_tuple(options.hints, options.timeout, options.tag);
  } else {
    return py::make_tuple(options.hints, options.timeout);
  }
}

template <typename Options>
Options from_state(const py::tuple& state) {
  Options options;
  if constexpr (kHasTag<Options>) {
    std::tie(options.hints, options.timeout, options.tag) =
        state.cast<std::tuple<Hints, Milliseconds, int>>();
  } else {
    std::tie(options.hints, options.timeout) = state.cast<std::tuple<Hints, Milliseconds>>();
  }
  return options;
}

template <typename Options>
std::string repr(const char* name, const Options& options) {
  std::string text = concat(name, "(hints=", std::string(py::repr(py::cast(options.hints))),
                            ", timeout=", std::string(py::repr(from_timeout(options.timeout))));
  if constexpr (kHasTag<Options>) text += concat(", tag=", options.tag);
  return text + ")";
}

template <typename Options>
void bind_tag(py::class_<Options>& options, const char* name) {
  options
      .def(py::init([name](const py::object& hints, const py::object& timeout, int64_t tag) {
        auto made = make_options<Options>(name, hints, timeout);
        made.tag = to_int(name, "tag", tag);
        return made;
      }))
      .def_property(
          "tag", [](const Options& self) { return self.tag; },
          [name](Options& self, int64_t tag) { self.tag = to_int(name, "tag", tag); },
          "Tag of the message, at least 0: messages between two ranks match among those of one "
          "tag. NCCL has only 0.");
}

// One class per operation: options of another operation are refused.
template <typename Options>
void bind_op_options(py::module_& module, const char* name) {
  py::class_<Options> options(
      module, name,
      "Options of one operation, passed as options=: `hints` (dict of backend-specific strings) "
      "and `timeout` (timedelta; None or zero selects the communicator's), and of a send or recv "
      "its `tag`. The keywords of the operation with these names override them.");
  if constexpr (kHasTag<Options>) {
    bind_tag(options, name);
  } else {
    options.def(py::init([name](const py::object& hints, const py::object& timeout) {
      return make_options<Options>(name, hints, timeout);
    }));
  }
  options
      .def_property(
          "hints", [](const Options& self) { return from_hints(self.hints); },
          [name](Options& self, const py::object& hints) { self.hints = to_hints(name, hints); },
          "Backend-specific strings, as a read-only view. Assign a dict to change them.")
      .def_property(
          "timeout", [](const Options& self) { return from_timeout(self.timeout); },
          [name](Options& self, const py::object& timeout) {
            self.timeout = to_timeout(name, timeout).value_or(Milliseconds{0});
          },
          "Timeout of the operation, as a timedelta. Zero selects the communicator's.")
      .def(py::pickle(&state_of<Options>, &from_state<Options>))
      .def("__repr__", [name](const Options& self) { return repr(name, self); });
}

constexpr const char* kComm = "CommOptions";

c10::intrusive_ptr<c10d::Store> to_store(const py::object& value) {
  if (value.is_none()) return {};
  TORCH_OVERLAP_CHECK(py::isinstance<c10d::Store>(value), kType, kComm,
                      ": expected a torch.distributed.Store for store, got ", describe(value));
  return value.cast<c10::intrusive_ptr<c10d::Store>>();
}

constexpr const char* kCommOptionsDoc =
    R"(Options of a communicator, for new_comm(options=...).

A field that is not set, or set to None, has its value from the environment or its default: reading
it returns the value that a communicator created now would get. Keyword arguments of new_comm
override these options.)";

}  // namespace

void register_options(py::module_& module) {
  bind_op_options<SendOptions>(module, "SendOptions");
  bind_op_options<RecvOptions>(module, "RecvOptions");
  bind_op_options<BroadcastOptions>(module, "BroadcastOptions");
  bind_op_options<AllReduceOptions>(module, "AllReduceOptions");
  bind_op_options<ReduceOptions>(module, "ReduceOptions");
  bind_op_options<AllGatherOptions>(module, "AllGatherOptions");
  bind_op_options<AllGatherSingleOptions>(module, "AllGatherSingleOptions");
  bind_op_options<ReduceScatterOptions>(module, "ReduceScatterOptions");
  bind_op_options<ReduceScatterSingleOptions>(module, "ReduceScatterSingleOptions");
  bind_op_options<AllToAllOptions>(module, "AllToAllOptions");
  bind_op_options<AllToAllSingleOptions>(module, "AllToAllSingleOptions");
  bind_op_options<AllToAllvSingleOptions>(module, "AllToAllvSingleOptions");
  bind_op_options<BarrierOptions>(module, "BarrierOptions");
  bind_op_options<ScatterOptions>(module, "ScatterOptions");
  bind_op_options<GatherOptions>(module, "GatherOptions");
  bind_op_options<GatherSingleOptions>(module, "GatherSingleOptions");
  bind_op_options<BatchP2POptions>(module, "BatchP2POptions");

  py::class_<CommOptions> options(module, "CommOptions", kCommOptionsDoc);
  options.def(py::init<>())
      .def_property(
          "abort_process_on_timeout_or_error",
          [](const CommOptions& self) {
            const auto& given = self.abort_process_on_timeout_or_error;
            if (given) return *given;
            return !self.enable_reconfigure.value_or(false) && Env::abort_on_error();
          },
          [](CommOptions& self, const py::object& value) {
            self.abort_process_on_timeout_or_error =
                to_bool_or_none(kComm, "abort_process_on_timeout_or_error", value);
          },
          "True if a timeout or an asynchronous error ends the process. Default: False with "
          "enable_reconfigure, else TORCHCOMM_ABORT_ON_ERROR, else True.")
      .def_property(
          "timeout",
          [](const CommOptions& self) {
            return from_timeout(self.timeout ? *self.timeout : Env::timeout());
          },
          [](CommOptions& self, const py::object& value) {
            self.timeout = to_timeout(kComm, value);
          },
          "Timeout of an operation, as a timedelta. Default: TORCHCOMM_TIMEOUT_SECONDS, else 600 "
          "s.")
      .def_property(
          "is_high_priority_stream",
          [](const CommOptions& self) { return self.is_high_priority_stream.value_or(false); },
          [](CommOptions& self, const py::object& value) {
            self.is_high_priority_stream = to_bool_or_none(kComm, "is_high_priority_stream", value);
          },
          "True if asynchronous operations run on a high-priority CUDA stream. Default: False.")
      .def_property(
          "enable_reconfigure",
          [](const CommOptions& self) { return self.enable_reconfigure.value_or(false); },
          [](CommOptions& self, const py::object& value) {
            self.enable_reconfigure = to_bool_or_none(kComm, "enable_reconfigure", value);
          },
          "True if reconfigure() may change the members of the communicator. Default: False.")
      .def_property(
          "name", [](const CommOptions& self) { return self.name; },
          [](CommOptions& self, const py::object& value) {
            self.name = to_string_or_none(kComm, "name", value);
          },
          "Name of the communicator, or None for a generated one.")
      .def_property(
          "store", [](const CommOptions& self) { return self.store; },
          [](CommOptions& self, const py::object& value) { self.store = to_store(value); },
          "torch.distributed.Store for the rendezvous of the ranks, or None for the environment's.")
      .def_property(
          "hints", [](const CommOptions& self) { return from_hints(self.hints); },
          [](CommOptions& self, const py::object& hints) { self.hints = to_hints(kComm, hints); },
          "Backend-specific strings, as a read-only view. Assign a dict to change them.")
      .def("__copy__", [](const CommOptions& self) { return CommOptions(self); });
}

}  // namespace torch_overlap::python
