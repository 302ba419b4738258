#include "torch_overlap/comm/call_log.h"
#include "torch_overlap/comm/health.h"
#include "torch_overlap/comm/recorder.h"
#include "torch_overlap/comm/recorder_dump.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"
#include "torch_overlap/python/removable_handle.h"

namespace torch_overlap::python {
namespace {

using CommPtr = std::shared_ptr<TorchComm>;

// A recorder for Python: the process's, or a separate one that records the calls of the
// communicators to which it is attached.
class Recorder {
 public:
  explicit Recorder(size_t capacity)
      : own_(std::make_shared<FlightRecorder>(capacity)), recorder_(own_.get()) {}
  Recorder() : recorder_(&FlightRecorder::of_process()) {}

  FlightRecorder& get() const { return *recorder_; }

  RemovableHandle attach(const CommPtr& comm) const {
    comm->require_not_finalized("register_with_comm");
    const uint64_t id =
        comm->hooks().record.add([own = own_](const Call& call) { own->add(call.record); });
    return {comm, [id](Hooks& hooks) { return hooks.record.remove(id); }};
  }

  std::string json(bool include_completed) const {
    return trace(*recorder_, {.include_completed = include_completed,
                              .all_ranks = true,
                              .only_recorded = own_ != nullptr});
  }

 private:
  std::shared_ptr<FlightRecorder> own_;
  FlightRecorder* recorder_;
};

RemovableHandle attach_log(CallLog& log, const CommPtr& comm) {
  comm->require_not_finalized("register_with_comm");
  const uint64_t id = log.attach(comm->hooks());
  return {comm, [id](Hooks& hooks) { return hooks.record.remove(id); }};
}

}  // namespace

// Traces are built without the GIL: the conversion of Python frames to text acquires it itself.
void register_recorder(py::module_& module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Recorder>(module, "_FlightRecorder")
      .def(py::init<size_t>(), py::arg("capacity"))
      .def_static("of_process", [] { return Recorder(); })
      .def_property_readonly("capacity", [](const Recorder& self) { return self.get().capacity(); })
      .def(
          "size", [](const Recorder& self) { return self.get().size(); }, Unlocked())
      .def(
          "reset", [](const Recorder& self) { self.get().reset(); }, Unlocked())
      .def("attach", &Recorder::attach, py::arg("comm"), Unlocked())
      .def("json", &Recorder::json, py::arg("include_completed"), Unlocked())
      .def(
          "dump_rank",
          [](const Recorder& self, int rank, bool include_completed) {
            return dump_trace_of(self.get(), rank, include_completed);
          },
          py::arg("rank"), py::arg("include_completed"), Unlocked());
  module.def("_dump_trace", &dump_trace, py::arg("path"), py::arg("reason"), Unlocked());
  module.def("_dump_trace_on_signal", &dump_trace_on_signal, py::arg("signal"), Unlocked());

  py::class_<CallLog, std::shared_ptr<CallLog>>(module, "_CallLog",
                                                py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&CallLog::open), py::arg("path"), py::arg("events"), py::arg("verbose"))
      .def("attach", &attach_log, py::arg("comm"), Unlocked())
      .def("flush", &CallLog::flush, Unlocked());

  module.def("_health_json", &health_json, Unlocked());
}

}  // namespace torch_overlap::python
