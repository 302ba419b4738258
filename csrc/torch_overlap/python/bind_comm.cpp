#include <pybind11/native_enum.h>

#include <vector>

#include "torch_overlap/comm/direct.h"
#include "torch_overlap/comm/registry.h"
#include "torch_overlap/comm/shutdown.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

using CommPtr = std::shared_ptr<TorchComm>;

CommPtr new_comm(const std::string& backend, c10::Device device,
                 const std::optional<std::string>& name, const CommOptions& options,
                 std::optional<int> rank, std::optional<int> size) {
  TORCH_OVERLAP_CHECK(rank.has_value() == size.has_value(), kValue,
                      "new_comm: expected rank and size together, got only one of them");
  std::optional<RankAndSize> who;
  if (rank) who = RankAndSize{*rank, *size};
  return without_gil([&] { return TorchComm::create(backend, device, name, options, who); });
}

// No thread of a communicator may use Python once the interpreter ends. Returns the names of those
// that were left.
std::vector<std::string> abort_all() {
  std::vector<std::string> names;
  for (const CommPtr& comm : live_comms()) {
    if (comm->is_finalized() || comm->is_aborted()) continue;
    names.push_back(comm->name());
    try {
      comm->abort();
    } catch (const std::exception& error) {  // of a backend written in Python
      TORCH_WARN("communicator '", comm->name(), "': abort failed: ", error.what());
    }
  }
  begin_process_exit();
  return names;
}

std::vector<int> to_ranks(std::string_view op, const py::handle& ranks) {
  try {
    return ranks.cast<std::vector<int>>();
  } catch (const py::cast_error&) {
    fail(ErrorKind::kType, op, ": expected a list of ints for ranks, got ", describe(ranks));
  }
}

CommOptions options_of(const TorchComm& comm) {
  const ResolvedOptions from = comm.options();
  CommOptions out;
  out.abort_process_on_timeout_or_error = from.abort_process_on_timeout_or_error;
  out.timeout = from.timeout;
  out.is_high_priority_stream = from.is_high_priority_stream;
  out.enable_reconfigure = from.enable_reconfigure;
  out.name = comm.name();
  out.hints = from.hints;
  if (from.check_mismatch) out.hints["check_mismatch"] = "true";
  if (from.direct != DirectMode::automatic) {
    out.hints[std::string(kDirectHint)] = to_string(from.direct);
  }
  return out;
}

std::string repr(const TorchComm& comm) {
  return concat("<torch_overlap.TorchComm '", comm.name(), "' ", comm.backend_name(), " rank ",
                comm.rank(), " of ", comm.size(), " on ", comm.device(),
                comm.is_finalized() ? " finalized>" : (comm.is_aborted() ? " aborted>" : ">"));
}

constexpr const char* kCommDoc =
    R"(One rank's end of a group that communicates. new_comm() and split() make it, collectively.

Streams (CUDA). async_op=False: the operation runs on the current stream; the host does not wait. async_op=True: it
runs on the communicator's own stream, after everything that is on the current stream now, and TorchWork.wait()
orders the current stream after it. CPU: async_op=False returns when the operation is done; async_op=True runs it in
the background. Either way a TorchWork comes back.

Tensors are contiguous and on the communicator's device. Mistakes raise InvalidValueError or InvalidTypeError (also
ValueError, TypeError and RuntimeError) before anything is sent, and leave the communicator usable. All ranks issue
collectives in the same order. Any thread may call; blocking calls release the GIL.

Autograd records nothing (torch_overlap.ops has operators that it does record). A tensor that is written gets another
version, so that a backward which saved it raises. A leaf that requires a gradient is taken, as in torch.distributed.

Every operation takes hints= (dict of strings), timeout= (timedelta) and options= (its Options class), in ascending
order of precedence: communicator, options, keyword.

As a context manager it finalizes at the end, or aborts when the block raised.)";

}  // namespace

void register_comm(py::module_& module) {
  py::native_enum<OpName> names(module, "OpName", "enum.Enum",
                                "The operations, as hooks and errors name them.");
  for (size_t i = 0; i < kOpNames; ++i) {
    const auto name = static_cast<OpName>(i);
    names.value(std::string(to_string(name)).c_str(), name);
  }
  names.finalize();

  py::class_<TorchComm, CommPtr>(module, "TorchComm", kCommDoc,
                                 py::release_gil_before_calling_cpp_dtor())
      // Equal to itself only. Said here because torch.compile takes constants of a class that says
      // so.
      .def(
          "__eq__", [](const py::handle& self, const py::handle& other) { return self.is(other); },
          py::is_operator())
      .def("__hash__", [](const py::handle& self) { return std::hash<void*>()(self.ptr()); })
      .def("_get_rank", &TorchComm::rank)
      .def("_get_size", &TorchComm::size)
      .def("_get_name", &TorchComm::name)
      .def("_get_device", &TorchComm::device)
      .def("_get_backend", &TorchComm::backend_name)
      .def("_get_backend_version", &TorchComm::backend_version)
      .def("_get_options", &options_of)
      .def("_get_ranks_in_world", &TorchComm::ranks_in_world)
      .def("_get_native_handle", &TorchComm::native_handle)
      .def("_split",
           [](TorchComm& self, const py::handle& ranks, const py::handle& name,
              const py::handle& hints, const py::handle& timeout) {
             const auto read = [&]() -> TorchComm::SplitArguments {
               const py::gil_scoped_acquire gil;
               return {to_ranks("split", ranks),
                       to_string_or_none("split", "name", name),
                       {to_hints("split", hints),
                        to_timeout("split", timeout).value_or(Milliseconds{0})}};
             };
             return without_gil([&] { return self.split(read); });
           })
      .def("_finalize", &TorchComm::finalize, py::call_guard<py::gil_scoped_release>())
      .def("_abort", &TorchComm::abort, py::call_guard<py::gil_scoped_release>())
      .def("_is_aborted", &TorchComm::is_aborted)
      .def("_is_finalized", &TorchComm::is_finalized)
      .def("__copy__", [](const py::object& self) { return self; })
      .def("__deepcopy__", &deep_copy_is_itself, py::arg("memo"))
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__",
           [](TorchComm& self, const py::object& type, const py::object&, const py::object&) {
             const bool raised = !type.is_none();
             const py::gil_scoped_release no_gil;
             if (self.is_finalized() || self.is_aborted()) return;
             raised ? self.abort() : self.finalize();
           })
      .def("__repr__", &repr);

  module.def("_new_comm", &new_comm, py::arg("backend"), py::arg("device"), py::arg("name"),
             py::arg("options"), py::arg("rank"), py::arg("size"));
  module.def("_refuse_capture",
             [](std::string_view op, const TorchComm& comm) { refuse_capture(op, comm.device()); });
  // One call for what operators take of a communicator.
  module.def("_name_and_size", [](std::string_view op, const TorchComm& comm) {
    comm.require_not_finalized(op);
    return std::pair<std::string_view, int>(comm.name(), comm.size());
  });
  module.def("_abort_all", &abort_all, py::call_guard<py::gil_scoped_release>());
  module.def("_get_comm", &get_comm, py::call_guard<py::gil_scoped_release>());
  module.def("comm_names", &comm_names, py::call_guard<py::gil_scoped_release>(),
             "The names of the live communicators of this process.");
}

}  // namespace torch_overlap::python
