#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/c10d/backend_wrapper.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

namespace py = pybind11;
using WrapperPtr = c10::intrusive_ptr<BackendWrapper>;
using OptionsPtr = c10::intrusive_ptr<BackendOptions>;

// The group's rank and size come from c10d, not from the environment.
WrapperPtr make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                      const std::string& group_name, std::chrono::milliseconds timeout,
                      const std::optional<OptionsPtr>& options) {
  auto mine = options ? c10::make_intrusive<BackendOptions>(**options)
                      : c10::make_intrusive<BackendOptions>();
  mine->group_name = group_name;
  mine->timeout = timeout;
  return c10::make_intrusive<BackendWrapper>(store, rank, size, std::move(mine));
}

constexpr const char* kOptions = "BackendOptions";
constexpr const char* kPriority = "is_high_priority_stream";
constexpr const char* kAbort = "abort_process_on_timeout_or_error";

OptionsPtr make_options(const py::object& backends, const py::object& hints,
                        const py::object& is_high_priority_stream,
                        const py::object& abort_process_on_timeout_or_error,
                        const py::object& timeout, const py::object& cuda_hints) {
  auto options = c10::make_intrusive<BackendOptions>(
      to_timeout(kOptions, timeout).value_or(kBackendDefaultTimeout));
  if (!backends.is_none()) options->backends = to_hints(kOptions, backends, "backends");
  options->comm.hints = to_hints(kOptions, hints);
  options->cuda_hints = to_hints(kOptions, cuda_hints, "cuda_hints");
  options->comm.is_high_priority_stream =
      to_bool_or_none(kOptions, kPriority, is_high_priority_stream);
  options->comm.abort_process_on_timeout_or_error =
      to_bool_or_none(kOptions, kAbort, abort_process_on_timeout_or_error);
  return options;
}

BackendWrapper::CommPtr comm_of(BackendWrapper& self, std::optional<c10::Device> device) {
  if (device) return self.comm_for(*device);
  auto comms = self.comms();
  TORCH_OVERLAP_CHECK(comms.size() == 1, kValue,
                      "get_comm: expected a device, because this group has ", comms.size(),
                      " communicators, got none; pass the device of your tensors");
  return comms.front();
}

bool supports_window(const BackendWrapper& self) {
  const auto comms = self.comms();
  return std::any_of(comms.begin(), comms.end(), [](const BackendWrapper::CommPtr& comm) {
    return comm->membership()->backend->has_windows();
  });
}

constexpr const char* kOptionsDoc =
    R"(pg_options of init_process_group and new_group for the backend "torch_overlap".

Args:
    backends: dict of the communicator backend by device type. Default:
        {"cpu": "gloo", "cuda": "nccl"}. Device types without an entry are refused; without "cpu"
        the group creates no CPU communicator.
    hints, is_high_priority_stream, abort_process_on_timeout_or_error: as in torch_overlap.new_comm.
    timeout: timedelta that DeviceMesh passes to the groups that it creates. init_process_group and
        new_group have a timeout of their own, which overrides this one.
    cuda_hints: as hints, of CUDA communicators only; they override hints.

Raises:
    InvalidTypeError: an argument does not have the documented type.
    InvalidValueError: timeout is negative.)";

constexpr const char* kWrapperDoc =
    R"(The torch.distributed backend "torch_overlap": this rank's part of one process group.

The constructor wraps an existing communicator; ProcessGroup._register_backend registers the
wrapper. shutdown() finalizes the communicator unless it is finalized already.)";

}  // namespace

void register_c10d(py::module_& module) {
  py::class_<BackendOptions, c10d::Backend::Options, OptionsPtr>(module, "BackendOptions",
                                                                 kOptionsDoc)
      .def(py::init(&make_options))
      .def_property(
          "backends", [](const BackendOptions& self) { return self.backends; },
          [](BackendOptions& self, const py::object& backends) {
            self.backends = to_hints(kOptions, backends, "backends");
          },
          "Communicator backend by device type, as a copy. Assign a dict to change it.")
      .def_property(
          "hints", [](const BackendOptions& self) { return self.comm.hints; },
          [](BackendOptions& self, const py::object& hints) {
            self.comm.hints = to_hints(kOptions, hints);
          },
          "Backend-specific strings, as a copy. Assign a dict to change them.")
      .def_property(
          "cuda_hints", [](const BackendOptions& self) { return self.cuda_hints; },
          [](BackendOptions& self, const py::object& hints) {
            self.cuda_hints = to_hints(kOptions, hints, "cuda_hints");
          },
          "Backend-specific strings of CUDA communicators only, which override `hints`, as a copy. "
          "Assign a dict to change them.")
      .def_property(
          "is_high_priority_stream",
          [](const BackendOptions& self) { return self.comm.is_high_priority_stream; },
          [](BackendOptions& self, const py::object& value) {
            self.comm.is_high_priority_stream = to_bool_or_none(kOptions, kPriority, value);
          },
          "True if asynchronous operations run on a high-priority CUDA stream. None selects the "
          "default of new_comm.")
      .def_property(
          "abort_process_on_timeout_or_error",
          [](const BackendOptions& self) { return self.comm.abort_process_on_timeout_or_error; },
          [](BackendOptions& self, const py::object& value) {
            self.comm.abort_process_on_timeout_or_error = to_bool_or_none(kOptions, kAbort, value);
          },
          "True if a timeout or an asynchronous error ends the process. None selects the default "
          "of new_comm.")
      // split_group copies its parent's options.
      .def("__copy__",
           [](const BackendOptions& self) { return c10::make_intrusive<BackendOptions>(self); })
      .def(
          "__deepcopy__",
          [](const BackendOptions& self, const py::dict& /*memo*/) {
            return c10::make_intrusive<BackendOptions>(self);
          },
          py::arg("memo"));

  py::class_<BackendWrapper, c10d::Backend, WrapperPtr>(module, "_BackendWrapper", kWrapperDoc,
                                                        py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](BackendWrapper::CommPtr comm) {
             return c10::make_intrusive<BackendWrapper>(std::move(comm));
           }),
           // The GIL is kept: a call guard would also cover pybind11's handling of the new object.
           py::arg().none(false))
      .def_static("_make_group", &make_group, py::call_guard<py::gil_scoped_release>(),
                  py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("group_name"),
                  py::arg("timeout"), py::arg("options") = py::none())
      .def("_get_comm", &comm_of, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &BackendWrapper::getBackendOptions)
      .def_property_readonly("supports_window", &supports_window,
                             "True if a communicator of the group has windows.")
      .def_property_readonly("_store", &BackendWrapper::store)
      .def("split", &BackendWrapper::split, py::call_guard<py::gil_scoped_release>(),
           py::arg("store"), py::arg("ranks"), py::arg("options"))
      // With a bound device, new_group calls this on the ranks that are not in the new group. The
      // new group is created from the store, so this is a no-op.
      .def("perform_nocolor_split", [](BackendWrapper&, const c10::Device&) {}, py::arg("device"));
}

}  // namespace torch_overlap::python
