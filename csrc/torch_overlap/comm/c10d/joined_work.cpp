#include "torch_overlap/comm/c10d/joined_work.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

namespace torch_overlap {
namespace {

using C10dWork = c10::intrusive_ptr<c10d::Work>;
using Future = c10::ivalue::Future;

class JoinedWork final : public c10d::Work {
 public:
  explicit JoinedWork(std::vector<C10dWork> works)
      : c10d::Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const C10dWork& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const C10dWork& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (auto error = work->exception()) return error;
    }
    return nullptr;
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (const auto& work : works_) {
      for (auto& one : work->result()) all.push_back(std::move(one));
    }
    return all;
  }
  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }
  void blockCurrentStream() override {
    for (const auto& work : works_) work->blockCurrentStream();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    for (const auto& work : works_) {
      const auto passed =
          std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
      work->wait(timeout == kNoTimeout ? kNoTimeout
                                       : std::max(timeout - passed, std::chrono::milliseconds(1)));
    }
    return true;
  }
  // A future of the list of all outputs. It has the first error.
  c10::intrusive_ptr<Future> getFuture() override {
    const std::lock_guard lock(mutex_);
    if (!future_) future_ = make_future();
    return future_;
  }

 private:
  c10::intrusive_ptr<Future> make_future() {
    auto parts = std::make_shared<std::vector<c10::intrusive_ptr<Future>>>();
    std::vector<c10::Device> devices;
    for (const auto& work : works_) {
      parts->push_back(work->getFuture());
      for (const c10::Device device : parts->back()->devices()) {
        if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
          devices.push_back(device);
        }
      }
    }
    auto joined = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                              std::move(devices));
    auto left = std::make_shared<std::atomic<size_t>>(parts->size());
    for (const auto& part : *parts) {
      part->addCallback([parts, joined, left](Future&) {
        if (left->fetch_sub(1) == 1) complete(*parts, *joined);
      });
    }
    return joined;
  }
  // Called when all parts are complete.
  static void complete(const std::vector<c10::intrusive_ptr<Future>>& parts, Future& joined) {
    c10::List<at::Tensor> outputs;
    for (const auto& part : parts) {
      if (part->hasError()) return joined.setError(part->exception_ptr());
      // Does not block. Orders the streams of this callback after the part.
      part->wait();
      for (const at::Tensor& output : part->constValue().toTensorVector()) {
        outputs.push_back(output);
      }
    }
    joined.markCompleted(c10::IValue(outputs));
  }

  const std::vector<C10dWork> works_;
  std::mutex mutex_;
  c10::intrusive_ptr<Future> future_;  // guarded by mutex_
};

}  // namespace

C10dWork join_works(std::vector<C10dWork> works) {
  if (works.empty()) return nullptr;
  if (works.size() == 1) return std::move(works.front());
  return c10::make_intrusive<JoinedWork>(std::move(works));
}

}  // namespace torch_overlap
