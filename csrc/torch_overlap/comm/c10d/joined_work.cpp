#include "torch_overlap/comm/c10d/joined_work.h"

#include <algorithm>
#include <chrono>

namespace torch_overlap {
namespace {

using C10dWork = c10::intrusive_ptr<c10d::Work>;

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

 private:
  const std::vector<C10dWork> works_;
};

}  // namespace

C10dWork join_works(std::vector<C10dWork> works) {
  if (works.empty()) return nullptr;
  if (works.size() == 1) return std::move(works.front());
  return c10::make_intrusive<JoinedWork>(std::move(works));
}

}  // namespace torch_overlap
