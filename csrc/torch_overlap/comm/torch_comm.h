#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/call.h"
#include "torch_overlap/comm/hooks.h"
#include "torch_overlap/comm/options.h"
#include "torch_overlap/comm/reduce_op.h"
#include "torch_overlap/comm/work.h"
#include "torch_overlap/common/capture.h"

namespace torch_overlap {

class BatchSendRecv;
class MismatchCheck;
class StoreBootstrap;
class TorchCommWindow;
struct Checker;

// The members of a communicator at one time, and their backend and store. A value type:
// reconfigure(), set_timeout() and set_hints() replace it, and an operation uses the one with which
// it began.
struct Membership {
  BackendContext context;
  std::vector<int> ranks_in_world;
  std::shared_ptr<Backend> backend;
  uint64_t generation = 0;  // number of reconfigurations
  // Handles by rank; empty without enable_reconfigure.
  std::vector<std::string> handles;
  // Number of splits begun.
  std::shared_ptr<std::atomic<uint64_t>> splits = std::make_shared<std::atomic<uint64_t>>(0);
  // Number of windows made, and number of tensors registered with windows.
  std::shared_ptr<std::atomic<uint64_t>> windows = std::make_shared<std::atomic<uint64_t>>(0);
  std::shared_ptr<std::atomic<uint64_t>> registrations = std::make_shared<std::atomic<uint64_t>>(0);
  // Used with check_mismatch; null without peers.
  std::shared_ptr<MismatchCheck> mismatch;
};

// An object that lives as long as the members of a communicator. See TorchComm::attach.
class CommAttachment {
 public:
  virtual ~CommAttachment() = default;
  // Called by finalize() before it continues. Waits, at most for `timeout`, until the device is
  // done with the object.
  virtual void drain(Milliseconds timeout) noexcept = 0;
};

struct ReconfigureOptions {
  // Identifies the generation: equal on all members, and never used before for this communicator.
  int64_t uuid = 0;
  // The members' get_init_handle(). In a list, the position becomes the rank. In a set, those that
  // were members of the same generation keep their order, and new ones come after them.
  std::variant<std::vector<std::string>, std::set<std::string>> init_handles;
  // Timeout of the whole call; 0 selects the communicator's.
  Milliseconds timeout{0};
  // Same as for set_hints().
  Hints hints;
};

// A communicator: one rank's endpoint of a group of processes (or threads) that communicate.
//
// Lifetime: new_comm() or split() makes it, collectively; finalize() ends it, collectively. After
// finalize every operation is refused, and the native communicator lives until the last CUDA graph
// that captured it is destroyed. If it is destroyed without finalize, it warns and aborts.
// reconfigure() gives it other members, also after a failure or abort(); the object, its name and
// its hooks stay.
//
// A child made by fork() cannot use it: every function that communicates throws kState there.
//
// Streams (CUDA). async_op=false: the operation runs on the current stream, and the host does not
// wait. async_op=true: it runs on the communicator's own stream, after everything that is enqueued
// on the current stream at the call; TorchWork::wait() makes the current stream wait for it. All
// operations of one communicator run in the order in which they were issued. CPU: async_op=false
// returns when the operation is done. async_op=true runs it in the background; collectives run in
// the order of issue, a send or recv in the order of those to or from its peer.
//
// Arguments are validated before anything is sent; an invalid one throws Error and leaves the
// communicator usable. Tensors must be contiguous and on the communicator's device. "Parts" of a
// single tensor are equal consecutive pieces of its memory, in rank order.
//
// Autograd does not record these operations (torch.ops.torch_overlap has those that it does). Every
// tensor that is written gets a new version, so a backward that saved it fails, unless the options
// say otherwise. A leaf that requires a gradient is accepted without torch.no_grad(), as in
// torch.distributed.
//
// Threads: any thread may call any function; operations are ordered by when they acquire the lock.
// All ranks must issue collectives in the same order.
class TORCH_OVERLAP_API TorchComm : public std::enable_shared_from_this<TorchComm> {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<at::Tensor>;

  // Makes a communicator. Collective. Rank and size come from the environment, or from `who`.
  static std::shared_ptr<TorchComm> create(const std::string& backend, c10::Device device,
                                           std::optional<std::string> name = std::nullopt,
                                           const CommOptions& options = {},
                                           std::optional<RankAndSize> who = std::nullopt);
  ~TorchComm();
  TorchComm(const TorchComm&) = delete;
  TorchComm& operator=(const TorchComm&) = delete;

