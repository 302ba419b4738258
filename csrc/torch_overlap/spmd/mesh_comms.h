#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/mesh/cost.h"
#include "torch_overlap/mesh/layout.h"
#include "torch_overlap/mesh/mesh.h"
#include "torch_overlap/mesh/plan.h"

// Executes plans: a mesh, this rank's position in it, and its communicators.
namespace torch_overlap::spmd {

// The ranks that differ from this rank along some axes only.
struct Group {
  // Mesh indices of the members, in the order of their ranks in `comm`.
  std::vector<int64_t> indices;
  std::shared_ptr<TorchComm> comm;  // null for one member
  std::string comm_name;
};

// A mesh whose ranks are those of a communicator. Each set of axes has one communicator, split from
// the given one. A set that contains all ranks in their order uses the given communicator itself.
//
// connect() and prepare(), which are collective, create the communicators. A set that was not
// prepared is split off on its first use, which works because every rank of the mesh runs the same
// plans. During a CUDA graph capture, or while a compiler traces, such a first use is an error.
//
// Threads: any, within the rules of TorchComm. Up to a few thousand plans are cached.
class TORCH_OVERLAP_API MeshComms : public std::enable_shared_from_this<MeshComms> {
 public:
  // Collective. `mesh` must contain the ranks of `comm`, each once. `sets`: the sets of axes to
  // split off; if empty, all sets on a mesh of up to three axes, otherwise each axis and all axes
  // together. `name`: unique among the live meshes of the process; also the prefix of the
  // communicators' names.
  static std::shared_ptr<MeshComms> connect(mesh::Mesh mesh, std::shared_ptr<TorchComm> comm,
                                            std::string name, mesh::CostModel cost,
                                            const std::vector<mesh::AxisList>& sets = {});
  // Returns the open mesh of that name; if ranks are threads, the one that this thread created.
  // Throws kState if it is closed.
  static std::shared_ptr<MeshComms> find(std::string_view name);
  ~MeshComms();
  MeshComms(const MeshComms&) = delete;
  MeshComms& operator=(const MeshComms&) = delete;

  const mesh::Mesh& mesh() const noexcept { return mesh_; }
  const std::string& name() const noexcept { return name_; }
  const mesh::CostModel& cost() const noexcept { return cost_; }
  const std::shared_ptr<TorchComm>& comm() const noexcept { return comm_; }
  int64_t rank() const noexcept { return rank_; }    // in comm() and in the mesh
  int64_t index() const noexcept { return index_; }  // position in the mesh

  // Collective. Creates the communicators that these sets do not have yet. Throws kState if the
  // mesh was closed, also without sets.
  void prepare(const std::vector<mesh::AxisList>& sets);
  // Returns the group over `axes`, in any order. A set without a communicator is split off if
  // `may_split` and no capture is in progress. Otherwise throws kState with a message that says how
  // to declare it.
  const Group& group(const mesh::AxisList& axes, bool may_split);
  // Returns the cheapest plan by cost().
  std::shared_ptr<const mesh::Plan> plan(const mesh::Layout& from, const mesh::Layout& to,
                                         const mesh::Shape& shape, int64_t element_size);
  // The same for layouts as text, in the format of str().
  std::shared_ptr<const mesh::Plan> plan(std::string_view from, std::string_view to,
                                         const mesh::Shape& shape, int64_t element_size);
  // Makes close() close `part` first: a mesh over some of the axes, whose communicators belong to
  // this mesh.
  void add_part(std::shared_ptr<MeshComms> part);
  // Collective. Finalizes the communicators that were split off, and those of the parts; the given
  // one stays. Frees the name. The mesh is unusable afterwards.
  void close();
  // True if the mesh is not closed and not in a fork, and its communicator is not finalized or
  // aborted.
  bool is_open() const;

 private:
  MeshComms(mesh::Mesh mesh, std::shared_ptr<TorchComm> comm, std::string name,
            mesh::CostModel cost);
  void check_open() const;  // throws kState if the mesh was closed
  const Group& find_or_make_group(const mesh::AxisList& axes, bool may_split);

  const mesh::Mesh mesh_;
  const std::shared_ptr<TorchComm> comm_;
  const std::string name_;
  const mesh::CostModel cost_;
  const int64_t rank_;
  const int64_t index_;
  const std::thread::id creator_thread_ = std::this_thread::get_id();
  const ProcessStamp process_;
  std::mutex mutex_;
  std::atomic<bool> closed_ = false;
  std::map<mesh::AxisList, Group> groups_;
  std::vector<std::shared_ptr<MeshComms>> parts_;
  std::unordered_map<std::string, std::shared_ptr<const mesh::Plan>> plans_;
};

}  // namespace torch_overlap::spmd
