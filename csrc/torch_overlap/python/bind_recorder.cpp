#include <functional>
#include <memory>
#include <mutex>
#include <vector>

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

// Records the calls of a communicator, and of those that its splits make, until it is removed.
class Attachment : public std::enable_shared_from_this<Attachment> {
 public:
  // Begins to record; returns the id of its hook in hooks().record. `parent` may be null.
  using Observe = std::function<uint64_t(TorchComm&, const TorchComm* parent)>;

  static RemovableHandle make(const CommPtr& comm, Observe observe) {
    comm->require_not_finalized("register_with_comm");
    const auto made = std::make_shared<Attachment>(std::move(observe));
    made->add(comm, nullptr);
    return RemovableHandle([made] { made->remove(); });
  }
  explicit Attachment(Observe observe) : observe_(std::move(observe)) {}

 private:
  struct Member {
    std::weak_ptr<TorchComm> comm;
    uint64_t record;
    uint64_t split;
  };

  void add(const CommPtr& comm, const TorchComm* parent) {
    const uint64_t record = observe_(*comm, parent);
    const uint64_t split = comm->hooks().split.add(
        [self = shared_from_this(), parent = comm.get()](const CommPtr& child) {
          self->add(child, parent);  // the parent is alive: it runs the hook
        });
    const std::lock_guard lock(mutex_);
    std::erase_if(members_, [](const Member& member) { return member.comm.expired(); });
    members_.push_back({comm, record, split});
  }
  void remove() {
    std::vector<Member> members;
    {
      const std::lock_guard lock(mutex_);
      members.swap(members_);
    }
    for (const Member& member : members) {
      const auto comm = member.comm.lock();
      if (!comm) continue;
      comm->hooks().record.remove(member.record);
      comm->hooks().split.remove(member.split);
    }
  }

  const Observe observe_;
  std::mutex mutex_;
  std::vector<Member> members_;  // guarded by mutex_
};

// A recorder for Python: the process's, or a separate one that records the calls of the
// communicators to which it is attached.
class Recorder {
 public:
  explicit Recorder(size_t capacity)
      : own_(std::make_shared<FlightRecorder>(capacity)), recorder_(own_.get()) {}
  Recorder() : recorder_(&FlightRecorder::of_process()) {}

  FlightRecorder& get() const { return *recorder_; }

  RemovableHandle attach(const CommPtr& comm) const {
    return Attachment::make(comm, [own = own_](TorchComm& one, const TorchComm*) {
      return one.hooks().record.add([own](const Call& call) { own->add(call.record); });
    });
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

RemovableHandle attach_log(const std::shared_ptr<CallLog>& log, const CommPtr& comm) {
  return Attachment::make(
      comm, [log](TorchComm& one, const TorchComm* parent) { return log->attach(one, parent); });
}

std::shared_ptr<CallLog> open_log(const std::string& path, const std::vector<std::string>& events,
                                  const std::vector<std::string>& verbose, bool is_text) {
  return CallLog::open(path, events, verbose, is_text ? LogFormat::kText : LogFormat::kJson);
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
      .def(py::init(&open_log), py::arg("path"), py::arg("events"), py::arg("verbose"),
           py::arg("is_text"))
      .def("attach", &attach_log, py::arg("comm"), Unlocked())
      .def("flush", &CallLog::flush, Unlocked());

  module.def("_health_json", &health_json, Unlocked());
}

}  // namespace torch_overlap::python
