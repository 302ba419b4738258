#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "torch_overlap/comm/backend.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {

// A backend written in Python (torch_overlap.TorchCommBackend): one object of the user's class per
// communicator. It receives validated operations as calls of the method of the operation's name,
// with positional arguments. The method returns None when the operation is done, or an object with
// wait(). Python code runs under the GIL on the issuing thread, and waits do too.
class PyBackend : public Backend {
 public:
  // Creates an object of `type` and calls its init(device, name, options). Requires the GIL.
  PyBackend(SharedObject type, const BackendContext& context);

  std::string version() const override;
  WorkPtr issue(Call call) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  std::shared_ptr<Backend> regroup(const std::function<RegroupRequest()>& rendezvous,
                                   Milliseconds timeout) override {
    abort_within(timeout / 2);
    return std::make_shared<PyBackend>(type_, rendezvous().context);
  }
  void finalize() override;
  void abort() override;
  bool is_aborted() const override { return aborted_.load(); }

 private:
  SharedObject type_;
  SharedObject self_;
  int size_;
  std::atomic<bool> aborted_{false};
};

}  // namespace torch_overlap::python
