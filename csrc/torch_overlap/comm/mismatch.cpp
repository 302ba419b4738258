#include "torch_overlap/comm/mismatch.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/interrupt.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/store_access.h"

namespace torch_overlap {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Milliseconds kCompareSlice{200};
constexpr const char* kStorePrefix = "check_mismatch";
// Maximum number of stale entries that each send or receive looks for.
constexpr size_t kMaxKeysCleaned = 2;

// Description of the call that one rank is about to issue.
struct Facts {
  std::string shown;           // for the error
  std::string common;          // must be equal on all ranks
  std::vector<int64_t> gives;  // elements sent to each rank, if sizes may differ by rank
  std::vector<int64_t> takes;  // elements received from each rank
};

at::ScalarType dtype_of(const Call& call) {
  for (const auto& tensor : call.tensors()) return tensor.scalar_type();
  return at::kByte;
}

std::vector<int64_t> numels(const RankTensors& blocks, int size) {
  std::vector<int64_t> all;
  for (const auto& part : blocks.all(size)) all.push_back(part.numel());
  return all;
}

Facts facts_of(const Call& call, int rank, int size) {
  Facts facts;
  const std::vector<int64_t> none(size, 0);
  facts.gives = facts.takes = none;
  const int64_t mine = call.tensor.defined() ? call.tensor.numel() : 0;
  const bool at_root = call.root == rank;
  const bool has_dtype = call.primitive != Primitive::barrier;
  bool reduces = false;
  bool has_root = false;
  int64_t common_size = 0;
  switch (call.primitive) {
    case Primitive::all_reduce:
      reduces = true;
      common_size = mine;
      break;
    case Primitive::reduce:
      reduces = has_root = true;
      common_size = mine;
      break;
    case Primitive::broadcast:
      has_root = true;
      common_size = mine;
      break;
    case Primitive::all_gather:
      facts.gives.assign(size, mine);
      facts.takes = numels(call.out, size);
      break;
    case Primitive::reduce_scatter:
      reduces = true;
      facts.gives = numels(call.in, size);
      facts.takes.assign(size, mine);
      break;
    case Primitive::all_to_all:
      facts.gives = numels(call.in, size);
      facts.takes = numels(call.out, size);
      break;
    case Primitive::scatter:
      has_root = true;
      if (at_root) facts.gives = numels(call.in, size);
      facts.takes[call.root] = mine;
      break;
    case Primitive::gather:
      has_root = true;
      if (at_root) facts.takes = numels(call.out, size);
      facts.gives[call.root] = mine;
      break;
    case Primitive::p2p:
      for (const P2POp& op : call.p2p) {
        if (op.peer == kAnySource) continue;
        (op.type == P2POp::Type::SEND ? facts.gives : facts.takes)[op.peer] += op.tensor.numel();
      }
      break;
    case Primitive::barrier:
    case Primitive::put:  // window operations are not compared
    case Primitive::signal:
    case Primitive::wait_signal:
      break;
  }
  facts.common = concat(to_string(call.primitive), " ", common_size);
  facts.shown = concat(to_string(call.name), "(");
  if (has_dtype) {
    const auto dtype = concat(dtype_of(call));
    facts.common += concat(" ", dtype);
    facts.shown += dtype;
    if (common_size > 0) facts.shown += concat(", ", common_size, " elements");
    if (facts.gives != none) facts.shown += concat(", gives ", list_string(facts.gives));
    if (facts.takes != none) facts.shown += concat(", takes ", list_string(facts.takes));
  }
  if (reduces) {
    facts.common += concat(" ", to_string(call.reduce_op.type()));
    facts.shown += concat(", ", to_string(call.reduce_op.type()));
  }
  if (call.norm) {
    facts.common += concat(" rows of ", call.norm->weight.numel());
    facts.shown += concat(", rows of ", call.norm->weight.numel());
  }
  if (has_root) {
    facts.common += concat(" ", call.root);
    facts.shown += concat(", root ", call.root);
  }
  facts.shown += ")";
  return facts;
}

std::vector<uint8_t> encode_facts(const Facts& facts) {
  std::string text = facts.shown + "\n" + facts.common;
  for (const auto* list : {&facts.gives, &facts.takes}) {
    text += "\n";
    for (size_t r = 0; r < list->size(); ++r) text += concat(r == 0 ? "" : ",", (*list)[r]);
  }
  return {text.begin(), text.end()};
}

Facts decode_facts(const std::vector<uint8_t>& bytes) {
  const auto lines = split_string(std::string(bytes.begin(), bytes.end()), '\n');
  TORCH_OVERLAP_CHECK(lines.size() == 4, kRuntime,
                      "check_mismatch: expected four lines in the store, got ", lines.size());
  const auto numbers = [](const std::string& line) {
    std::vector<int64_t> all;
    for (const auto& one : split_string(line, ',')) all.push_back(parse_int(one, kStorePrefix));
    return all;
  };
  return {lines[0], lines[1], numbers(lines[2]), numbers(lines[3])};
}

// Returns the first pair of ranks, in rank order, that does not match.
std::optional<std::pair<int, int>> find_mismatch(const std::vector<Facts>& all) {
  const int size = static_cast<int>(all.size());
  for (int r = 1; r < size; ++r) {
    if (all[r].common != all[0].common) return std::pair(0, r);
  }
  for (int a = 0; a < size; ++a) {
    for (int b = a; b < size; ++b) {
      if (all[a].gives[b] != all[b].takes[a] || all[b].gives[a] != all[a].takes[b]) {
        return std::pair(a, b);
      }
    }
  }
  return std::nullopt;
}

std::string describe_endpoint(const P2POp& op) {
  return concat(op.tensor.numel(), " ", op.tensor.scalar_type(), " elements");
}

}  // namespace

