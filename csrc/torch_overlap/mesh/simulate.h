#pragma once

#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/layout.h"
#include "torch_overlap/mesh/plan.h"

// Simulates plans on real numbers, for all ranks of a mesh of any size in one process, to verify
// what a plan claims. Every step performs the data movement of its collective and uses only the
// step.
namespace torch_overlap::mesh {

// A dense row-major array.
struct Array {
  Shape shape;
  std::vector<double> data;

  friend bool operator==(const Array&, const Array&) = default;
};

// One local array per index of the mesh.
using Locals = std::vector<Array>;

// Returns the part at these extents.
TORCH_OVERLAP_API Array part(const Array& array, const std::vector<Extent>& extents);

// Distributes a global array by a layout. A partial value is whole on the first rank of its group,
// and the neutral element of the reduction on the others (the value itself for max, min and avg).
TORCH_OVERLAP_API Locals distribute(const Array& global, const Layout& layout);
// Returns the global array of local ones. Partial values are reduced in the order of the group.
// Errors: copies that are not bitwise equal; local shapes that the layout does not give.
TORCH_OVERLAP_API Array collect(const Locals& locals, const Layout& layout, const Shape& shape);

TORCH_OVERLAP_API Locals run_step(const Step& step, const Locals& locals, const Shape& shape);
TORCH_OVERLAP_API Locals simulate(const Plan& plan, Locals locals);

}  // namespace torch_overlap::mesh
