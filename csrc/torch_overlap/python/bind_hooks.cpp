#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/python/arguments.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"
#include "torch_overlap/python/removable_handle.h"

namespace torch_overlap::python {
namespace {

using CommPtr = std::shared_ptr<TorchComm>;

// Returns the argument of a hook: an object of torch_overlap.hooks, built from the operation's
// arguments.
py::object make_pre_args(const HookEvent& event, int size) {
  py::dict fields;
  if (event.call != nullptr) {
    for (auto& [name, value] : arguments_of(*event.call, size)) fields[name] = value;
  }
  if (event.ranks != nullptr) {
    fields["ranks"] = py::cast(*event.ranks);
    fields["name"] = event.split_name != nullptr ? py::cast(*event.split_name) : py::none();
  }
  return py::module_::import("torch_overlap.hooks").attr("_make_pre_args")(event.name, fields);
}

py::object make_post_args(const HookEvent& event, const std::exception_ptr& error) {
  return py::module_::import("torch_overlap.hooks")
      .attr("_make_post_args")(event.name, from_exception(error),
                               event.work != nullptr ? py::cast(*event.work) : py::none(),
                               event.child != nullptr ? py::cast(*event.child) : py::none());
}

RemovableHandle register_pre_hook(const CommPtr& comm, py::function callback) {
  comm->require_not_finalized("register_pre_hook");
  const uint64_t id = comm->hooks().pre.add(
      [shared = share(std::move(callback)), size = comm->size()](const HookEvent& event) {
        const py::gil_scoped_acquire gil;
        borrow(shared)(event.name, event.id, make_pre_args(event, size));
      });
  return {comm, [id](Hooks& hooks) { return hooks.pre.remove(id); }};
}

RemovableHandle register_post_hook(const CommPtr& comm, py::function callback) {
  comm->require_not_finalized("register_post_hook");
  const uint64_t id =
      comm->hooks().post.add([shared = share(std::move(callback))](
                                 const HookEvent& event, const std::exception_ptr& error) {
        const py::gil_scoped_acquire gil;
        borrow(shared)(event.id, make_post_args(event, error));
      });
  return {comm, [id](Hooks& hooks) { return hooks.post.remove(id); }};
}

RemovableHandle register_abort_hook(const CommPtr& comm, py::function callback) {
  comm->require_not_finalized("register_abort_hook");
  const uint64_t id = comm->hooks().abort.add([shared = share(std::move(callback))] {
    const py::gil_scoped_acquire gil;
    borrow(shared)();
  });
  return {comm, [id](Hooks& hooks) { return hooks.abort.remove(id); }};
}

}  // namespace

void register_hooks(py::module_& module) {
  py::class_<RemovableHandle>(
      module, "RemovableHandle",
      "Handle of a registered hook. The hook stays registered if the handle is destroyed.")
      .def("_remove", &RemovableHandle::remove, py::call_guard<py::gil_scoped_release>());

  py::class_<TorchComm, CommPtr>(module.attr("TorchComm"))
      .def("_register_pre_hook", &register_pre_hook)
      .def("_register_post_hook", &register_post_hook)
      .def("_register_abort_hook", &register_abort_hook);
}

}  // namespace torch_overlap::python
