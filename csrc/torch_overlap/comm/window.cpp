#include "torch_overlap/comm/window.h"

#include <algorithm>

#include "torch_overlap/base/interrupt.h"
#include "torch_overlap/comm/validate.h"
#include "torch_overlap/common/capture.h"
#include "torch_overlap/symm/allocator.h"
#include "torch_overlap/symm/pretend_unreachable.h"

namespace torch_overlap {
namespace {

// Completed works are removed whenever the number of kept works is a multiple of this.
constexpr size_t kReapAt = 64;

}  // namespace

std::shared_ptr<TorchCommWindow> TorchComm::new_window(const Tensor& tensor) {
  require_active("new_window");
  const auto members = membership();
  TORCH_OVERLAP_CHECK(members->backend->has_windows(), kUnsupported,
                      "new_window: expected a backend with windows for ", device(), ", got '",
                      backend_name_, "'; use nccl for CUDA, gloo or local for the CPU");
  const HookEvent event{.name = OpName::new_window, .id = allocate_op_id()};
  const auto number = members->windows->fetch_add(1);
  Fault fault;
  try {
    hooks_->pre(event);
  } catch (...) {
    // Notify the other ranks, which wait for this one.
    if (tensor.defined()) {
      std::shared_ptr<TorchCommWindow> none(new TorchCommWindow(shared_from_this(), ""));
      fault = Fault::current();
      try {
        none->register_with(members, tensor, true, fault);
      } catch (const std::exception&) {  // the hook's error is thrown instead
      }
    }
    throw;
  }
  return hooks_->run_with_post_hook(event, [&] {
    std::shared_ptr<TorchCommWindow> window(
        new TorchCommWindow(shared_from_this(), concat(name(), "/window_", number)));
    if (tensor.defined()) window->tensor_register(tensor);
    detail::add_window(window);
    return window;
  });
}

TorchCommWindow::~TorchCommWindow() { detail::remove_window(this); }

void TorchCommWindow::tensor_register(const Tensor& tensor, bool owning) {
  comm_->require_active("tensor_register");
  const auto members = comm_->membership();
  Fault fault;
  try {
    TORCH_OVERLAP_CHECK(!has_tensor(), kState,
                        "tensor_register: expected a window without a "
                        "tensor, got '",
                        name_, "', which has one; call tensor_deregister() first");
    comm_->checker("tensor_register").tensor(tensor, "tensor");
    if (members->context.store) {
      symmetric_allocator("tensor_register", device().type())
          .check_not_capturing("tensor_register");
    }
    comm_->membership()->backend->prepare_windows();
  } catch (...) {
    fault = Fault::current();
  }
  register_with(members, tensor, owning, fault);
}

void TorchCommWindow::register_with(const std::shared_ptr<const Membership>& members,
                                    const Tensor& tensor, bool owning, const Fault& fault) {
  Fault mine = fault;
  const BackendContext& context = members->context;
  Backend::RemoteSupport remote;
  try {
    if (context.store) members->backend->begin_window();
    remote = members->backend->remote_access_support();
  } catch (...) {
    if (!mine) mine = Fault::current();
  }
  const SymmetricMemory::Request request{
      .op = "tensor_register",
      .name = name_,
      .tensor = tensor,
      .digest = mine ? "" : concat("a tensor of ", tensor.scalar_type()),
      .fault = mine,
      .partial = remote.can,
      .partial_unsupported_reason = remote.why,
      .pretend_unreachable = PretendUnreachable::is_on()};
  auto made = std::make_shared<Registration>();
  if (context.store) {
    const uint64_t number = made->number = members->registrations->fetch_add(1);
    made->bootstrap =
        comm_->bootstrap(*members, concat("window memory #", number, " of '", context.name, "'"));
    made->memory = SymmetricMemory::rendezvous(*made->bootstrap, request);
    if (made->memory->unreachable_pair().empty()) {
      members->backend->add_window(number, made->memory);
    } else {
      made->memory->set_remote(
          members->backend->open_remote(*made->bootstrap, request.op, *made->memory));
    }
  } else {
    made->memory = SymmetricMemory::create_without_peers(context.rank, context.size, request);
  }
  made->members = members;
  if (owning) made->owned = tensor;
  made->tensor.emplace(tensor.getIntrusivePtr());
  made->dtype = tensor.scalar_type();
  made->sizes = tensor.sizes().vec();
  made->numel = tensor.numel();
  const std::lock_guard lock(mutex_);
  registration_ = std::move(made);
}

void TorchCommWindow::tensor_deregister() {
  comm_->require_own_process("tensor_deregister");
  RegistrationPtr old;
  {
    const std::lock_guard lock(mutex_);
    old.swap(registration_);  // no operation can begin any more
  }
  TORCH_OVERLAP_CHECK(old, kState, "tensor_deregister: expected a window with a tensor, got '",
                      name_, "', which has none; call tensor_register() first");
  const bool is_live = !comm_->is_finalized() && !comm_->is_aborted() &&
                       comm_->generation() == old->members->generation &&
                       old->members->backend->failure().empty();
  if (!is_live) {
    std::deque<WorkPtr> ended;  // ended by the failure; destroyed after the lock
    const std::lock_guard lock(mutex_);
    ended.swap(in_flight_);
  }
  if (!is_live || !old->bootstrap) return;
  const Milliseconds timeout = old->members->context.timeout();
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  Fault fault;
  try {
    symmetric_allocator("tensor_deregister", device().type())
        .check_not_capturing("tensor_deregister");
    drain(timeout);
    const auto left = std::chrono::ceil<Milliseconds>(deadline - std::chrono::steady_clock::now());
    old->members->backend->remove_window(*old->memory, std::max(left, Milliseconds(1)));
  } catch (...) {
    fault = Fault::current();
  }
  // Other ranks may need their full timeout to wait for their operations.
  old->bootstrap->set_timeout(2 * timeout);
  // After all ranks have arrived, all operations of all ranks are done: no rank accesses the
  // memory.
  try {
    throw_if_any_failed(*old->bootstrap, "tensor_deregister", fault);
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      if (!registration_) registration_ = old;  // restore it
    }
    try {
      if (old->memory->unreachable_pair().empty()) {
        old->members->backend->add_window(old->number, old->memory);
      }
    } catch (const std::exception&) {  // the communicator has failed: no operation can begin
    }
    throw;
  }
  if (auto* remote = old->memory->remote()) remote->close(timeout);
}

