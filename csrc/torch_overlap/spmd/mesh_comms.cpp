#include "torch_overlap/spmd/mesh_comms.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"

namespace torch_overlap::spmd {
namespace {

using mesh::AxisList;
using mesh::AxisRef;
using mesh::Layout;
using mesh::Mesh;
using mesh::Plan;
using mesh::Shape;

constexpr size_t kMaxCachedPlans = 4096;
constexpr size_t kMaxAxesForAllSets = 3;

struct Registry {
  ForkSafeMutex mutex;
  std::vector<std::weak_ptr<MeshComms>> entries;
};

Registry& mesh_registry() { return LeakySingleton<Registry>::get(); }

// Sorts axes by the order of the mesh, drops those of size 1, which join no ranks, and merges
// parts: an axis and its parts are the same group.
AxisList in_mesh_order(AxisList axes) {
  std::erase_if(axes, [](const AxisRef& ref) { return ref.size == 1; });
  std::sort(axes.begin(), axes.end());
  return mesh::merged(axes);
}

std::vector<AxisList> default_sets(const Mesh& mesh) {
  AxisList all;
  for (const mesh::Axis& axis : mesh.axes()) {
    if (axis.size > 1) all.push_back(mesh.axis(axis.name));
  }
  std::vector<AxisList> sets;
  if (all.size() > kMaxAxesForAllSets) {
    for (const AxisRef& ref : all) sets.push_back({ref});
    sets.push_back(all);
    return sets;
  }
  for (uint32_t mask = 1; mask < 1U << all.size(); ++mask) {
    AxisList set;
    for (size_t i = 0; i < all.size(); ++i) {
      if ((mask >> i & 1U) != 0) set.push_back(all[i]);
    }
    sets.push_back(std::move(set));
  }
  return sets;
}

int64_t checked_rank(const Mesh& mesh, const TorchComm& comm, const std::string& name) {
  std::vector<int64_t> ranks = mesh.ranks();
  std::sort(ranks.begin(), ranks.end());
  const bool fits = static_cast<int64_t>(ranks.size()) == comm.size() && ranks.front() == 0 &&
                    ranks.back() == comm.size() - 1;
  TORCH_OVERLAP_CHECK(fits, kValue, "connect '", name, "': expected a mesh of the ", comm.size(),
                      " ranks of '", comm.name(), "', got ", mesh.str(), " of ranks ",
                      list_string(mesh.ranks()), "; split the communicator first");
  return comm.rank();
}

}  // namespace

MeshComms::MeshComms(Mesh mesh, std::shared_ptr<TorchComm> comm, std::string name,
                     mesh::CostModel cost)
    : mesh_(std::move(mesh)),
      comm_(std::move(comm)),
      name_(std::move(name)),
      cost_(std::move(cost)),
      rank_(checked_rank(mesh_, *comm_, name_)),
      index_(mesh_.index_of(rank_)) {}

MeshComms::~MeshComms() {
  Registry& registry = mesh_registry();
  std::lock_guard lock(registry.mutex);
  std::erase_if(registry.entries, [](const auto& entry) { return entry.expired(); });
}

std::shared_ptr<MeshComms> MeshComms::connect(Mesh mesh, std::shared_ptr<TorchComm> comm,
                                              std::string name, mesh::CostModel cost,
                                              const std::vector<AxisList>& sets) {
  TORCH_OVERLAP_CHECK(comm != nullptr, kValue, "connect: expected a communicator, got none");
  TORCH_OVERLAP_CHECK(!name.empty(), kValue, "connect: expected a name that is not empty, got ''");
  cost.check();
  std::shared_ptr<MeshComms> made(
      new MeshComms(std::move(mesh), std::move(comm), std::move(name), std::move(cost)));
  Registry& registry = mesh_registry();
  {
    // May be destroyed here, after the lock is released.
    std::vector<std::shared_ptr<MeshComms>> others;
    const std::lock_guard lock(registry.mutex);
    others.reserve(registry.entries.size());
    for (const auto& entry : registry.entries) {
      others.push_back(entry.lock());
      const auto& other = others.back();
      if (!other) continue;
      const bool is_other =
          other->name_ != made->name_ || other->creator_thread_ != made->creator_thread_;
      TORCH_OVERLAP_CHECK(is_other || !other->is_open(), kValue,
                          "connect: expected a name that no live mesh has, got '", made->name_,
                          "'; give another one, or close that mesh");
    }
  }
  made->prepare(sets.empty() ? default_sets(made->mesh_) : sets);
  std::lock_guard lock(registry.mutex);
  registry.entries.push_back(made);
  return made;
}

std::shared_ptr<MeshComms> MeshComms::find(std::string_view name) {
  std::vector<std::shared_ptr<MeshComms>> named;  // destroyed after the lock is released
  std::vector<std::string> known;
  {
    Registry& registry = mesh_registry();
    std::lock_guard lock(registry.mutex);
    for (const auto& entry : registry.entries) {
      auto one = entry.lock();
      if (!one) continue;
      if (one->is_open()) known.push_back(one->name_);
      named.push_back(std::move(one));
    }
  }
  std::erase_if(named, [&](const auto& one) { return one->name_ != name; });
  bool was_on_this_thread = false;
  std::shared_ptr<MeshComms> open;
  size_t count = 0;
  for (const auto& one : named) {
    const bool is_on_this_thread = one->creator_thread_ == std::this_thread::get_id();
    was_on_this_thread = was_on_this_thread || is_on_this_thread;
    if (!one->is_open()) continue;
    if (is_on_this_thread) return one;
    open = one;
    ++count;
  }
  TORCH_OVERLAP_CHECK(!was_on_this_thread, kState, "mesh '", name,
                      "': expected an open mesh, got one that was closed");
  TORCH_OVERLAP_CHECK(count == 1, kValue, "mesh: expected the name of a connected mesh",
                      count > 1 ? " of this thread" : "", ", got '", name, "'; there are ",
                      list_string(known));
  return open;  // this thread may be one of autograd's
}

void MeshComms::check_open() const {
  TORCH_OVERLAP_CHECK(!closed_, kState, "mesh '", name_,
                      "': expected an open mesh, got one that was closed");
}

void MeshComms::prepare(const std::vector<AxisList>& sets) {
  std::lock_guard lock(mutex_);
  check_open();
  for (const AxisList& axes : sets) {
    for (const AxisRef& ref : axes) mesh_.check(ref);
    find_or_make_group(in_mesh_order(axes), /*may_split=*/true);
  }
}

const Group& MeshComms::group(const AxisList& axes, bool may_split) {
  std::lock_guard lock(mutex_);
  return find_or_make_group(in_mesh_order(axes), may_split);
}

const Group& MeshComms::find_or_make_group(const AxisList& axes, bool may_split) {
  check_open();
  const auto known = groups_.find(axes);
  if (known != groups_.end()) return known->second;
  Group made{.indices = mesh_.group_at(index_, axes), .comm = {}, .comm_name = {}};
  if (made.indices.size() > 1) {
    std::vector<int> ranks;
    for (const int64_t index : made.indices) {
      ranks.push_back(static_cast<int>(mesh_.ranks()[static_cast<size_t>(index)]));
    }
    std::vector<int> all(static_cast<size_t>(comm_->size()));
    std::iota(all.begin(), all.end(), 0);
    if (ranks == all) {
      made.comm = comm_;
    } else {
      TORCH_OVERLAP_CHECK(may_split && !comm_->is_capturing(), kState, "mesh '", name_,
                          "': expected a communicator over [", mesh_.names(axes),
                          "], got none, and none is made while a graph is captured or a compiler "
                          "traces; call prepare(\"",
                          mesh_.names(axes), "\") before");
      made.comm = comm_->split(ranks, concat(name_, "/", mesh_.names(axes)));
    }
    made.comm_name = made.comm->name();
  }
  return groups_.emplace(axes, std::move(made)).first->second;
}

std::shared_ptr<const Plan> MeshComms::plan(const Layout& from, const Layout& to,
                                            const Shape& shape, int64_t element_size) {
  return plan(from.str(), to.str(), shape, element_size);
}

std::shared_ptr<const Plan> MeshComms::plan(std::string_view from, std::string_view to,
                                            const Shape& shape, int64_t element_size) {
  std::string key;
  key.reserve(from.size() + to.size() + 8 * shape.size() + 8);
  key.append(from).append(">").append(to).append(" ");
  for (const int64_t n : shape) {
    key.append(reinterpret_cast<const char*>(&n), sizeof(n));
  }
  key.append(reinterpret_cast<const char*>(&element_size), sizeof(element_size));
  {
    std::lock_guard lock(mutex_);
    const auto known = plans_.find(key);
    if (known != plans_.end()) return known->second;
  }
  auto made = std::make_shared<const Plan>(mesh::plan_reshard(
      Layout::parse(mesh_, from), Layout::parse(mesh_, to), shape, element_size, cost_));
  std::lock_guard lock(mutex_);
  if (plans_.size() >= kMaxCachedPlans) plans_.clear();
  return plans_.try_emplace(std::move(key), std::move(made)).first->second;
}

bool MeshComms::is_open() const {
  return process_.is_current() && !closed_ && !comm_->is_finalized() && !comm_->is_aborted();
}

void MeshComms::add_part(std::shared_ptr<MeshComms> part) {
  std::lock_guard lock(mutex_);
  parts_.push_back(std::move(part));
}

void MeshComms::close() {
  std::lock_guard lock(mutex_);
  if (closed_.exchange(true)) return;
  // Every communicator is finalized, also if one fails; the first error is thrown at the end.
  std::exception_ptr first_error;
  const auto attempt = [&first_error](const auto& action) {
    try {
      action();
    } catch (...) {
      if (!first_error) first_error = std::current_exception();
    }
  };
  for (const auto& part : parts_) {
    attempt([&] { part->close(); });
    // The communicator of a single rank was split off for the part; others are in groups_.
    if (part->comm_->size() == 1 && !part->comm_->is_finalized()) {
      attempt([&] { part->comm_->finalize(); });
    }
  }
  parts_.clear();
  for (auto& [axes, group] : groups_) {
    if (group.comm && group.comm != comm_ && !group.comm->is_finalized()) {
      attempt([&] { group.comm->finalize(); });
    }
  }
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace torch_overlap::spmd