  int rank() const { return membership()->context.rank; }
  int size() const { return membership()->context.size; }
  const std::string& name() const { return name_; }
  c10::Device device() const { return device_; }
  const std::string& backend_name() const { return backend_name_; }
  std::string backend_version() const;
  ResolvedOptions options() const { return membership()->context.options; }
  // World ranks of the members, indexed by rank in this communicator. After reconfigure() the
  // communicator is its own world.
  std::vector<int> ranks_in_world() const { return membership()->ranks_in_world; }
  int64_t native_handle() const;
  // The store that is exclusive to this communicator; null for a backend without peers.
  c10::intrusive_ptr<c10d::Store> store() const { return membership()->context.store; }
  // Number of times the members changed. Objects of an older generation (windows, graphs, children)
  // cannot be used in this one.
  uint64_t generation() const { return membership()->generation; }
  // Returns rank, size, store, ... of one consistent generation.
  std::shared_ptr<const Membership> membership() const { return membership_.load(); }

  // --- Point to point --------------------------------------------------------------------------
  // Messages between two ranks match in order of issue among those of one tag. Tags other than 0,
  // and `src` = kAnySource (the work's source() is then the sender), need has_tags().
  WorkPtr send(const Tensor& tensor, int dst, bool async_op, const OpOptions& options = {},
               int tag = 0);
  WorkPtr recv(const Tensor& tensor, int src, bool async_op, const OpOptions& options = {},
               int tag = 0);
  // True for the backends gloo, local and fake. NCCL messages carry no tag.
  bool has_tags() const;
  // Issues all operations at once, so that none waits for another: any pattern of sends and
  // receives that match over the ranks completes. Throws on an empty batch.
  WorkPtr batch_send_recv(std::vector<P2POp> ops, bool async_op, const OpOptions& options = {});

  // --- Collectives in place --------------------------------------------------------------------
  WorkPtr broadcast(const Tensor& tensor, int root, bool async_op, const OpOptions& options = {});
  // A sparse COO tensor (SUM only) becomes the coalesced sum. This blocks the host, because the
  // ranks first exchange their numbers of elements.
  WorkPtr all_reduce(const Tensor& tensor, const ReduceOp& op, bool async_op,
                     const OpOptions& options = {});
  // Sums all ranks' tensors, then applies a residual and RMSNorm, in one operation on the current
  // stream (see RmsNorm). One kernel for small messages over NCCL; every rank gets the same bits if
  // all have the same residual. The tensor and residual_out must not share memory with anything
  // else.
  WorkPtr all_reduce_rms_norm(const Tensor& tensor, const RmsNorm& norm,
                              const OpOptions& options = {});
  // True if the norm of such a tensor may have a quantization. Equal on all ranks.
  bool quantizes_rms_norm(const Tensor& tensor) const;
  // Returns the state of the kernel of all_reduce_rms_norm for such a tensor. Equal on all ranks.
  NormKernel rms_norm_kernel(const Tensor& tensor, const RmsNorm& norm) const;
  // Applies the residual and RMSNorm of all_reduce_rms_norm to a sum that was computed otherwise.
  // Local; one kernel on GPUs.
  void add_rms_norm(const Tensor& sum, const RmsNorm& norm);
  // The root's tensor becomes the result; the other ranks' tensors are unchanged.
  WorkPtr reduce(const Tensor& tensor, int root, const ReduceOp& op, bool async_op,
                 const OpOptions& options = {});

  // --- Gathering: outputs[r] or part r of `output` becomes rank r's `input` ----------------------
  WorkPtr all_gather(const Tensors& outputs, const Tensor& input, bool async_op,
                     const OpOptions& options = {});
  WorkPtr all_gather_single(const Tensor& output, const Tensor& input, bool async_op,
                            const OpOptions& options = {});
  // Sizes may differ by rank: outputs[r] must have the size of rank r's input, on every rank.
  WorkPtr all_gather_v(const Tensors& outputs, const Tensor& input, bool async_op,
                       const OpOptions& options = {});
  // `outputs` is empty except at the root.
  WorkPtr gather(const Tensors& outputs, const Tensor& input, int root, bool async_op,
                 const OpOptions& options = {});
  // `output` is used only on the root, and may be undefined elsewhere.
  WorkPtr gather_single(const Tensor& output, const Tensor& input, int root, bool async_op,
                        const OpOptions& options = {});

  // --- Scattering: `output` becomes the reduction of all ranks' inputs[rank()] -------------------
  WorkPtr reduce_scatter(const Tensor& output, const Tensors& inputs, const ReduceOp& op,
                         bool async_op, const OpOptions& options = {});
  WorkPtr reduce_scatter_single(const Tensor& output, const Tensor& input, const ReduceOp& op,
                                bool async_op, const OpOptions& options = {});
  WorkPtr reduce_scatter_v(const Tensor& output, const Tensors& inputs, const ReduceOp& op,
                           bool async_op, const OpOptions& options = {});
  // `output` becomes the root's inputs[rank()]; `inputs` is empty except at the root.
  WorkPtr scatter(const Tensor& output, const Tensors& inputs, int root, bool async_op,
                  const OpOptions& options = {});

