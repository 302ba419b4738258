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

// Runs what the planner plans: a mesh, this rank's place in it, and its communicators.
namespace torch_overlap::spmd {

// Who differs from this rank along some axes only.
struct Group {
  std::vector<int64_t> indices;     // of the members; the position is the rank in `comm`
  std::shared_ptr<TorchComm> comm;  // null for one member
  std::string comm_name;
};

// A mesh whose ranks are those of a communicator. It has one communicator for each set of axes,
// split from that one; a set that is all ranks, in their order, uses that one itself.
//
// All communicators are made by connect() and prepare(), which are collective. Without prepare(), a
// set that is used for the first time is split off there and then: every rank of the mesh runs the
// same plans. In a CUDA graph capture, or while a compiler traces, that is an error.
//
// Threads: any, as far as TorchComm allows. Plans are kept, some thousands of them.
class TORCH_OVERLAP_API MeshComms : public std::enable_shared_from_this<MeshComms> {
 public:
  // Collective. `mesh` has the ranks of `comm`, each once. `sets`: empty for all sets of axes on a
  // mesh of up to three axes, else for each axis and all together. `name`: unique among the live
  // ones of the process, also the prefix of the communicators' names.
  static std::shared_ptr<MeshComms> connect(mesh::Mesh mesh, std::shared_ptr<TorchComm> comm,
                                            std::string name, mesh::CostModel cost,
                                            const std::vector<mesh::AxisList>& sets = {});
  // The open one of that name; of ranks that are threads, the one that this thread made. A kState
  // error if that is closed.
  static std::shared_ptr<MeshComms> find(std::string_view name);
  ~MeshComms();
  MeshComms(const MeshComms&) = delete;
  MeshComms& operator=(const MeshComms&) = delete;

  const mesh::Mesh& mesh() const noexcept { return mesh_; }
  const std::string& name() const noexcept { return name_; }
  const mesh::CostModel& cost() const noexcept { return cost_; }
  const std::shared_ptr<TorchComm>& comm() const noexcept { return comm_; }
  int64_t rank() const noexcept { return rank_; }    // in comm(), and of the mesh
  int64_t index() const noexcept { return index_; }  // the place in the mesh

  // Collective: makes what is missing of these sets.
  void prepare(const std::vector<mesh::AxisList>& sets);
  // The group over `axes`, in whatever order. A set without a communicator is split off if
  // `may_split` and no capture is under way, else it is a kState error that says how to declare it.
  const Group& group(const mesh::AxisList& axes, bool may_split);
  // The cheapest way by cost().
  std::shared_ptr<const mesh::Plan> plan(const mesh::Layout& from, const mesh::Layout& to,
                                         const mesh::Shape& shape, int64_t element_size);
  // The same for layouts in words, as str() has them.
  std::shared_ptr<const mesh::Plan> plan(std::string_view from, std::string_view to,
                                         const mesh::Shape& shape, int64_t element_size);
  // Collective: finalizes the communicators that were split off. The given one stays. The name is
  // free then, and the mesh of no use.
  void close();
  // Neither closed nor in a fork, nor is its communicator finalized or aborted.
  bool is_open() const;

 private:
  MeshComms(mesh::Mesh mesh, std::shared_ptr<TorchComm> comm, std::string name,
            mesh::CostModel cost);
  const Group& make_group(const mesh::AxisList& axes, bool may_split);
  std::string axes_name(const mesh::AxisList& axes) const;

  const mesh::Mesh mesh_;
  const std::shared_ptr<TorchComm> comm_;
  const std::string name_;
  const mesh::CostModel cost_;
  const int64_t rank_;
  const int64_t index_;
  const std::thread::id maker_ = std::this_thread::get_id();
  const ProcessStamp process_;
  std::mutex mutex_;
  std::atomic<bool> closed_ = false;
  std::map<mesh::AxisList, Group> groups_;
  std::unordered_map<std::string, std::shared_ptr<const mesh::Plan>> plans_;
};

}  // namespace torch_overlap::spmd
