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

// The members of a communicator at one time, and what they talk over. A value: reconfigure(),
// set_timeout() and set_hints() put another in its place, and an operation works on the one that it
// began with.
struct Membership {
  BackendContext context;
  std::vector<int> ranks_in_world;
  std::shared_ptr<Backend> backend;
  uint64_t generation = 0;  // counts the reconfigurations
  // By rank; empty without enable_reconfigure.
  std::vector<std::string> handles;
  // How many splits were begun.
  std::shared_ptr<std::atomic<uint64_t>> splits = std::make_shared<std::atomic<uint64_t>>(0);
  // How many windows were made, and tensors registered with windows.
  std::shared_ptr<std::atomic<uint64_t>> windows = std::make_shared<std::atomic<uint64_t>>(0);
  std::shared_ptr<std::atomic<uint64_t>> registrations = std::make_shared<std::atomic<uint64_t>>(0);
  // Used with check_mismatch; null without peers.
  std::shared_ptr<MismatchCheck> mismatch;
};

// What lives as long as the members of a communicator: see TorchComm::attach.
class CommAttachment {
 public:
  virtual ~CommAttachment() = default;
  // Before finalize() goes on: waits until the device is done with it, at most so long.
  virtual void drain(Milliseconds timeout) noexcept = 0;
};

struct ReconfigureOptions {
  // Names the generation: equal on all members, and never used before for this communicator.
  int64_t uuid = 0;
  // The members' get_init_handle(). A list: the position becomes the rank. A set: those that were
  // members together keep their order, new ones come after.
  std::variant<std::vector<std::string>, std::set<std::string>> init_handles;
  // For the whole of it; 0: the communicator's.
  Milliseconds timeout{0};
  // As for set_hints().
  Hints hints;
};

// A communicator: one rank's end of a group of processes (or threads) that communicate.
//
// Life: new_comm() or split() makes it, collectively; finalize() ends it, collectively. After
// finalize every operation is refused, and the native communicator lives on until the last CUDA
// graph that captured it is gone. Destroyed without finalize, it warns and aborts. reconfigure()
// gives it other members, also after a failure or abort(); the object, its name and its hooks stay.
//
// A child made by fork() cannot use it: every function that communicates throws kState there.
//
// Streams (CUDA). async_op=false: the operation runs on the current stream, and the host does not
// wait. async_op=true: it runs on the communicator's own stream, after everything that is on the
// current stream now; TorchWork::wait() orders the current stream after it. All operations of one
// communicator run in the order in which they were issued.
// CPU: async_op=false returns when the operation is done. async_op=true runs it in the background;
// collectives run in the order of issue, a send or recv in the order of those to or from its peer.
//
// Arguments are checked before anything is sent; a mistake throws Error and leaves the communicator
// usable. Tensors must be contiguous and on the communicator's device. "Parts" of a single tensor
// are equal consecutive pieces of its memory, in rank order.
//
// Autograd does not record operations here (torch.ops.torch_overlap has those that it does). What
// is written gets another version, so a backward that saved it fails. As torch.distributed does, a
// leaf that requires a gradient is taken, without torch.no_grad().
//
// Threads: any thread may call any function; operations are ordered by when they take the lock. All
// ranks must issue collectives in the same order.
class TORCH_OVERLAP_API TorchComm : public std::enable_shared_from_this<TorchComm> {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<at::Tensor>;

  // Collective. Rank and size come from the environment, or from `who`.
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
  // The world ranks of the members: position = rank here. After reconfigure() the communicator is
  // its own world.
  std::vector<int> ranks_in_world() const { return membership()->ranks_in_world; }
  int64_t native_handle() const;
  // This communicator's own part of the store; null for a backend without peers.
  c10::intrusive_ptr<c10d::Store> store() const { return membership()->context.store; }
  // How often the members changed. What was made of an older generation (windows, graphs, children)
  // is of no use in this one.
  uint64_t generation() const { return membership()->generation; }
  // Rank, size, store, ... of one and the same generation.
  std::shared_ptr<const Membership> membership() const { return membership_.load(); }

  // --- Point to point --------------------------------------------------------------------------
  // Messages between two ranks match in order of issue among those of one tag. Tags other than 0,
  // and `src` = kAnySource (the work's source() tells whose message came), need has_tags().
  WorkPtr send(const Tensor& tensor, int dst, bool async_op, const OpOptions& options = {},
               int tag = 0);
  WorkPtr recv(const Tensor& tensor, int src, bool async_op, const OpOptions& options = {},
               int tag = 0);
  // True on the CPU (backends gloo and local); NCCL messages carry no tag.
  bool has_tags() const;
  // All operations at once, none waiting for another: any pattern of sends and receives that match
  // over the ranks ends. Throws on an empty batch.
  WorkPtr batch_send_recv(std::vector<P2POp> ops, bool async_op, const OpOptions& options = {});