  // --- All to all: outputs[r] becomes rank r's inputs[rank()] ------------------------------------
  WorkPtr all_to_all(const Tensors& outputs, const Tensors& inputs, bool async_op,
                     const OpOptions& options = {});
  WorkPtr all_to_all_single(const Tensor& output, const Tensor& input, bool async_op,
                            const OpOptions& options = {});
  // Splits are numbers of slices of dimension 0; empty splits select equal parts.
  WorkPtr all_to_all_v_single(const Tensor& output, const Tensor& input,
                              const std::vector<int64_t>& output_splits,
                              const std::vector<int64_t>& input_splits, bool async_op,
                              const OpOptions& options = {});

  // CPU: no rank returns before all ranks have entered. CUDA: the same holds on the stream.
  WorkPtr barrier(bool async_op, const OpOptions& options = {});

  // --- One-sided ---------------------------------------------------------------------------------
  // Makes a window of this communicator (comm/window.h), and registers `tensor` with it if it is
  // defined. Collective.
  std::shared_ptr<TorchCommWindow> new_window(const Tensor& tensor = {});

  // Registers the memory of a tensor that many operations will use, so that NCCL need not copy it
  // through its own buffers. Local. No effect on other backends. The caller must deregister it
  // before the memory is freed; reconfigure() deregisters everything.
  void tensor_register(const Tensor& tensor);
  void tensor_deregister(const Tensor& tensor);

  // --- Management ------------------------------------------------------------------------------
  // Makes a child communicator. Collective over this communicator. The position in `ranks` becomes
  // the rank in the child. Ranks of different children pass different lists in the same call.
  // Returns null for an empty list. A list that does not contain its own rank, contains a rank
  // twice or one out of range, or differs from the other members' lists is an error on every rank.
  // Options come from the parent, overridden by `hints` and `timeout`.
  std::shared_ptr<TorchComm> split(const std::vector<int>& ranks,
                                   std::optional<std::string> name = std::nullopt,
                                   const OpOptions& options = {});
  // Same as above, with arguments that are read after the call has begun: what `read` throws is an
  // error on every rank too.
  struct SplitArguments {
    std::vector<int> ranks;
    std::optional<std::string> name;
    OpOptions options;
  };
  std::shared_ptr<TorchComm> split(const std::function<SplitArguments()>& read);
  // Waits for all operations, at most for the timeout, and ends the communicator. Collective.
  // Throws if called twice.
  void finalize();
  // Ends all operations on this rank at once, then runs the hooks. Never ends the process. Also
  // ends a finalize() that waits in another thread.
  void abort();
  bool is_aborted() const;
  // True if the current stream is being captured into a graph.
  bool is_capturing() const { return torch_overlap::is_capturing(device_); }
  // True if abort() ends pending operations: the case for every backend here.
  bool is_abort_supported() const { return true; }

  // --- Other members ---------------------------------------------------------------------------
  // Identifies this rank in reconfigure(): text without line ends, constant for the life of the
  // object. Other ranks get it by any means that does not need this communicator.
  const std::string& init_handle() const { return init_handle_; }
  // Gives the communicator the members with the given handles, and makes it usable again if it was
  // aborted or had failed. Collective over these ranks, which must pass the same uuid and handles.
  // Ends pending operations with an error. Blocks, at most for the timeout; then the error names
  // the ranks that did not arrive, and another call with another uuid may follow. The returned work
  // is done.
  //
  // Requires enable_reconfigure, and a store that outlives the lost ranks: one that torchrun's
  // agent or a launcher serves. A new member makes its own communicator with rank 0 of size 1, the
  // same name and the same store. Children of split keep their members; each is reconfigured on its
  // own.
  WorkPtr reconfigure(const ReconfigureOptions& options);
  // Sets the timeout from the next operation on. Like set_hints(), it may be called after abort(),
  // but not after finalize().
  void set_timeout(Milliseconds timeout);
  // Merges `hints` over the earlier ones. Those that the backend's library reads only when a
  // communicator is made take effect in later children and after reconfigure().
  void set_hints(const Hints& hints);

  bool is_finalized() const {
    const State state = state_.load();
    return state == State::kFinalizing || state == State::kFinalized;
  }

  // Throws kState after finalize(), for calls that would have no effect any more.
  void require_not_finalized(std::string_view op) const;
  // Throws kState in a fork of the process that made it.
  void require_own_process(std::string_view op) const;

  Hooks& hooks() { return *hooks_; }