void TorchCommWindow::drain(Milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::deque<WorkPtr> works;
  {
    std::unique_lock lock(mutex_);
    const auto none = [this] { return num_issuing_ == 0; };
    TORCH_OVERLAP_CHECK(wait_interruptibly(issuing_done_, lock, deadline, none), kTimeout,
                        "tensor_deregister: expected the calls on '", name_,
                        "' of other threads to return within ", timeout.count(),
                        " ms, got one that did not");
    works.swap(in_flight_);
  }
  try {
    for (const auto& work : works) wait_for(*work, deadline, timeout);
  } catch (...) {
    // Still in flight: the next attempt waits for them.
    const std::lock_guard lock(mutex_);
    in_flight_.insert(in_flight_.begin(), works.begin(), works.end());
    throw;
  }
}

void TorchCommWindow::wait_for(TorchWork& work, std::chrono::steady_clock::time_point deadline,
                               Milliseconds timeout) const {
  // A captured operation runs at replays, for which the caller is responsible.
  if (work.status() == WorkStatus::NOT_STARTED) return;
  const auto left = std::chrono::ceil<Milliseconds>(deadline - std::chrono::steady_clock::now());
  try {
    work.wait_blocking(std::max(left, Milliseconds(1)));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout || work.is_completed()) throw;
    fail(ErrorKind::kTimeout, "tensor_deregister: expected the operations of '", name_,
         "' to end within ", timeout.count(), " ms, got one that did not: ", error.what());
  }
}

TorchCommWindow::RegistrationPtr TorchCommWindow::require(std::string_view op) const {
  const std::lock_guard lock(mutex_);
  TORCH_OVERLAP_CHECK(registration_, kState, op, ": expected a window with a tensor, got '", name_,
                      "', which has none; call tensor_register() first");
  return registration_;
}

Checker TorchCommWindow::checker(const Registration& registered, std::string_view op) const {
  Checker check = comm_->checker(op);
  TORCH_OVERLAP_CHECK(check.members->generation == registered.members->generation, kState, op,
                      ": expected a tensor that the communicator's present members registered, got "
                      "window '",
                      name_, "' of before reconfigure(); deregister the tensor and register it");
  return check;
}

WorkPtr TorchCommWindow::issue(const Checker& check, Call call, bool async_op,
                               const OpOptions& options) {
  // From here until the work is in in_flight_, a deregistration in another thread waits for this
  // call.
  struct Issuing {
    explicit Issuing(TorchCommWindow& window, const Call& call) : window(window) {
      const std::lock_guard lock(window.mutex_);
      TORCH_OVERLAP_CHECK(window.registration_ && window.registration_->memory == call.window,
                          kState, to_string(call.name), ": expected a window with a tensor, got '",
                          window.name_, "', whose tensor another thread deregistered");
      ++window.num_issuing_;
    }
    ~Issuing() {
      const std::lock_guard lock(window.mutex_);
      if (--window.num_issuing_ == 0) window.issuing_done_.notify_all();
    }
    TorchCommWindow& window;
  };
  const Issuing issuing(*this, call);
  auto work = comm_->issue(check, std::move(call), async_op, options);
  const std::lock_guard lock(mutex_);
  in_flight_.push_back(work);
  // Works stay in order of issue, which is nearly the order in which they end. The pending ones are
  // kept.
  if (in_flight_.size() >= kReapAt && in_flight_.size() % kReapAt == 0) {
    std::erase_if(in_flight_, [](const WorkPtr& one) {
      return one->is_completed() || one->status() == WorkStatus::NOT_STARTED;
    });
  }
  return work;
}

