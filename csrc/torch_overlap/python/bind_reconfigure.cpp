#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

using CommPtr = std::shared_ptr<TorchComm>;

std::variant<std::vector<std::string>, std::set<std::string>> to_handles(py::handle handles) {
  const auto are_all_strings = [](py::handle all) {
    for (const py::handle one : all) {
      if (!py::isinstance<py::str>(one)) return false;
    }
    return true;
  };
  const bool is_set = PyAnySet_Check(handles.ptr()) != 0;
  const bool is_list = py::isinstance<py::list>(handles) || py::isinstance<py::tuple>(handles);
  TORCH_OVERLAP_CHECK((is_set || is_list) && are_all_strings(handles), kType,
                      "reconfigure: expected a list or a set of strings for init_handles, got ",
                      describe(handles));
  if (is_set) return handles.cast<std::set<std::string>>();
  return handles.cast<std::vector<std::string>>();
}

WorkPtr reconfigure(TorchComm& self, int64_t uuid, const py::handle& init_handles,
                    const py::handle& timeout, const py::handle& hints) {
  ReconfigureOptions options;
  options.uuid = uuid;
  options.init_handles = to_handles(init_handles);
  if (const auto given = to_timeout("reconfigure", timeout)) {
    TORCH_OVERLAP_CHECK(given->count() > 0, kValue, "reconfigure: expected a timeout > 0, got ",
                        given->count(), " ms");
    options.timeout = *given;
  }
  options.hints = to_hints("reconfigure", hints);
  return without_gil([&] { return self.reconfigure(options); });
}

}  // namespace

void register_reconfigure(py::module_& module) {
  py::class_<TorchComm, CommPtr>(module.attr("TorchComm"))
      .def("_get_init_handle", &TorchComm::init_handle)
      .def("_reconfigure", &reconfigure)
      .def("_get_generation", &TorchComm::generation)
      .def("_is_abort_supported", &TorchComm::is_abort_supported)
      .def("_set_timeout",
           [](TorchComm& self, const py::handle& timeout) {
             const auto given = to_timeout("set_timeout", timeout);
             TORCH_OVERLAP_CHECK(
                 given, kType, "set_timeout: expected a datetime.timedelta for timeout, got None");
             self.set_timeout(*given);
           })
      .def("_set_hints", [](TorchComm& self, const py::handle& hints) {
        const Hints given = to_hints("set_hints", hints);
        without_gil([&] {
          self.set_hints(given);
          return true;
        });
      });
}

}  // namespace torch_overlap::python
