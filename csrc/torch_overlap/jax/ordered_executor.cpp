#include "torch_overlap/jax/ordered_executor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::jax {

OrderedExecutor::OrderedExecutor(std::shared_ptr<TorchComm> comm)
    : comm_(std::move(comm)), thread_([this] { run(); }) {}

OrderedExecutor::~OrderedExecutor() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void OrderedExecutor::submit(const CallSite& site, Job job) {
  std::exception_ptr broken;
  {
    const std::lock_guard lock(mutex_);
    broken = broken_;
    if (!broken) pending_.push_back({{site, counts_[site]++}, std::move(job)});
  }
  if (broken) {
    job(broken);
    return;
  }
  changed_.notify_all();
}

void OrderedExecutor::run() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || !pending_.empty(); });
      if (pending_.empty()) return;
    }
    try {
      next()(nullptr);
    } catch (...) {
      std::deque<Pending> failed;
      {
        const std::lock_guard lock(mutex_);
        broken_ = std::current_exception();
        failed.swap(pending_);
      }
      for (const Pending& one : failed) one.job(broken_);
    }
  }
}

OrderedExecutor::Job OrderedExecutor::next() {
  SiteRun first;
  {
    const std::lock_guard lock(mutex_);
    first = pending_.front().run;
  }
  return wait_for(announce(first));
}

OrderedExecutor::SiteRun OrderedExecutor::announce(const SiteRun& mine) {
  if (comm_->size() == 1) return mine;
  const auto& [site, count] = mine;
  auto words = at::tensor({site.domain, site.number, count}, at::kLong);
  comm_->broadcast(words, /*root=*/0, /*async_op=*/false);
  const auto* heard = words.const_data_ptr<int64_t>();
  return {{.domain = heard[0], .number = heard[1]}, heard[2]};
}

OrderedExecutor::Job OrderedExecutor::wait_for(const SiteRun& run) {
  std::unique_lock lock(mutex_);
  const auto find = [&] {
    return std::find_if(pending_.begin(), pending_.end(),
                        [&](const Pending& one) { return one.run == run; });
  };
  const auto timeout = comm_->options().timeout;
  const bool is_there = changed_.wait_for(lock, timeout, [&] { return find() != pending_.end(); });
  TORCH_OVERLAP_CHECK(is_there, kTimeout, "jax: expected rank ", comm_->rank(), " of '",
                      comm_->name(), "' to reach call ", run.first.number, " (run ", run.second,
                      ") of axis or buffer ", run.first.domain, " within ", timeout.count(),
                      " ms, as rank 0 has, got ", pending_.size(),
                      " other calls. Compile and run the same programs on all processes.");
  const auto found = find();
  Job job = std::move(found->job);
  pending_.erase(found);
  return job;
}

}  // namespace torch_overlap::jax
