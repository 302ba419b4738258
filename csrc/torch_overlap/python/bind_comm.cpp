#include <vector>

#include "torch_overlap/collectives/select.h"
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

// Aborts all communicators, because no thread of theirs may use Python once the interpreter ends.
// Returns the names of those that were neither finalized nor aborted before.
std::vector<std::string> abort_all() {
  run_exit_functions();
  std::vector<std::string> names;
  for (const CommPtr& comm : live_comms()) {
    if (comm->is_finalized() || comm->is_aborted()) continue;
    names.push_back(comm->name());
    try {
      comm->abort();
    } catch (const std::exception& error) {  // raised by a backend written in Python
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
  if (from.custom_collectives != CollectiveMode::automatic) {
    out.hints[std::string(kCustomCollectivesHint)] = to_string(from.custom_collectives);
  }
  return out;
}

std::string repr(const TorchComm& comm) {
  return concat("<torch_overlap.TorchComm '", comm.name(), "' ", comm.backend_name(), " rank ",
                comm.rank(), " of ", comm.size(), " on ", comm.device(),
                comm.is_finalized() ? " finalized>" : (comm.is_aborted() ? " aborted>" : ">"));
}

constexpr const char* kCommDoc =
    R"(A communicator of a group of ranks. new_comm() and split() create it, collectively.

Streams (CUDA): with async_op=False the operation runs on the current stream, and the host does not
wait. With async_op=True it runs on the communicator's own stream, after all work that is already on
the current stream; TorchWork.wait() makes the current stream wait for it. CPU: with async_op=False
the call returns when the operation is done; with async_op=True the operation runs in the
background. Every operation returns a TorchWork.

Tensors must be contiguous and on the communicator's device. Invalid arguments raise
InvalidValueError or InvalidTypeError (which are also ValueError and TypeError, and RuntimeError)
before anything is sent; the communicator stays usable. All ranks must issue collectives in the same
order. All methods are thread-safe; blocking calls release the GIL.

Autograd does not record these operations (torch_overlap.ops has operators that it records). Every
tensor that is written gets a new version, so that a backward that saved it raises. Leaves that
require a gradient are accepted, as in torch.distributed.

Every operation accepts hints= (a dict of strings), timeout= (a timedelta) and options= (an object
of its Options class). Keywords override options, which override the communicator's settings.

Used as a context manager, the communicator is finalized at the end of the block, or aborted if the
block raised.)";

}  // namespace

void register_comm(py::module_& module) {
  bind_enum<OpName>(module, "OpName", "enum.Enum", "Names of the operations in hooks and errors.",
                    kNumOpNames);

  py::class_<TorchComm, CommPtr>(module, "TorchComm", kCommDoc,
                                 py::release_gil_before_calling_cpp_dtor())
      // An object is equal to itself only. Defined explicitly because torch.compile accepts
      // constants of a class that defines __eq__.
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
      .def("__deepcopy__", &deepcopy_as_self, py::arg("memo"))
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
  module.def("_refuse_capture", [](std::string_view op, const TorchComm& comm) {
    check_not_capturing(op, comm.device());
  });
  // One call returns everything that operators need of a communicator.
  module.def("_name_and_size", [](std::string_view op, const TorchComm& comm) {
    comm.require_not_finalized(op);
    return std::pair<std::string_view, int>(comm.name(), comm.size());
  });
  module.def("_abort_all", &abort_all, py::call_guard<py::gil_scoped_release>());
  module.def("_get_comm", &get_comm, py::call_guard<py::gil_scoped_release>());
  module.def("comm_names", &comm_names, py::call_guard<py::gil_scoped_release>(),
             "Returns the names of the live communicators of this process.");
}

}  // namespace torch_overlap::python