  // --- Collectives in place --------------------------------------------------------------------
  WorkPtr broadcast(const Tensor& tensor, int root, bool async_op, const OpOptions& options = {});
  // A sparse COO tensor (SUM only) becomes the coalesced sum; that one blocks the host, because the
  // ranks first tell each other how many elements they have.
  WorkPtr all_reduce(const Tensor& tensor, const ReduceOp& op, bool async_op,
                     const OpOptions& options = {});
  // The sum of all ranks' tensors, then a residual and RMSNorm, in one operation (see RmsNorm), on
  // the current stream. Small messages over NCCL: one kernel; every rank gets the same bits if all
  // have the same residual. The tensor and residual_out share no memory with anything else.
  WorkPtr all_reduce_rms_norm(const Tensor& tensor, const RmsNorm& norm,
                              const OpOptions& options = {});
  // What follows the sum there, of one that has been made otherwise: local, in one kernel on GPUs.
  void add_rms_norm(const Tensor& sum, const RmsNorm& norm);
  // The root's tensor becomes the result; the other ranks' stay as they are.
  WorkPtr reduce(const Tensor& tensor, int root, const ReduceOp& op, bool async_op,
                 const OpOptions& options = {});

  // --- Gathering: outputs[r] or part r of `output` becomes rank r's `input` ----------------------
  WorkPtr all_gather(const Tensors& outputs, const Tensor& input, bool async_op,
                     const OpOptions& options = {});
  WorkPtr all_gather_single(const Tensor& output, const Tensor& input, bool async_op,
                            const OpOptions& options = {});
  // Sizes may differ by rank: outputs[r] has rank r's size, on every rank.
  WorkPtr all_gather_v(const Tensors& outputs, const Tensor& input, bool async_op,
                       const OpOptions& options = {});
  // `outputs` is empty except at the root.
  WorkPtr gather(const Tensors& outputs, const Tensor& input, int root, bool async_op,
                 const OpOptions& options = {});
  // `output` is looked at only on the root, and may be undefined elsewhere.
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
  // Splits count slices of dimension 0; empty splits mean equal parts.
  WorkPtr all_to_all_v_single(const Tensor& output, const Tensor& input,
                              const std::vector<int64_t>& output_splits,
                              const std::vector<int64_t>& input_splits, bool async_op,
                              const OpOptions& options = {});

  // CPU: no rank returns before all have come. CUDA: the same on the stream.
  WorkPtr barrier(bool async_op, const OpOptions& options = {});

  // --- One-sided ---------------------------------------------------------------------------------
  // Collective. A window of this communicator (comm/window.h), with `tensor` registered if it is
  // defined.
  std::shared_ptr<TorchCommWindow> new_window(const Tensor& tensor = {});

  // Local. Prepares the memory of a tensor that will be in many operations: NCCL then need not copy
  // it through its own buffers. Without effect on other backends. Whoever registers deregisters,
  // before the memory goes; reconfigure() does for all.
  void tensor_register(const Tensor& tensor);
  void tensor_deregister(const Tensor& tensor);

  // --- Management ------------------------------------------------------------------------------
  // Collective over this communicator. The position in `ranks` becomes the rank in the child. Ranks
  // of different children pass different lists in the same call. Empty list: null. A list that does
  // not name its own rank, names one twice or out of range, or differs from its members' lists is
  // an error on every rank. Options come from the parent, then `hints` and `timeout` over them.
  std::shared_ptr<TorchComm> split(const std::vector<int>& ranks,
                                   std::optional<std::string> name = std::nullopt,
                                   const OpOptions& options = {});
  // The same of arguments that are read when it has begun: what `read` throws is an error on every
  // rank too.
  struct SplitArguments {
    std::vector<int> ranks;
    std::optional<std::string> name;
    OpOptions options;
  };
  std::shared_ptr<TorchComm> split(const std::function<SplitArguments()>& read);
  // Collective. Waits for all operations, at most the timeout. Throws if called twice.
  void finalize();
  // Ends everything on this rank at once, then runs the hooks; never ends the process. Also ends a
  // finalize() that waits in another thread.
  void abort();
  bool is_aborted() const;
  // Is the current stream being captured into a graph?
  bool is_capturing() const { return torch_overlap::is_capturing(device_); }
  // Whether abort() ends what is under way: true for every backend here.
  bool is_abort_supported() const { return true; }

  // --- Other members ---------------------------------------------------------------------------
  // What names this rank in reconfigure(): text without line ends, the same for the life of the
  // object. Others get it by any way that does not need this communicator.
  const std::string& init_handle() const { return init_handle_; }
  // Collective over the ranks whose handles are given, which pass the same uuid and handles: the
  // communicator gets these members, and becomes usable again if it was aborted or had failed. Ends
  // what is under way with an error. Blocks, at most the timeout; then the error names who did not
  // come, and another call with another uuid may follow. The result is done.
  //
  // Needs enable_reconfigure, and a store that has outlived the lost ranks: one that torchrun's
  // agent or a launcher serves. A new member makes its own end with rank 0 of size 1, the same name
  // and the same store. Children of split keep their members; each is reconfigured on its own.
  WorkPtr reconfigure(const ReconfigureOptions& options);
  // From the next operation on. Like set_hints, also after abort(), and not after finalize().
  void set_timeout(Milliseconds timeout);
  // Put over those given before. What the backend's library takes when a communicator is made has
  // its effect in later children and after reconfigure().
  void set_hints(const Hints& hints);

