#include "torch_overlap/comm/c10d/backend_wrapper.h"

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/c10d/monitored_barrier.h"

namespace torch_overlap {
namespace {

c10::intrusive_ptr<BackendOptions> options_of(const TorchComm& comm) {
  auto options = c10::make_intrusive<BackendOptions>(comm.options().timeout);
  options->group_name = comm.name();
  options->backends = {{c10::DeviceTypeName(comm.device().type(), true), comm.backend_name()}};
  return options;
}

std::string type_name(c10::Device device) { return c10::DeviceTypeName(device.type(), true); }

}  // namespace

BackendOptions::BackendOptions(std::chrono::milliseconds timeout)
    : c10d::Backend::Options("torch_overlap", timeout) {}

BackendWrapper::BackendWrapper(CommPtr comm)
    : c10d::Backend(comm->rank(), comm->size()),
      existing_comm_(std::move(comm)),
      options_(options_of(*existing_comm_)),
      timeout_ms_(std::make_shared<std::atomic<int64_t>>(options_->timeout.count())),
      slots_{{existing_comm_->device().type(), Slot{existing_comm_, /*eager=*/true}}},
      last_split_(c10::intrusive_ptr<c10d::Backend>()) {
  init();
}

BackendWrapper::BackendWrapper(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                               c10::intrusive_ptr<BackendOptions> options)
    : BackendWrapper(std::move(store), rank, size, std::move(options), Slots{}) {}

BackendWrapper::BackendWrapper(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                               c10::intrusive_ptr<BackendOptions> options, Slots slots)
    : c10d::Backend(rank, size),
      store_(std::move(store)),
      options_(std::move(options)),
      timeout_ms_(std::make_shared<std::atomic<int64_t>>(options_->timeout.count())),
      pairs_(std::make_unique<PairComms>(make_pair_factory())),
      slots_(std::move(slots)),
      last_split_(c10::intrusive_ptr<c10d::Backend>()) {
  init();
  if (options_->backends.count("cpu") != 0) group_comm(c10::kCPU, /*eager=*/true);
}

const std::string BackendWrapper::getBackendName() const { return "torch_overlap"; }

c10::intrusive_ptr<c10d::Backend::Options> BackendWrapper::getBackendOptions() {
  return c10::make_intrusive<BackendOptions>(*options_);
}

// --- Communicators ---------------------------------------------------------------------------

BackendWrapper::CommPtr BackendWrapper::make_comm(const BackendOptions& group, Ms timeout,
                                                  c10::Device device, const std::string& suffix,
                                                  c10::intrusive_ptr<c10d::Store> store,
                                                  RankAndSize who) {
  const auto backend = group.backends.find(type_name(device));
  TORCH_OVERLAP_CHECK(backend != group.backends.end(), kType, "process group '", group.group_name,
                      "': expected a tensor on ",
                      group.backends.empty() ? "no device" : group.backends.begin()->first,
                      ", got one on ", device.str(),
                      "; name a backend for it in BackendOptions.backends");
  CommOptions options = group.comm;
  options.timeout = timeout;
  options.store = std::move(store);
  if (device.is_cuda()) {
    for (const auto& [key, value] : group.cuda_hints) options.hints.insert_or_assign(key, value);
  }
  const std::string name = concat("c10d.", group.group_name, ".", type_name(device), suffix);
  return TorchComm::create(backend->second, device, name, options, who);
}

// Owns everything it uses: the thread that creates a communicator may outlive the group.
PairComms::CommFactory BackendWrapper::make_pair_factory() const {
  return [store = store_, options = options_, timeout = timeout_ms_, rank = getRank()](
             const PairKey& key, c10::Device device) {
    const std::string suffix = concat(".p2p", key.src, "-", key.dst,
                                      key.tag == 0 ? std::string() : concat(".tag", key.tag));
    return make_comm(*options, Ms(timeout->load()), device, suffix,
                     c10::make_intrusive<c10d::PrefixStore>(suffix, store),
                     {rank == key.src ? 0 : 1, 2});
  };
}

BackendWrapper::CommPtr BackendWrapper::group_comm(c10::Device device, bool eager) {
  const auto type = device.type();
  const auto existing = [&]() -> CommPtr {
    const std::lock_guard lock(mutex_);
    TORCH_OVERLAP_CHECK(!closed_ || slots_.count(type) != 0, kState, "process group '",
                        options_->group_name,
                        "': expected a live group, got one that was shut down or aborted; make a "
                        "new one with torch.distributed.new_group");
    const auto slot = slots_.find(type);
    return slot == slots_.end() ? nullptr : slot->second.comm;
  };
  if (existing_comm_) return existing_comm_;  // reports a tensor of another device itself
  if (auto comm = existing()) return comm;
  const std::lock_guard making(creation_mutex_);
  if (auto comm = existing()) return comm;
  auto comm =
      make_comm(*options_, Ms(timeout_ms_->load()), device, "", store_, {getRank(), getSize()});
  const std::lock_guard lock(mutex_);
  slots_[type] = Slot{comm, eager};
  return comm;
}

BackendWrapper::CommPtr BackendWrapper::comm_for(c10::Device device) {
  return group_comm(device, /*eager=*/false);
}

void BackendWrapper::eagerConnectSingleDevice(at::Device device) {
  group_comm(device, /*eager=*/true);
}

std::vector<BackendWrapper::CommPtr> BackendWrapper::comms() const {
  const std::lock_guard lock(mutex_);
  std::vector<CommPtr> result;
  for (const auto& [type, slot] : slots_) result.push_back(slot.comm);
  return result;
}

std::vector<BackendWrapper::CommPtr> BackendWrapper::all_comms() const {
  auto result = comms();
  if (!pairs_) return result;
  // The order is the same on all ranks, so no two ranks wait for each other.
  for (auto& comm : pairs_->comms()) result.push_back(std::move(comm));
  return result;
}

c10::intrusive_ptr<c10d::Store> BackendWrapper::store() const {
  return store_ ? store_ : existing_comm_->store();
}

// --- The group as a whole --------------------------------------------------------------------

void BackendWrapper::setTimeout(Ms timeout) {
  TORCH_OVERLAP_CHECK(timeout > Ms::zero(), kValue, "set_timeout: expected a time above zero, got ",
                      timeout.count(), " ms");
  timeout_ms_->store(timeout.count());
  options_->timeout = timeout;
}

c10::intrusive_ptr<c10d::Backend> BackendWrapper::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
  if (!last_split_name_.empty() && options->group_name == last_split_name_) {
    return last_split_.lock();
  }
  auto child = c10::make_intrusive<BackendOptions>(*options_);
  child->group_name = options->group_name;
  child->timeout = options->timeout;
  if (const auto* ours = dynamic_cast<const BackendOptions*>(options.get())) {
    child->comm = ours->comm;
    child->cuda_hints = ours->cuda_hints;
  }
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  const bool member = mine != ranks.end();

