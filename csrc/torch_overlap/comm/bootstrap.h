#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/options.h"

namespace torch_overlap {

// Rank and size. Explicit ones override the environment, which ranks that are threads of one
// process need.
struct RankAndSize {
  int rank;
  int size;
};

// Returns `given`; otherwise what a launcher put into the environment.
TORCH_OVERLAP_API RankAndSize resolve_rank_and_size(const Env& env,
                                                    std::optional<RankAndSize> given);

// Returns a separate connection to `store`: a store's client serves one thread at a time, and a
// wait would block every other user. Returns `store` itself if it cannot be cloned. Throws kRuntime
// if the store has ended, or if its host does not answer within `timeout`; `op` names the caller in
// the error.
TORCH_OVERLAP_API c10::intrusive_ptr<c10d::Store> clone_store(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& op, Milliseconds timeout);

// Returns a separate connection to `given`; otherwise to the process's store, which torchrun's
// agent serves, or rank 0 at MASTER_ADDR:MASTER_PORT, once for all communicators. Throws kRuntime
// if nothing serves it within `timeout`.
TORCH_OVERLAP_API c10::intrusive_ptr<c10d::Store> open_store(
    const Env& env, const c10::intrusive_ptr<c10d::Store>& given, RankAndSize who,
    const std::string& op, Milliseconds timeout);

// Collective. Opens the store, agrees with the other ranks on a generation of `name`, and checks
// that all ranks make the same request. `digest` is any text that must be equal on all ranks; a
// difference is an error on every rank that shows both sides. Returns a store that is exclusive to
// this communicator.
//
// Throws kTimeout, naming the ranks that did not arrive. All ranks may then try again, no matter
// which of them gave up first. A rank succeeds only if all do. A name may be used again after a
// rendezvous succeeded: each use is another generation. torchrun's run id and restart count are
// part of every key. The store permanently keeps one number and `size` small keys for each name,
// not for each generation (torch's gloo leaves its addresses, too), and one word for each attempt
// that was given up. The store must have compare_set, as torch's own stores do.
TORCH_OVERLAP_API c10::intrusive_ptr<c10d::Store> rendezvous(
    const Env& env, const std::string& name, const std::string& digest, Milliseconds timeout,
    c10::intrusive_ptr<c10d::Store> store, RankAndSize who);

// Returns the prefix of the keys of a name, for one kind of use (`what`). It is unique to this run
// and restart. No name can be read as part of another key.
std::string name_prefix(const Env& env, const std::string& what, const std::string& name);

// Deletes keys that no rank needs any more. The keys stay if the store cannot delete, or has ended.
TORCH_OVERLAP_API void delete_keys(c10d::Store& store,
                                   const std::vector<std::string>& keys) noexcept;

// Records that this rank has read `keys` for the last time. The last of `readers` to do so deletes
// them. `count` is the key of the counter.
TORCH_OVERLAP_API void release_keys(c10d::Store& store, const std::string& count, int readers,
                                    const std::vector<std::string>& keys) noexcept;

// Publishes this rank's part of an exchange, for a rank that does not need the others' parts. Does
// not wait.
TORCH_OVERLAP_API void publish(c10d::Store& store, const std::string& key, int rank, int size,
                               const std::string& mine);

// Callbacks of the owner of an exchange. Each may be empty.
struct ExchangeCallbacks {
  // A non-empty result ends the wait with a kState error and is its reason.
  std::function<std::string()> abort_reason;
  // A non-empty result, that a missing rank has left, ends the wait with a kRuntime error.
  std::function<std::string(int rank)> departure_reason;
  // Called if a rank did not arrive in time or has left, or if the wait is interrupted. The
  // returned text is appended to the error, unless that is the interrupt's.
  std::function<std::string(bool has_left)> on_missing;
};

// Collective over a store: every rank publishes `mine` under `key` and gets the parts of all ranks.
// Bounded by `timeout`. The error names the ranks that did not arrive, or reports that the store
// failed (kRuntime). While ranks are missing, the callbacks of `owner` are polled. The last rank to
// read deletes the keys; after an error some may stay.
TORCH_OVERLAP_API std::vector<std::string> exchange(c10d::Store& store, const std::string& key,
                                                    int rank, int size, const std::string& mine,
                                                    Milliseconds timeout,
                                                    const ExchangeCallbacks& owner = {});

// Returns a view of `store` whose keys all start with `prefix`.
TORCH_OVERLAP_API c10::intrusive_ptr<c10d::Store> make_prefix_store(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix);

// Returns the device with an index. A device without one gets that of the local rank (LOCAL_RANK,
// otherwise rank modulo the number of devices). Makes an accelerator device the thread's current
// one.
TORCH_OVERLAP_API c10::Device resolve_device(c10::Device device, const Env& env, int rank);

}  // namespace torch_overlap
