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

// The reduction of the ranks' values that gives the value of a partial tensor.
enum class ReduceKind : uint8_t { kSum, kAvg, kMax, kMin, kProduct };

TORCH_OVERLAP_API std::string_view to_string(ReduceKind kind);
TORCH_OVERLAP_API ReduceKind parse_reduce_kind(std::string_view name);  // sum avg max min product

struct Partial {
  AxisRef axis;
  ReduceKind kind = ReduceKind::kSum;

  friend bool operator==(const Partial&, const Partial&) = default;
};

// The placement of the parts of one tensor. Along an axis of the mesh the tensor is
//   sharded     the axis is in the list of one dimension: every rank has its part of that dimension
//   partial     every rank has a value of the full extent; their reduction is the tensor
//   invariant   every rank has the same value, and its gradient is the same on every rank as well
//   replicated  otherwise: every rank has the same value, and its gradient is partial
// Several axes of one dimension split it one after the other, the first one first, each time as
// torch.chunk and DTensor do: 10 over x=2, y=4 is 2 2 1 0, 2 2 1 0.
//
// Layout is a value: immutable, validated by the constructor, comparable, hashable. It does not
// depend on a shape.
class TORCH_OVERLAP_API Layout {
 public:
  // Errors: an axis or part that occurs twice, or parts that share coordinates; an axis that the
  // mesh does not have; partial kinds that do not commute (only sum and avg can be combined).
  Layout(Mesh mesh, std::vector<AxisList> dims, std::vector<Partial> partial = {},
         AxisList invariant = {});
  static Layout replicated(Mesh mesh, size_t dims);
  // Parses the output of str(): "[dp],[tp,cp] P{x,y:max} I{z}"; "scalar" for no dimensions.
  static Layout parse(const Mesh& mesh, std::string_view text);

  const Mesh& mesh() const noexcept { return mesh_; }
  size_t num_dims() const noexcept { return dims_.size(); }
  const std::vector<AxisList>& dims() const noexcept { return dims_; }
  const std::vector<Partial>& partial() const noexcept { return partial_; }  // in axis order
  const AxisList& invariant() const noexcept { return invariant_; }          // in axis order

  bool is_partial() const noexcept { return !partial_.empty(); }
  // True if the layout shards over, or is partial along, any coordinate of this part.
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

// Returns the part of [0, n) at these coordinates of axes of these sizes, major to minor. An empty
// part is at the end.
TORCH_OVERLAP_API Extent chunk(int64_t n, const std::vector<int64_t>& sizes,
                               const std::vector<int64_t>& coordinates);
// Returns the size of the largest part, which is the first rank's.
TORCH_OVERLAP_API int64_t largest_chunk(int64_t n, const AxisList& axes) noexcept;
// True if all parts have the same size.
TORCH_OVERLAP_API bool is_even(int64_t n, const AxisList& axes) noexcept;

// Returns, per dimension, the part of the global shape that the rank at this index of the mesh has.
TORCH_OVERLAP_API std::vector<Extent> extents_at(const Layout& layout, const Shape& shape,
                                                 int64_t index);
TORCH_OVERLAP_API std::vector<Extent> extents(const Layout& layout, const Shape& shape,
                                              int64_t rank);
TORCH_OVERLAP_API Shape local_shape(const Layout& layout, const Shape& shape, int64_t rank);
// Returns the largest local shape over all ranks.
TORCH_OVERLAP_API Shape largest_local_shape(const Layout& layout, const Shape& shape);
// Returns the global shape, given the local shapes of all ranks of the mesh by index. Exact for
// uneven parts, too. Errors: local shapes that no global shape has.
TORCH_OVERLAP_API Shape global_shape(const Layout& layout, const std::vector<Shape>& local_shapes);

// Errors: a shape whose rank differs from the layout's, a negative size.
TORCH_OVERLAP_API void check_shape(std::string_view op, const Layout& layout, const Shape& shape);
TORCH_OVERLAP_API int64_t num_elements(const Shape& shape) noexcept;

}  // namespace torch_overlap::mesh
