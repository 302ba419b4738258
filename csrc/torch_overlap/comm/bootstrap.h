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

// Explicit rank and size win over the environment (ranks that are threads of one process need
// that).
struct RankAndSize {
  int rank;
  int size;
};

// `given`, else what a launcher put into the environment.
TORCH_OVERLAP_API RankAndSize who_am_i(const Env& env, std::optional<RankAndSize> given);

// A connection of our own: a store's client serves one thread at a time, and a wait would keep
// every other user from it. A store that cannot be cloned is used as it is. `op` names who asks in
// the error (kRuntime) that comes when the store has ended, or its host does not answer within
// `timeout`.
TORCH_OVERLAP_API c10::intrusive_ptr<c10d::Store> own_connection(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& op, Milliseconds timeout);

// `given`, else the process's store: torchrun's agent serves it, or rank 0 at MASTER_ADDR:
// MASTER_PORT, once for all communicators.
// On a connection of its own. Throws kRuntime if nobody
// serves it within `timeout`.
TORCH_OVERLAP_API c10::intrusive_ptr<c10d::Store> open_store(
    const Env& env, const c10::intrusive_ptr<c10d::Store>& given, RankAndSize who,
    const std::string& op, Milliseconds timeout);

// Collective. Opens the store, agrees with the other ranks on a generation of `name`, and
// checks that all ranks ask for the same thing (`digest`: any text that must be equal everywhere; a
// difference is an error on every rank that shows both sides). Returns a store that is this
// communicator's alone.
//
// Throws kTimeout, naming the ranks that did not come; then all may try again, whichever of them
// had given up before. A rank succeeds only if all do. A name may also be used again after it was
// met: each time is another generation. torchrun's run id and restart count are part of every key.
// What stays in the store for good is a number and `size` small keys for each name, not for each
// generation (torch's gloo leaves its addresses, too), and a word for each time that ranks gave up.
// The store has compare_set, as torch's own have.
TORCH_OVERLAP_API c10::intrusive_ptr<c10d::Store> rendezvous(
    const Env& env, const std::string& name, const std::string& digest, Milliseconds timeout,
    c10::intrusive_ptr<c10d::Store> store, RankAndSize who);

// Where the keys of a name begin, for one of the things that are done under names: of this run and
// restart alone. No name can be taken for a part of another key.
std::string name_prefix(const Env& env, const std::string& what, const std::string& name);

// Deletes what nobody needs any more. The keys stay where a store cannot delete, or is gone.
TORCH_OVERLAP_API void delete_keys(c10d::Store& store,
                                   const std::vector<std::string>& keys) noexcept;

// Says that this rank has read `keys` for the last time; the last of `readers` to say so deletes
// them. `count` is the key of their number.
TORCH_OVERLAP_API void done_with_keys(c10d::Store& store, const std::string& count, int readers,
                                      const std::vector<std::string>& keys) noexcept;

// This rank's part of an exchange, for a rank that does not want the others'. Waits for nobody.
TORCH_OVERLAP_API void publish(c10d::Store& store, const std::string& key, int rank, int size,
                               const std::string& mine);

// Whom ranks wait for each other for, and what it knows. Each may be empty.
struct ExchangeOwner {
  // A result that is not empty ends the wait with a kState error: the reason.
  std::function<std::string()> why_end;
  // The same of a rank that has not come, with a kRuntime error: that it has left.
  std::function<std::string(int rank)> why_left;
  // When a rank did not come in time, or has left: what it returns is added to the error.
  std::function<std::string(bool has_left)> on_missing;
};

// Collective over a store: every rank puts in `mine` under `key`, gets everybody's. Bounded by
// `timeout`; the error names the ranks that did not come, or says that the store failed (kRuntime).
// While ranks are missing, `owner` is asked. The last rank to read deletes the keys; after an error
// some may stay.
TORCH_OVERLAP_API std::vector<std::string> exchange(c10d::Store& store, const std::string& key,
                                                    int rank, int size, const std::string& mine,
                                                    Milliseconds timeout,
                                                    const ExchangeOwner& owner = {});

// The keys of `store` below `prefix`.
TORCH_OVERLAP_API c10::intrusive_ptr<c10d::Store> prefixed_store(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix);

// Gives a device without an index the one of the local rank (LOCAL_RANK, else rank modulo the
// number of devices), and makes an accelerator device the thread's current one.
TORCH_OVERLAP_API c10::Device resolve_device(c10::Device device, const Env& env, int rank);

}  // namespace torch_overlap
