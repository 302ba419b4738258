#include "torch_overlap/python/py_backend.h"

#include <atomic>
#include <mutex>

#include "torch_overlap/python/arguments.h"

namespace torch_overlap::python {
namespace {

// True if the work's wait(timeout) raised because it timed out or cannot wait at all, and the
// operation is still running. Requires the GIL.
bool is_still_running(const py::object& work, const py::error_already_set& error,
                      bool is_past_deadline) {
  if (!is_past_deadline && !error.matches(PyExc_TimeoutError) &&
      !error.matches(error_class_of(ErrorKind::kUnsupported))) {
    return false;
  }
  return !py::hasattr(work, "is_completed") || !work.attr("is_completed")().cast<bool>();
}

// The object that a Python backend returned, or None: then the operation is done.
class PyWork : public TorchWork {
 public:
  PyWork(py::object work, Call::Tensors tensors)
      : done_(work.is_none()), tensors_(std::move(tensors)) {
    if (!done_) work_ = share(std::move(work));
  }

  void wait() override { finish(std::nullopt); }
  void wait_blocking(std::optional<std::chrono::milliseconds> timeout) override { finish(timeout); }

  bool is_completed() override {
    if (done_) return true;
    const py::gil_scoped_acquire gil;
    const py::object work = borrow(work_);
    return py::hasattr(work, "is_completed") && work.attr("is_completed")().cast<bool>();
  }

  WorkStatus status() override {
    if (error()) return WorkStatus::ERROR;
    return is_completed() ? WorkStatus::COMPLETED : WorkStatus::INPROGRESS;
  }

  std::exception_ptr exception() override { return to_exception(error()); }

  // Nothing polls a Python work: completion is noticed at wait().
  void on_completion(std::function<void(std::exception_ptr)> callback) override {
    {
      const std::lock_guard lock(mutex_);
      if (!done_) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback(exception());
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Returns the exception object; null if there is none.
  SharedObject error() {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  // Returns a new C++ exception each time: py::error_already_set can be raised in Python only once.
  static std::exception_ptr to_exception(const SharedObject& error) {
    if (!error) return nullptr;
    const py::gil_scoped_acquire gil;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
    return std::make_exception_ptr(py::error_already_set());
  }

  void finish(std::optional<std::chrono::milliseconds> timeout) {
    if (!done_) settle(wait_in_python(timeout));
    if (auto failure = exception()) std::rethrow_exception(failure);
  }

  // Returns the exception object that the operation ended with, or null. Throws on a timeout.
  SharedObject wait_in_python(std::optional<std::chrono::milliseconds> timeout) {
    const py::gil_scoped_acquire gil;
    const py::object work = borrow(work_);
    const auto deadline = Clock::now() + timeout.value_or(std::chrono::milliseconds{0});
    try {
      if (timeout) {
        py::module_::import("torch_overlap.comm")
            .attr("_wait_with_timeout")(work, from_timeout(*timeout));
      } else {
        work.attr("wait")();
      }
    } catch (const py::error_already_set& raised) {
      if (timeout && is_still_running(work, raised, Clock::now() >= deadline)) throw;
      return share(raised.value());
    }
    return nullptr;
  }

  void settle(SharedObject error) {
    std::vector<std::function<void(std::exception_ptr)>> callbacks;
    Call::Tensors tensors;  // destroyed after the lock is released
    {
      const std::lock_guard lock(mutex_);
      if (done_) return;
      error_ = std::move(error);
      callbacks.swap(callbacks_);
      tensors.swap(tensors_);
      done_ = true;
    }
    for (const auto& callback : callbacks) callback(exception());
  }

  SharedObject work_;
  std::mutex mutex_;
  std::atomic<bool> done_;
  SharedObject error_;
  Call::Tensors tensors_;
  std::vector<std::function<void(std::exception_ptr)>> callbacks_;
};

CommOptions options_of(const BackendContext& context) {
  CommOptions options;
  options.abort_process_on_timeout_or_error = context.options.abort_process_on_timeout_or_error;
  options.timeout = context.timeout();
  options.is_high_priority_stream = context.options.is_high_priority_stream;
  options.enable_reconfigure = context.options.enable_reconfigure;
  options.name = context.name;
  options.hints = context.options.hints;
  options.store = context.store;
  return options;
}

}  // namespace

PyBackend::PyBackend(SharedObject type, const BackendContext& context)
    : type_(std::move(type)), size_(context.size) {
  const py::gil_scoped_acquire gil;
  py::object self = borrow(type_)();
  self.attr("rank") = context.rank;
  self.attr("size") = context.size;
  self.attr("init")(context.device, context.name, options_of(context));
  self_ = share(std::move(self));
}

std::string PyBackend::version() const {
  const py::gil_scoped_acquire gil;
  return py::str(borrow(self_).attr("get_backend_version")());
}

WorkPtr PyBackend::issue(Call call) {
  const py::gil_scoped_acquire gil;
  py::list args;
  for (auto& [name, value] : arguments_of(call, size_)) args.append(value);
  py::object work = borrow(self_).attr(std::string(to_string(call.name)).c_str())(*py::tuple(args));
  TORCH_OVERLAP_CHECK(work.is_none() || py::hasattr(work, "wait"), kType, call.describe(),
                      ": expected None or an object with wait() from the Python backend, got ",
                      python::describe(work));
  return std::make_shared<PyWork>(std::move(work), call.tensors());
}

std::shared_ptr<Backend> PyBackend::split(const SplitRequest& request) {
  return request.member ? std::make_shared<PyBackend>(type_, request.child) : nullptr;
}

void PyBackend::finalize() {
  const py::gil_scoped_acquire gil;
  borrow(self_).attr("finalize")();
}

void PyBackend::abort() {
  if (aborted_.exchange(true)) return;
  const py::gil_scoped_acquire gil;
  borrow(self_).attr("abort")();
}

}  // namespace torch_overlap::python
