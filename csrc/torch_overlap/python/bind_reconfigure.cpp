#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {
namespace {

using CommPtr = std::shared_ptr<TorchComm>;

constexpr const char* kReconfigureDoc =
    R"(Gives the communicator other members: fewer after a rank was lost, or more. Also after a failure or abort().

Collective over the ranks whose handles are given. What is under way ends with an error; rank and size change; the
object, its name, hooks and options stay. Blocks until all have come, for `timeout` at most (None: the communicator's);
the error then names who did not, and another call, with another uuid, may follow. Returns a work that is done.

uuid: names the generation. Equal on all members, and never used before for this communicator.
init_handles: what get_init_handle() gave on the members. In a list the position becomes the rank; of a set, those who
were members together keep their order and new ones come after.
hints: as for set_hints().

Needs new_comm(enable_reconfigure=True), and a store that has outlived the lost ranks. A new member makes its own end
with new_comm(..., rank=0, size=1), the same name and the same store. Windows, CUDA graphs and process groups made
before are of no use after it.)";

std::variant<std::vector<std::string>, std::set<std::string>> to_handles(py::handle handles) {
  const auto each_is_text = [](py::handle all) {
    for (const py::handle one : all) {
      if (!py::isinstance<py::str>(one)) return false;
    }
    return true;
  };
  const bool is_set = PyAnySet_Check(handles.ptr()) != 0;
  const bool is_list = py::isinstance<py::list>(handles) || py::isinstance<py::tuple>(handles);
  TORCH_OVERLAP_CHECK((is_set || is_list) && each_is_text(handles), kType,
                      "reconfigure: expected init_handles as a list or a set of str, got ",
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
      .def("get_init_handle", &TorchComm::init_handle,
           "What names this rank in reconfigure(): text, the same for the life of the object.")
      .def("reconfigure", &reconfigure, py::arg("uuid"), py::arg("init_handles"),
           py::arg("timeout") = py::none(), py::arg("hints") = py::none(), kReconfigureDoc)
      .def("get_generation", &TorchComm::generation, "How often the members were changed.")
      .def("is_abort_supported", &TorchComm::is_abort_supported,
           "Whether abort() ends what is under way: True for every backend here.")
      .def(
          "set_timeout",
          [](TorchComm& self, const py::handle& timeout) {
            const auto given = to_timeout("set_timeout", timeout);
            TORCH_OVERLAP_CHECK(given, kType,
                                "set_timeout: expected timeout as a datetime.timedelta, got None");
            self.set_timeout(*given);
          },
          py::arg("timeout"), "Sets how long an operation may take, from the next one on.")
      .def(
          "set_hints",
          [](TorchComm& self, const py::handle& hints) {
            const Hints given = to_hints("set_hints", hints);
            without_gil([&] {
              self.set_hints(given);
              return true;
            });
          },
          py::arg("hints"),
          "Puts hints over those given before. Those that the backend's library takes when it "
          "makes a communicator have their effect in later children, and after reconfigure(). One "
          "warning names those that the backend does not know; a value that it cannot read raises, "
          "and changes nothing.");
}

}  // namespace torch_overlap::python
