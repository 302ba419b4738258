#include "torch_overlap/comm/backends/nccl/custom_collectives.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <future>
#include <thread>

#include "torch_overlap/comm/backends/nccl/config.h"
#include "torch_overlap/comm/backends/nccl/custom_call.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/store_bootstrap.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap {
namespace {

using cuda::CollectiveLayout;
using cuda::CollectiveParams;

constexpr int kChannels = 2;  // one for eager, one for captured operations

// Runs the rendezvous on a thread of its own, so that abort() ends the wait for missing ranks. The
// thread itself continues until its timeout, over a store connection of its own.
std::shared_ptr<SymmetricMemory> rendezvous_unless_failed(const CommRuntime& runtime,
                                                          const BackendContext& context,
                                                          const SymmetricMemory::Request& request) {
  constexpr auto kPollInterval = std::chrono::milliseconds(20);
  const auto stream = c10::cuda::getCurrentCUDAStream(context.device.index());
  std::packaged_task<std::shared_ptr<SymmetricMemory>()> task(
      [stream, store = clone_store(context.store, request.name, context.timeout()),
       rank = context.rank, size = context.size, timeout = context.timeout(), request] {
        const c10::cuda::CUDAStreamGuard guard(stream);
        const cuda::RelaxedCapture relaxed;
        StoreBootstrap bootstrap(store, request.name, rank, size, timeout);
        return SymmetricMemory::rendezvous(bootstrap, request);
      });
  auto memory = task.get_future();
  std::thread(std::move(task)).detach();
  while (memory.wait_for(kPollInterval) != std::future_status::ready)
    runtime.failure.rethrow_if_set();
  return memory.get();
}

}  // namespace

struct CustomCollectives::Memory {
  std::shared_ptr<SymmetricMemory> symmetric;
  std::shared_ptr<CommRuntime> runtime;  // owns the control words of the waits
  size_t channel_bytes = 0;
  cuda::WaitControl control{};
};

CustomCollectives::CustomCollectives(const BackendContext& context,
                                     std::shared_ptr<CommRuntime> runtime)
    : context_(context), runtime_(std::move(runtime)) {
  try {
    load_norm();
    if (!is_supported_collective(CollectiveKind::all_reduce, context.size)) return;
    query_device();
    if (context.options.custom_collectives != CollectiveMode::off) load();
  } catch (...) {
    fault_ = Fault::current();
  }
}

// Needed without custom collectives too: the norm can follow NCCL's all_reduce.
void CustomCollectives::load_norm() const {
  const c10::cuda::CUDAGuard device(context_.device);
  const cuda::RelaxedCapture relaxed;
  cuda::check(cuda::load_rms_norm_rows_kernels(), "all_reduce_rms_norm: loading kernels");
}

// Queries the values that plans depend on, even with mode off: an operation's hint may differ.
void CustomCollectives::query_device() {
  const c10::cuda::CUDAGuard device(context_.device);
  const cuda::RelaxedCapture relaxed;
  cuda::check(cuda::has_hopper_code(&has_hopper_code_), "custom collectives: loading kernels");
  if (!has_hopper_code_) return;
  const auto* properties = at::cuda::getDeviceProperties(context_.device.index());
  const int half = std::max(properties->multiProcessorCount / 2, 1);
  const int asked_for = max_ctas_hint(context_.options.hints);
  has_few_blocks_ = asked_for > 0 && asked_for < half;
  max_bulk_blocks_ = has_few_blocks_ ? asked_for : half;
}

void CustomCollectives::load() {
  const c10::cuda::CUDAGuard device(context_.device);
  const cuda::RelaxedCapture relaxed;
  const auto* properties = at::cuda::getDeviceProperties(context_.device.index());
  TORCH_OVERLAP_CHECK(properties->major >= 8, kUnsupported, kCustomCollectivesHint,
                      ": expected a GPU of compute capability 8.0 or more, got ", properties->major,
                      ".", properties->minor);
  cuda::check(cuda::load_ll_kernels(), "custom collectives: loading kernels");
  if (has_hopper_code_) {
    cuda::check(cuda::load_ll128_kernels(), "custom collectives: loading kernels");
  }
  cuda::check(cuda::load_simple_kernels(), "custom collectives: loading kernels");
  cuda::check(cuda::load_two_shot_kernels(), "custom collectives: loading kernels");
  if (has_hopper_code_) {
    cuda::check(cuda::load_bulk_kernels(), "custom collectives: loading kernels");
  }
  cuda::check(cuda::load_norm_kernels(), "custom collectives: loading kernels");
  cuda::check(cuda::load_zero_copy_kernels(), "custom collectives: loading kernels");
  runtime_->wait_monitor();
}

CollectivePlan CustomCollectives::plan(const Call& call, bool is_capturing) {
  if (state_ == State::untried) {
    if (is_capturing || !plan_for(call, State::untried)) return {};
    prepare();
  }
  return plan_for(call, state_);
}

// `untried`: plans as if this rank had every capability, so that all ranks reach prepare(), which
// compares their capabilities.
CollectivePlan CustomCollectives::plan_for(const Call& call, State state) const {
  if (call.custom_collectives == CollectiveMode::off || state == State::refused) return {};
  auto problem = collective_problem(call, context_.size);
  if (!problem) return {};
  if (!has_hopper_code_) problem->row_bytes = 0;  // needs clusters
  problem->has_windows = has_windows_;
  const bool is_untried = state == State::untried;
  problem->max_bulk_blocks = is_untried ? std::max(max_bulk_blocks_, 1) : max_bulk_blocks_;
  problem->has_few_blocks = !is_untried && has_few_blocks_;
  problem->has_ll128 = is_untried || has_ll128_;
  return plan_collective(*problem, call.custom_collectives);
}