MismatchCheck::MismatchCheck(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
    : store_(std::move(store)), rank_(rank), size_(size) {}

c10d::Store& MismatchCheck::connected(Milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  if (!is_connected_)
    store_ = make_prefix_store(clone_store(store_, kStorePrefix, timeout), kStorePrefix);
  is_connected_ = true;
  return *store_;
}

std::unique_lock<std::mutex> MismatchCheck::compare(const Call& call,
                                                    const std::function<void()>& check_aborted) {
  if (call.primitive == Primitive::p2p) {
    compare_p2p(call);
    return {};
  }
  std::unique_lock turn(order_mutex_);
  check_aborted();
  compare_collective(call, check_aborted);
  return turn;
}

void MismatchCheck::compare_collective(const Call& call,
                                       const std::function<void()>& check_aborted) {
  c10d::Store& store = connected(call.timeout);
  const auto deadline = Clock::now() + call.timeout;
  const uint64_t sequence = collectives_++;
  const auto keys = rank_keys(concat(sequence), size_);
  store.set(keys[rank_], encode_facts(facts_of(call, rank_, size_)));
  while (true) {
    check_aborted();
    check_interrupt();
    const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
    try {
      store.wait(keys, std::clamp(left, Milliseconds(1), kCompareSlice));
      break;
    } catch (const std::exception&) {
      std::vector<int> missing;
      for (int r = 0; r < size_; ++r) {
        if (!store.check({keys[r]})) missing.push_back(r);  // throws if the store has ended
      }
      TORCH_OVERLAP_CHECK(left > kCompareSlice || missing.empty(), kTimeout, call.describe(),
                          ": expected all ranks to come to operation ", sequence,
                          " of those that are compared within ", call.timeout.count(),
                          " ms, got none of ranks ", list_string(missing));
    }
  }
  std::vector<Facts> all;
  for (const auto& name : keys) all.push_back(decode_facts(store.get(name)));
  release_keys(store, concat(sequence, "/read"), size_, keys);
  if (const auto pair = find_mismatch(all)) {
    const auto [a, b] = *pair;
    fail(ErrorKind::kValue, to_string(call.name), ": expected the same operation on all ranks of '",
         call.comm, "', got ", all[a].shown, " on rank ", a, " and ", all[b].shown, " on rank ", b,
         "; nothing was sent");
  }
}

void MismatchCheck::delete_stale_keys(c10d::Store& store) {
  std::vector<std::string> oldest;
  {
    const std::lock_guard lock(mutex_);
    while (!stale_keys_.empty() && oldest.size() < kMaxKeysCleaned) {
      oldest.push_back(std::move(stale_keys_.front()));
      stale_keys_.pop_front();
    }
  }
  for (auto& key : oldest) {
    if (store.check({key})) {
      (void)store.deleteKey(key);
    } else {
      const std::lock_guard lock(mutex_);
      stale_keys_.push_back(std::move(key));
    }
  }
}

void MismatchCheck::compare_p2p(const Call& call) {
  c10d::Store& store = connected(call.timeout);
  struct Endpoint {
    const P2POp* op;
    std::string mine;
    std::string theirs;
  };
  std::vector<Endpoint> endpoints;
  {
    const std::lock_guard lock(mutex_);
    for (const P2POp& op : call.p2p) {
      if (op.peer == rank_ || op.peer == kAnySource) continue;
      const bool is_send = op.type == P2POp::Type::SEND;
      const auto pair = is_send ? std::pair(rank_, op.peer) : std::pair(op.peer, rank_);
      const std::string base = concat("p2p/", pair.first, "/", pair.second, "/", op.tag, "/",
                                      num_messages_[{pair.first, pair.second, op.tag}]++);
      endpoints.push_back(
          {&op, base + (is_send ? "/send" : "/recv"), base + (is_send ? "/recv" : "/send")});
    }
  }
  for (const Endpoint& endpoint : endpoints) {
    store.set(endpoint.mine, to_bytes(describe_endpoint(*endpoint.op)));
  }
  delete_stale_keys(store);
  for (const Endpoint& endpoint : endpoints) {
    if (!store.check({endpoint.theirs})) {
      const std::lock_guard lock(mutex_);
      stale_keys_.push_back(endpoint.theirs);
      continue;
    }
    const auto bytes = store.get(endpoint.theirs);
    const std::string theirs(bytes.begin(), bytes.end());
    (void)store.deleteKey(endpoint.theirs);  // no other rank reads or deletes it
    const bool is_send = endpoint.op->type == P2POp::Type::SEND;
    TORCH_OVERLAP_CHECK(theirs == describe_endpoint(*endpoint.op), kValue, to_string(call.name),
                        ": expected the same size and dtype on both ranks, got ",
                        is_send ? "a send" : "a recv", " of ", describe_endpoint(*endpoint.op),
                        " on rank ", rank_, " and ", is_send ? "a recv" : "a send", " of ", theirs,
                        " on rank ", endpoint.op->peer, "; nothing was sent");
  }
}

std::function<std::string(c10d::Store&)> make_timeout_comparison(const Call& call, int rank,
                                                                 int size,
                                                                 const std::set<int>& peers,
                                                                 Milliseconds limit) {
  // A collective notifies all ranks; a message notifies only its peers.
  std::set<int> notified;
  for (const P2POp& op : call.p2p) notified.insert(op.peer);
  return [mine = facts_of(call, rank, size), rank, peers, limit, notified = std::move(notified),
          timeout = call.timeout](c10d::Store& store) -> std::string {
    const auto to_all = [](int from) { return concat("late/", from); };
    const auto to_one = [](int from, int to) { return concat("late/", from, "/", to); };
    for (const int peer : notified) store.set(to_one(rank, peer), encode_facts(mine));
    if (notified.empty()) store.set(to_all(rank), encode_facts(mine));
    const auto until = Clock::now() + limit;
    for (const int peer : peers) {
      std::string found;
      const auto left = std::chrono::ceil<Milliseconds>(until - Clock::now());
      const auto has_published = [&] {
        for (const auto& key : {to_one(peer, rank), to_all(peer)}) {
          if (store.check({key})) found = key;
        }
        return !found.empty();
      };
      if (!poll(std::max(left, Milliseconds(0)), has_published)) continue;
      const Facts theirs = decode_facts(store.get(found));
      const bool fits = theirs.common == mine.common && theirs.gives[rank] == mine.takes[peer] &&
                        mine.gives[peer] == theirs.takes[rank];
      if (fits) continue;
      return concat("expected the same operation and sizes on all ranks, got ", mine.shown,
                    " on rank ", rank, " and ", theirs.shown, " on rank ", peer,
                    ", which waited for each other for ", timeout.count(), " ms");
    }
    return {};
  };
}

std::string mismatch_hint(const Call& call) {
  const bool is_one_sided = call.primitive == Primitive::put ||
                            call.primitive == Primitive::signal ||
                            call.primitive == Primitive::wait_signal;
  if (call.is_compared || is_one_sided) return "";
  return R"(; hints={"check_mismatch": "true"} tells whether the ranks called different things)";
}

}  // namespace torch_overlap
