#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"

// The planner: the layouts of tensors, the operators that can run on them, the communication that
// converts between them, and its cost. Pure functions on values: no tensor, communicator, thread or
// state. Read mesh.h, layout.h, plan.h, rule.h, propagate.h, cost.h, graph.h in this order.
namespace torch_overlap::mesh {

// One dimension of a mesh. `link`: link class that joins the ranks along it, a key of
// CostModel::links ("nvlink", "network"). If empty, the mesh derives it from ranks_per_host.
struct Axis {
  std::string name;
  int64_t size = 1;
  std::string link = {};

  friend bool operator==(const Axis&, const Axis&) = default;
};

// A whole axis of a mesh, or a part of one: `size` of its coordinates, after a factor of `pre` that
// precedes them. Printed as `x` or `x:(pre)size`. Users name whole axes; parts arise from reshapes,
// for example if an axis of 4 is split over two dimensions of 2.
struct AxisRef {
  int32_t axis = 0;
  int32_t pre = 1;
  int32_t size = 1;

  friend bool operator==(const AxisRef&, const AxisRef&) = default;
  friend auto operator<=>(const AxisRef&, const AxisRef&) = default;
};
using AxisList = std::vector<AxisRef>;  // major to minor

// A number of ranks of a group that are joined by one class of link.
struct LinkLevel {
  std::string link;
  int64_t size = 1;

  friend bool operator==(const LinkLevel&, const LinkLevel&) = default;
};

// Named axes over ranks. An *index* is a position in the mesh, row-major (first axis major). A
// *rank* is a rank of the job, at any position. The two are never mixed. Immutable, cheap to copy.
// Threads: any.
class TORCH_OVERLAP_API Mesh {
 public:
  static constexpr int64_t kMaxAxes = 64;

  // `ranks`: the rank at each index; if empty 0, 1, 2, ... `ranks_per_host`: rank r is on host r /
  // ranks_per_host; 0: all ranks are on one host. An axis without a link is then "nvlink" within a
  // host.
  explicit Mesh(std::vector<Axis> axes, std::vector<int64_t> ranks = {},
                int64_t ranks_per_host = 0);
  // Parses "dp=2,tp=4": sizes by name.
  static Mesh parse(std::string_view text, int64_t ranks_per_host = 0);

  const std::vector<Axis>& axes() const noexcept { return data_->axes; }
  int64_t size() const noexcept { return static_cast<int64_t>(data_->ranks.size()); }
  const std::vector<int64_t>& ranks() const noexcept { return data_->ranks; }
  int64_t ranks_per_host() const noexcept { return data_->ranks_per_host; }

  // Returns the whole axis of that name, or a part of it for "x:(pre)size". An unknown name is an
  // error that lists the valid names.
  AxisRef axis(std::string_view name) const;
  AxisList axis_list(const std::vector<std::string>& names) const;
  bool is_whole(const AxisRef& ref) const noexcept;
  std::string name(const AxisRef& ref) const;
  std::string names(const AxisList& axes) const;  // separated by commas
  // Errors: no such axis; a part that does not divide it.
  void check(const AxisRef& ref) const;

  // Errors: a rank that is not in the mesh.
  int64_t index_of(int64_t rank) const;
  // Returns the coordinate of the rank at `index` along an axis or a part of one.
  int64_t coordinate_at(int64_t index, const AxisRef& ref) const noexcept;
  int64_t coordinate(int64_t rank, const AxisRef& ref) const {
    return coordinate_at(index_of(rank), ref);
  }
  // Returns the indices, or ranks, that differ from the given one along `axes` only, in the order
  // of `axes` with the first one major: the group of a collective over them.
  std::vector<int64_t> group_at(int64_t index, const AxisList& axes) const;
  std::vector<int64_t> group(int64_t rank, const AxisList& axes) const;

  // Returns the link classes that join the ranks of one group over `axes`, and the size of each
  // level. Levels of one class are merged; those inside a host come first.
  std::vector<LinkLevel> links(const AxisList& axes) const;

  std::string str() const;  // "Mesh(dp=2, tp=4)"
  friend TORCH_OVERLAP_API bool operator==(const Mesh& a, const Mesh& b);
  size_t hash() const noexcept { return data_->hash; }

 private:
  struct Data {
    std::vector<Axis> axes;
    std::vector<int64_t> strides;
    std::vector<int64_t> ranks;
    std::vector<int64_t> index_by_rank;  // -1: not in the mesh
    int64_t ranks_per_host = 0;
    size_t hash = 0;
  };
  std::shared_ptr<const Data> data_;
};

TORCH_OVERLAP_API int64_t size_of(const AxisList& axes) noexcept;  // the product of their sizes

// Merges consecutive parts of one axis: x:(1)2,x:(2)2 of an axis of 4 is x. The group is the same,
// and so are the parts of a dimension that both split evenly: 5 over x is 2 2 1 0, over the parts
// 2 1 1 1.
TORCH_OVERLAP_API AxisList merged(const AxisList& axes);

// True if two parts of one axis share coordinates. Parts that cannot be separated (neither begins
// at a multiple of the other's end) count as sharing.
TORCH_OVERLAP_API bool overlap(const AxisRef& a, const AxisRef& b) noexcept;

inline constexpr char kNvlink[] = "nvlink";
inline constexpr char kNetwork[] = "network";

}  // namespace torch_overlap::mesh