NormKernel CustomCollectives::norm_kernel(const Call& call) const {
  const State state = state_;
  if (plan_for(call, state).row_blocks == 0 || shares_devices_) return NormKernel::none;
  return state == State::untried ? NormKernel::unprepared : NormKernel::ready;
}

void CustomCollectives::prepare() {
  const cuda::RelaxedCapture relaxed;
  auto memory = std::make_shared<Memory>();
  memory->runtime = runtime_;
  memory->channel_bytes = CollectiveLayout::bytes(context_.size, max_simple_blocks(context_.size));
  SymmetricMemory::Request request{
      .op = kCustomCollectivesHint,
      .name = concat("custom collectives of '", context_.name, "'"),
      .tensor = {},
      .digest =
          concat("channels of ", memory->channel_bytes, " bytes, clusters: ", has_hopper_code_,
                 ", most blocks: ", max_bulk_blocks_, ", of a hint: ", has_few_blocks_),
      .fault = fault_};
  try {
    if (!fault_) load();
    request.tensor = symmetric_empty({static_cast<int64_t>(kChannels * memory->channel_bytes)},
                                     at::kByte, context_.device);
  } catch (...) {
    request.fault = Fault::current();
  }
  state_ = State::refused;
  try {
    memory->symmetric = rendezvous_unless_failed(*runtime_, context_, request);
  } catch (const Error& error) {
    runtime_->failure.rethrow_if_set();
    if (error.kind() == ErrorKind::kTimeout) {
      runtime_->failure.set(WorkStatus::TIMEDOUT, std::current_exception());
      throw;
    }
    if (error.kind() != ErrorKind::kUnsupported) TORCH_WARN(error.what(), "; NCCL does it all");
    return;
  }
  memory->control = runtime_->wait_monitor().control(memory->symmetric->id(), request.name, {});
  has_ll128_ = has_hopper_code_ && memory->symmetric->has_known_links();
  shares_devices_ = memory->symmetric->shares_devices();
  memory_ = std::move(memory);
  state_ = State::ready;
}

void CustomCollectives::add_window(uint64_t number,
                                   const std::shared_ptr<SymmetricMemory>& memory) {
  std::erase_if(windows_, [&](const Window& window) {
    return window.memory.expired() || window.key == memory.get();
  });
  windows_.push_back({.number = static_cast<uint32_t>(number) + 1,
                      .memory = memory,
                      .key = memory.get(),
                      .begin = static_cast<const char*>(memory->pointer(context_.rank)),
                      .bytes = memory->bytes()});
}

void CustomCollectives::remove_window(const SymmetricMemory& memory) {
  std::erase_if(windows_, [&](const Window& window) { return window.key == &memory; });
}

std::shared_ptr<SymmetricMemory> CustomCollectives::window_of(const Call& call) const {
  if (windows_.empty() || call.custom_collectives == CollectiveMode::off) return nullptr;
  const auto kind = collective_kind(call.primitive);
  if (!kind || !is_supported_collective(*kind, context_.size)) return nullptr;
  const at::Tensor& tensor = shared_tensor(call);
  if (!tensor.defined() || tensor.numel() == 0) return nullptr;
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  for (const Window& window : windows_) {
    if (begin < window.begin || begin + tensor.nbytes() > window.begin + window.bytes) continue;
    if (auto memory = window.memory.lock()) return memory;
  }
  return nullptr;
}

cuda::WindowPlacement CustomCollectives::window_params(const Call& call,
                                                       const CollectiveParams& params) const {
  cuda::WindowPlacement out{};
  const auto found = std::find_if(windows_.begin(), windows_.end(), [&](const Window& window) {
    return window.key == call.window.get();
  });
  if (found == windows_.end() || !is_aligned(params)) return out;
  for (int r = 0; r < params.size; ++r) out.base[r] = static_cast<char*>(call.window->pointer(r));
  const auto* tensor = static_cast<const char*>(shared_tensor(call).const_data_ptr());
  out.offset = tensor - found->begin;
  const bool has_parts = &shared_tensor(call) != &call.tensor;
  out.place = has_parts ? params.rank * params.send_bytes[params.rank] : 0;
  out.number = found->number;
  return out;
}

void CustomCollectives::launch(const Call& call, const CollectivePlan& plan, bool is_capturing,
                               cudaStream_t stream, bool& has_launched) {
  const Memory& memory = *memory_;
  CollectiveParams params{};
  params.rank = context_.rank;
  params.size = context_.size;
  params.ll128_offset = CollectiveLayout::ll128(params.size);
  params.simple_offset = CollectiveLayout::simple(params.size);
  params.bulk_offset = CollectiveLayout::bulk(params.size, max_simple_blocks(params.size));
  const size_t channel = is_capturing ? memory.channel_bytes : 0;
  for (int r = 0; r < params.size; ++r) {
    params.base[r] = static_cast<char*>(memory.symmetric->pointer(r)) + channel;
  }
  params.chunk = plan.chunk;
  params.control = memory.control;
  params.control.timeout_ns =
      static_cast<uint64_t>(std::chrono::nanoseconds(clamp_timeout(call.timeout)).count());
  params.memory_id = memory.symmetric->id();
  set_parts(params, call);

  const cuda::WindowPlacement window =
      plan.zero_copy ? window_params(call, params) : cuda::WindowPlacement{};
  launch_plan(call, plan, params, window, has_hopper_code_, stream, has_launched);
}

}  // namespace torch_overlap
