#include "torch_overlap/python/py_backend.h"

#include <atomic>
#include <mutex>

#include "torch_overlap/python/arguments.h"

namespace torch_overlap::python {
namespace {

// The object that a Python backend returned, or none: then the operation is done.
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
    if (exception()) return WorkStatus::ERROR;
    return is_completed() ? WorkStatus::COMPLETED : WorkStatus::INPROGRESS;
  }

  std::exception_ptr exception() override {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  // Nobody watches a Python work: it is noticed at wait().
  void on_completion(std::function<void(std::exception_ptr)> callback) override {
    {
      const std::lock_guard lock(mutex_);
      if (!done_) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback(error_);
  }

 private:
  void finish(std::optional<std::chrono::milliseconds> timeout) {
    if (!done_) settle(timeout);
    if (error_) std::rethrow_exception(error_);
  }

  void settle(std::optional<std::chrono::milliseconds> timeout) {
    std::exception_ptr error;
    try {
      const py::gil_scoped_acquire gil;
      timeout ? borrow(work_).attr("wait")(from_timeout(*timeout)) : borrow(work_).attr("wait")();
    } catch (...) {
      error = std::current_exception();
    }
    std::vector<std::function<void(std::exception_ptr)>> callbacks;
    {
      const std::lock_guard lock(mutex_);
      if (done_) return;
      error_ = error;
      callbacks.swap(callbacks_);
      tensors_.clear();
      done_ = true;
    }
    for (const auto& callback : callbacks) callback(error);
  }

  SharedObject work_;
  std::mutex mutex_;
  std::atomic<bool> done_;
  std::exception_ptr error_;
  Call::Tensors tensors_;
  std::vector<std::function<void(std::exception_ptr)>> callbacks_;
};

CommOptions options_of(const BackendContext& context) {
  CommOptions options;
  options.abort_process_on_timeout_or_error = context.options.abort_process_on_timeout_or_error;
  options.timeout = context.options.timeout;
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

WorkPtr PyBackend::launch(Call call) {
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
