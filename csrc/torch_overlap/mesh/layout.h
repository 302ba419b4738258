#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/mesh.h"

namespace torch_overlap::mesh {

using Shape = std::vector<int64_t>;

// How the ranks' values become the value of a tensor that is pending (partial).
enum class ReduceKind : uint8_t { kSum, kAvg, kMax, kMin, kProduct };

TORCH_OVERLAP_API std::string_view to_string(ReduceKind kind);
TORCH_OVERLAP_API ReduceKind parse_reduce_kind(std::string_view name);  // sum avg max min product

struct Partial {
  AxisRef axis;
  ReduceKind kind = ReduceKind::kSum;

  friend bool operator==(const Partial&, const Partial&) = default;
};

// Where the parts of one tensor lie. Along an axis of the mesh the tensor is
//   sharded     the axis is in the list of one dimension: every rank has its part of that dimension
//   partial     every rank has a value of the full extent; reduced together they are the tensor
//   invariant   every rank has the same value, and its gradient is the same on every rank as well
//   replicated  otherwise: every rank has the same value, and its gradient is pending
// Several axes of one dimension cut it one after the other, the first one first, each time as
// torch.chunk does (and as DTensor does): 10 over x=2, y=4 is 2 2 1 0, 2 2 1 0.
//
// A value: immutable, validated when it is made, comparable, hashable. It knows no shape.
class TORCH_OVERLAP_API Layout {
 public:
  // Errors: an axis or part twice, or parts that share coordinates; an axis that the mesh lacks;
  // partial kinds that do not commute (only sum and avg go together).
  Layout(Mesh mesh, std::vector<AxisList> dims, std::vector<Partial> partial = {},
         AxisList invariant = {});
  static Layout replicated(Mesh mesh, size_t dims);
  // What str() prints: "[dp],[tp,cp] P{x,y:max} I{z}"; "scalar" for no dimensions.
  static Layout parse(const Mesh& mesh, std::string_view text);

  const Mesh& mesh() const noexcept { return mesh_; }
  size_t num_dims() const noexcept { return dims_.size(); }
  const std::vector<AxisList>& dims() const noexcept { return dims_; }
  const std::vector<Partial>& partial() const noexcept { return partial_; }  // in axis order
  const AxisList& invariant() const noexcept { return invariant_; }          // in axis order

  bool is_partial() const noexcept { return !partial_.empty(); }
  bool is_sharded() const noexcept;
  bool is_replicated() const noexcept { return !is_partial() && !is_sharded(); }
  // Does it use (shard over, or wait for) any coordinate of this part?
  bool uses(const AxisRef& ref) const noexcept;

  Layout with_dims(std::vector<AxisList> dims) const;
  Layout with_partial(std::vector<Partial> partial) const;
  Layout with_invariant(AxisList invariant) const;

  std::string str() const;
  friend TORCH_OVERLAP_API bool operator==(const Layout& a, const Layout& b);
  size_t hash() const noexcept;

 private:
  void check() const;

  Mesh mesh_;
  std::vector<AxisList> dims_;
  std::vector<Partial> partial_;
  AxisList invariant_;
};

// --- Shapes -------------------------------------------------------------------------------------

struct Extent {
  int64_t offset = 0;
  int64_t size = 0;

  friend bool operator==(const Extent&, const Extent&) = default;
};

// The part of [0, n) at these coordinates of axes of these sizes, major to minor. A part that is
// empty lies at the end.
TORCH_OVERLAP_API Extent chunk(int64_t n, const std::vector<int64_t>& sizes,
                               const std::vector<int64_t>& coordinates);
// The largest part: that of the first rank.
TORCH_OVERLAP_API int64_t largest_chunk(int64_t n, const AxisList& axes) noexcept;
// Are all parts of one size?
TORCH_OVERLAP_API bool is_even(int64_t n, const AxisList& axes) noexcept;

// Which part of the global shape the rank at this index of the mesh has, per dimension.
TORCH_OVERLAP_API std::vector<Extent> extents_at(const Layout& layout, const Shape& shape,
                                                 int64_t index);
TORCH_OVERLAP_API std::vector<Extent> extents(const Layout& layout, const Shape& shape,
                                              int64_t rank);
TORCH_OVERLAP_API Shape local_shape(const Layout& layout, const Shape& shape, int64_t rank);
// The largest of all ranks.
TORCH_OVERLAP_API Shape largest_local_shape(const Layout& layout, const Shape& shape);
// The global shape from the local shapes of all ranks of the mesh, by index: exact, also where the
// parts are uneven. Errors: shapes that no global shape gives.
TORCH_OVERLAP_API Shape global_shape(const Layout& layout, const std::vector<Shape>& local_shapes);

// Errors: a rank that is not that of the layout, a negative size.
TORCH_OVERLAP_API void check_shape(std::string_view op, const Layout& layout, const Shape& shape);
TORCH_OVERLAP_API int64_t num_elements(const Shape& shape) noexcept;

}  // namespace torch_overlap::mesh