  bool is_finalized() const {
    const State state = state_.load();
    return state == State::kFinalizing || state == State::kFinalized;
  }

  // Throws kState after finalize(), for what would have no effect any more.
  void require_not_finalized(std::string_view op) const;
  // Throws kState in a fork of the process that made it.
  void require_own_process(std::string_view op) const;

  Hooks& hooks() { return *hooks_; }

  // What else is made once for these members and ends with them: by finalize(), reconfigure() or
  // the end of the object. It may not keep the communicator. Null if nothing was attached by the
  // name.
  std::shared_ptr<CommAttachment> attachment(std::string_view name) const;
  void attach(std::string_view name, std::shared_ptr<CommAttachment> what);

  // For something that all ranks set up together; null for a backend without peers. `name` is equal
  // on all ranks, and that thing's alone: it has a number that they count. A rank that is waited
  // for in vain has not counted it, and would never meet the others again: so the communicator is
  // aborted then. abort() and a failure of the communicator end a wait for ranks.
  std::unique_ptr<StoreBootstrap> bootstrap(const Membership& members, std::string name);

 private:
  friend class TorchCommWindow;
  enum class State { kActive, kFinalizing, kFinalized, kAborted, kReconfiguring };

  TorchComm(std::string backend_name, BackendContext context, std::vector<int> ranks_in_world);
  // Once, with the backend: the object can be used.
  void begin(std::shared_ptr<Backend> backend);
  // Puts a changed copy in the place of the membership.
  template <typename Change>
  void change(const Change& apply);
  std::shared_ptr<Membership> next_generation(const ReconfigureOptions& options,
                                              const std::vector<std::string>& handles);
  // The options with `hints` over them. Warns of hints that the backend does not know.
  ResolvedOptions options_with(const Hints& hints) const;
  Checker checker(std::string_view op) const;
  void check_tag(const Checker& check, int tag) const;
  std::string out_of_step(uint64_t generation, bool has_left);
  void abort_by(const std::function<void(Backend&)>& end);
  WorkPtr all_reduce_sparse(const Tensor& tensor, const ReduceOp& op, bool async_op,
                            const OpOptions& options);
  // The one way of every operation: state, options, hooks, the backend's launch.
  // `check`: what the arguments were checked against, and what the operation therefore runs on.
  WorkPtr issue(const Checker& check, Call call, bool async_op, const OpOptions& options);
  // Writes the call down, compares it with the other ranks' where that was asked for, and hands it
  // to the backend.
  WorkPtr launch(const Membership& members, Call call);
  WorkPtr launch_compared(const Membership& members, Call call) const;
  void require_active(std::string_view op) const;
  static uint64_t take_op_id();
  // Collective: throws on all ranks unless every rank's wish is good and they fit each other.
  void agree_on_split(const Membership& members, StoreBootstrap* store,
                      const std::string& mine) const;
  std::shared_ptr<TorchComm> split_checked(const Membership& members, StoreBootstrap* store,
                                           uint64_t sequence, const std::vector<int>& ranks,
                                           const std::optional<std::string>& name,
                                           const OpOptions& options);

  const std::string backend_name_;
  const std::string name_;
  const c10::Device device_;
  const std::string init_handle_;
  const ProcessStamp process_;
  const std::shared_ptr<Hooks> hooks_;
  const std::shared_ptr<std::atomic<Milliseconds>> timeout_;
  std::atomic<std::shared_ptr<const Membership>> membership_;
  std::mutex changes_;  // of membership_; what only reads takes none
  std::set<int64_t> used_uuids_;
  std::atomic<State> state_{State::kActive};
  std::mutex registered_mutex_;
  std::map<const void*, size_t> registered_;  // memory of tensor_register, and its bytes
  uint64_t registered_generation_ = 0;
  void drop_attachments();
  std::vector<std::shared_ptr<CommAttachment>> attachments() const;
  mutable std::mutex attachments_mutex_;
  using Attachments = std::map<std::string, std::shared_ptr<CommAttachment>, std::less<>>;
  Attachments attachments_;
};

// Sends and receives that are issued together. Made by TorchComm; may be filled again after issue.
class TORCH_OVERLAP_API BatchSendRecv {
 public:
  explicit BatchSendRecv(std::shared_ptr<TorchComm> comm) : comm_(std::move(comm)) {}
  void send(const at::Tensor& tensor, int dst);
  void recv(const at::Tensor& tensor, int src);
  // Issues what was added, and leaves the batch empty.
  WorkPtr issue(bool async_op, const BatchP2POptions& options = {});
  const std::vector<P2POp>& ops() const { return ops_; }

 private:
  std::shared_ptr<TorchComm> comm_;
  std::vector<P2POp> ops_;
};

}  // namespace torch_overlap