  // An object that is made once for these members and ends with them: by finalize(), reconfigure()
  // or the destruction of this object. It must not keep the communicator alive. Null if nothing is
  // attached under the name.
  std::shared_ptr<CommAttachment> attachment(std::string_view name) const;
  void attach(std::string_view name, std::shared_ptr<CommAttachment> what);

  // Returns a bootstrap for an object that all ranks set up together; null for a backend without
  // peers. `name` must be equal on all ranks and unique to that object; callers put a number into
  // it that all ranks count. If this rank waits for another one in vain, that one has not counted
  // the object, and the two would never match again: therefore the communicator is then aborted.
  // abort() and a failure of the communicator end a wait for ranks.
  std::unique_ptr<StoreBootstrap> bootstrap(const Membership& members, std::string name);

 private:
  friend class TorchCommWindow;
  enum class State { kActive, kFinalizing, kFinalized, kAborted, kReconfiguring };

  TorchComm(std::string backend_name, BackendContext context, std::vector<int> ranks_in_world);
  // Called once, with the backend; afterwards the object can be used.
  void begin(std::shared_ptr<Backend> backend);
  // Replaces the membership with a changed copy.
  template <typename Change>
  void change(const Change& apply);
  std::shared_ptr<Membership> next_generation(const ReconfigureOptions& options,
                                              const std::vector<std::string>& handles);
  // Returns the options with `hints` merged over them. Warns of hints that the backend does not
  // know.
  ResolvedOptions options_with(const Hints& hints) const;
  Checker checker(std::string_view op) const;
  void check_tag(const Checker& check, int tag) const;
  std::string abort_out_of_step(uint64_t generation, bool has_left);
  void abort_with(const std::function<void(Backend&)>& end);
  WorkPtr all_reduce_sparse(const Tensor& tensor, const ReduceOp& op, bool async_op,
                            const OpOptions& options);
  // Issues an operation; every operation passes through here: state, options, hooks, the
  // backend. `check` is what the arguments were checked against, and holds the members that run it.
  WorkPtr issue(const Checker& check, Call call, bool async_op, const OpOptions& options);
  // Records the call, then issue_compared().
  WorkPtr issue_recorded(const Membership& members, Call call);
  // Compares the call with the other ranks' if check_mismatch is on, and passes it to the backend.
  WorkPtr issue_compared(const Membership& members, Call call) const;
  void require_active(std::string_view op) const;
  static uint64_t allocate_op_id();
  // Collective. Throws on all ranks unless every rank's request is valid and they match.
  void agree_on_split(const Membership& members, StoreBootstrap* store,
                      const std::string& mine) const;
  std::shared_ptr<TorchComm> split_checked(const Membership& members, StoreBootstrap* store,
                                           uint64_t sequence, const std::vector<int>& ranks,
                                           const std::optional<std::string>& name,
                                           const OpOptions& options);
  // Null if nothing records calls.
  std::shared_ptr<CallRecord> record_split(const Membership& members, uint64_t id) const;
  void drop_attachments();
  std::vector<std::shared_ptr<CommAttachment>> attachments() const;

  const std::string backend_name_;
  const std::string name_;
  const c10::Device device_;
  const std::string init_handle_;
  const ProcessStamp process_;
  const std::shared_ptr<Hooks> hooks_;
  const std::shared_ptr<std::atomic<Milliseconds>> timeout_;
  std::atomic<std::shared_ptr<const Membership>> membership_;
  std::mutex membership_mutex_;  // serializes writers of membership_; readers need no lock
  std::set<int64_t> used_uuids_;
  std::atomic<State> state_{State::kActive};
  std::mutex registered_mutex_;
  std::map<const void*, size_t> registered_;  // address and bytes of registered memory
  uint64_t registered_generation_ = 0;
  mutable std::mutex attachments_mutex_;
  using Attachments = std::map<std::string, std::shared_ptr<CommAttachment>, std::less<>>;
  Attachments attachments_;
};

// Sends and receives that are issued together. Made by TorchComm; may be filled again after
// issue().
class TORCH_OVERLAP_API BatchSendRecv {
 public:
  explicit BatchSendRecv(std::shared_ptr<TorchComm> comm) : comm_(std::move(comm)) {}
  void send(const at::Tensor& tensor, int dst, int tag = 0);
  void recv(const at::Tensor& tensor, int src, int tag = 0);
  // Issues the added operations, and leaves the batch empty.
  WorkPtr issue(bool async_op, const BatchP2POptions& options = {});
  const std::vector<P2POp>& ops() const { return ops_; }

 private:
  std::shared_ptr<TorchComm> comm_;
  std::vector<P2POp> ops_;
};

}  // namespace torch_overlap