Call TorchCommWindow::one_sided(OpName name, Primitive primitive, const Registration& registered,
                                int rank) {
  Call call;
  call.name = name;
  call.primitive = primitive;
  call.peer = rank;
  call.window = registered.memory;
  return call;
}

void TorchCommWindow::check_remote_not_capturing(const Registration& registered,
                                                 std::string_view op, int rank) const {
  if (registered.memory->is_reachable(rank) || registered.memory->remote() == nullptr) return;
  check_not_capturing(
      op, device(),
      concat("rank ", rank,
             " is written to by NCCL's one-sided calls, which in a graph wait for an "
             "answer of the receiver that is never given"));
}

WorkPtr TorchCommWindow::put(const Tensor& tensor, int dst_rank, int64_t offset, bool async_op,
                             const PutOptions& options) {
  const auto registered = require("put");
  const Checker check = checker(*registered, "put");
  check.tensor(tensor, "tensor");
  TORCH_OVERLAP_CHECK(tensor.scalar_type() == registered->dtype, kType,
                      "put: expected a tensor of the window's dtype ", registered->dtype, ", got ",
                      tensor.scalar_type());
  check.rank_in_range(dst_rank, "dst_rank");
  TORCH_OVERLAP_CHECK(
      offset >= 0 && offset <= registered->numel && tensor.numel() <= registered->numel - offset,
      kValue, "put: expected elements inside the window's ", registered->numel, ", got ",
      tensor.numel(), " from offset ", offset, " on");
  const auto item = static_cast<int64_t>(tensor.element_size());
  if (dst_rank == check.rank && tensor.numel() > 0 && !device().is_meta()) {
    const auto target =
        registered->memory->view(dst_rank, tensor.sizes(), registered->dtype, offset * item);
    check.no_overlap(tensor, target, /*allow_same=*/true, "a part of the own window");
  }
  check_remote_not_capturing(*registered, "put", dst_rank);
  Call call = one_sided(OpName::put, Primitive::put, *registered, dst_rank);
  call.tensor = tensor;
  call.offset = offset * item;
  auto work = issue(check, std::move(call), async_op, options);
  return options.signal ? signal(dst_rank, async_op, options) : work;
}

WorkPtr TorchCommWindow::signal(int dst_rank, bool async_op, const OpOptions& options) {
  const auto registered = require("signal");
  const Checker check = checker(*registered, "signal");
  check.rank_in_range(dst_rank, "dst_rank");
  check_remote_not_capturing(*registered, "signal", dst_rank);
  return issue(check, one_sided(OpName::signal, Primitive::signal, *registered, dst_rank), async_op,
               options);
}

WorkPtr TorchCommWindow::wait_signal(int peer_rank, bool async_op, const OpOptions& options) {
  const auto registered = require("wait_signal");
  const Checker check = checker(*registered, "wait_signal");
  check.rank_in_range(peer_rank, "peer_rank");
  return issue(check,
               one_sided(OpName::wait_signal, Primitive::wait_signal, *registered, peer_rank),
               async_op, options);
}

at::Tensor TorchCommWindow::map_remote_tensor(int rank) const {
  comm_->require_not_finalized("map_remote_tensor");
  const auto registered = require("map_remote_tensor");
  checker(*registered, "map_remote_tensor").rank_in_range(rank, "rank");
  TORCH_OVERLAP_CHECK(registered->memory->is_reachable(rank), kUnsupported,
                      "map_remote_tensor: expected a rank whose memory rank ", comm_->rank(),
                      " can reach, got ", rank, ": ", registered->memory->unreachable_reason(rank),
                      registered->memory->remote() != nullptr ? "; put() writes to it" : "");
  return registered->memory->view(rank, registered->sizes, registered->dtype);
}

WinAccessType TorchCommWindow::access_type(int peer_rank) const {
  comm_->require_not_finalized("get_attr");
  const auto registered = require("get_attr");
  checker(*registered, "get_attr").rank_in_range(peer_rank, "peer_rank");
  return registered->memory->is_reachable(peer_rank) ? WinAccessType::WIN_ACCESS_TYPE_UNIFIED
                                                     : WinAccessType::WIN_ACCESS_TYPE_SEPARATE;
}

at::Tensor TorchCommWindow::tensor() const {
  const auto registered = require("get_tensor");
  if (registered->owned.defined()) return registered->owned;
  auto alive = registered->tensor->lock();
  TORCH_OVERLAP_CHECK(alive.defined(), kState,
                      "get_tensor: expected a tensor that its owner "
                      "keeps, got one that is gone; register with owning=True");
  return at::Tensor(std::move(alive));
}

bool TorchCommWindow::has_tensor() const {
  const std::lock_guard lock(mutex_);
  return registration_ != nullptr;
}

int64_t TorchCommWindow::bytes() const {
  return static_cast<int64_t>(require("get_size")->memory->bytes());
}

at::ScalarType TorchCommWindow::dtype() const { return require("dtype")->dtype; }

std::vector<int64_t> TorchCommWindow::sizes() const { return require("shape")->sizes; }

}  // namespace torch_overlap