  Slots parents;
  {
    const std::lock_guard lock(mutex_);
    parents = slots_;
  }
  Slots slots;
  for (const auto& [type, parent] : parents) {
    const std::string name =
        concat("c10d.", child->group_name, ".", c10::DeviceTypeName(type, true));
    OpOptions split_options;
    split_options.timeout = child->timeout;
    split_options.hints = child->comm.hints;
    if (type == c10::kCUDA) {
      for (const auto& [key, value] : child->cuda_hints) {
        split_options.hints.insert_or_assign(key, value);
      }
    }
    auto comm = parent.comm->split(member ? ranks : std::vector<int>{}, name, split_options);
    if (comm) slots[type] = Slot{std::move(comm), /*eager=*/true};
  }
  last_split_name_ = options->group_name;
  last_split_.reset();
  if (!member) return nullptr;
  c10::intrusive_ptr<c10d::Backend> result =
      c10::intrusive_ptr<BackendWrapper>::unsafe_steal_from_new(
          new BackendWrapper(store, static_cast<int>(mine - ranks.begin()),
                             static_cast<int>(ranks.size()), std::move(child), std::move(slots)));
  last_split_ = c10::weak_intrusive_ptr<c10d::Backend>(result);
  return result;
}

c10d::ErrorType BackendWrapper::getError() {
  for (const auto& comm : all_comms()) {
    if (comm->is_aborted()) return c10d::ErrorType::COMM_ERROR;
  }
  WorkPtr last;
  {
    const std::lock_guard lock(mutex_);
    last = last_work_;
  }
  const auto status = last ? last->status() : WorkStatus::COMPLETED;
  if (status == WorkStatus::TIMEDOUT) return c10d::ErrorType::TIMEOUT;
  return status == WorkStatus::ERROR ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void BackendWrapper::close_pairs(std::string_view why) {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  if (!pairs_) return;
  pairs_->close(concat("send/recv: expected a live process group, got '", options_->group_name,
                       "', which was ", why, "; make a new one with torch.distributed.new_group"));
}

// Aborts all communicators concurrently: freeing one may wait for the device, on which the kernels
// of the others wait for their own abort.
void BackendWrapper::abort() {
  close_pairs("aborted");
  std::vector<std::thread> threads;
  for (const auto& comm : all_comms()) {
    if (comm->is_finalized()) continue;
    threads.emplace_back([comm] {
      try {
        comm->abort();
      } catch (const std::exception& error) {
        TORCH_WARN("abort of communicator '", comm->name(), "': ", error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// Never throws: destroy_process_group must be able to drop a group whose peer has died.
void BackendWrapper::shutdown() {
  close_pairs("shut down");
  for (const auto& comm : all_comms()) {
    if (comm->is_finalized()) continue;
    try {
      comm->finalize();
    } catch (const std::exception& error) {
      TORCH_WARN("shutdown of process group '", options_->group_name, "': ", error.what());
      if (!comm->is_finalized()) comm->abort();
    }
  }
}

void BackendWrapper::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto shared = store();
  TORCH_OVERLAP_CHECK(shared, kUnsupported,
                      "monitored_barrier: expected a communicator with peers, got one of backend '",
                      existing_comm_->backend_name(), "'; use barrier");
  const std::string key = concat("monitored_barrier/", monitored_barriers_.fetch_add(1));
  // A timeout of zero polls once. c10d passes a negative one for no timeout argument.
  const Ms timeout = opts.timeout < Ms::zero() ? Ms(timeout_ms_->load()) : opts.timeout;
  monitored_barrier(*shared, key, getRank(), getSize(), timeout, wait_all_ranks);
}

// --- Works -----------------------------------------------------------------------------------

OpOptions BackendWrapper::op_options(Ms timeout) const {
  OpOptions options;
  options.timeout = timeout > Ms::zero() ? timeout : Ms(timeout_ms_->load());
  options.bumps_versions = false;  // as torch's backends
  return options;
}

BackendWrapper::C10dWork BackendWrapper::wrap(c10d::OpType type, std::vector<WorkPtr> works,
                                              Tensors outputs) {
  WorkParts parts;
  parts.type = type;
  parts.works = std::move(works);
  parts.outputs = std::move(outputs);
  return wrap(std::move(parts));
}

BackendWrapper::C10dWork BackendWrapper::wrap(WorkParts parts) {
  parts.rank = getRank();
  parts.sequence = ++sequence_;
  end_span(parts);
  if (!parts.works.empty()) {
    WorkPtr last = parts.works.back();
    const std::lock_guard lock(mutex_);
    last.swap(last_work_);  // the previous work is destroyed after the lock is released
  }
  if (!is_coalescing()) return c10::make_intrusive<WorkWrapper>(std::move(parts));
  auto& all = coalescing_.parts;
  all.works.insert(all.works.end(), parts.works.begin(), parts.works.end());
  all.outputs.insert(all.outputs.end(), parts.outputs.begin(), parts.outputs.end());
  all.blocks_host = all.blocks_host || parts.blocks_host;
  return all.members.emplace_back(c10::make_intrusive<WorkWrapper>(std::move(parts)));
}

void BackendWrapper::startCoalescing() {
  if (is_coalescing() && !coalescing_.p2p.empty()) {
    TORCH_WARN("start_coalescing: the coalescing before this one did not end (an exception?); its ",
               coalescing_.p2p.size(), " sends and receives are dropped");
  }
  std::thread::id nobody;
  TORCH_OVERLAP_CHECK(
      is_coalescing() ||
          coalescing_thread_.compare_exchange_strong(nobody, std::this_thread::get_id()),
      kState,
      "start_coalescing: expected one coalescing at a time, got a second one from another "
      "thread; end the first");
  coalescing_ = {};
}

BackendWrapper::C10dWork BackendWrapper::endCoalescing() {
  TORCH_OVERLAP_CHECK(
      is_coalescing(), kState,
      "end_coalescing: expected start_coalescing before it on this thread, got none; or an "
      "operation failed after it, which ends it: do not catch that before the end");
  auto [p2p, parts] = drop_coalescing();
  return issue_batch(std::move(p2p), std::move(parts));
}

BackendWrapper::Coalescing BackendWrapper::drop_coalescing() {
  Coalescing dropped = std::exchange(coalescing_, {});
  coalescing_thread_.store({});
  return dropped;
}

}  // namespace torch_overlap
