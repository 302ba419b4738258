#pragma once

#include <cstdint>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/layout.h"
#include "torch_overlap/mesh/plan.h"

// Plans on real numbers, all ranks of a mesh of any size in one process: what a plan claims is what
// happens here. Every step does what its collective does, and looks at nothing but the step.
namespace torch_overlap::mesh {

// A dense array, the last dimension fastest.
struct Array {
  Shape shape;
  std::vector<double> data;

  friend bool operator==(const Array&, const Array&) = default;
};

// One local array per index of the mesh.
using Locals = std::vector<Array>;

// The part at these extents.
TORCH_OVERLAP_API Array part(const Array& array, const std::vector<Extent>& extents);

// A global array laid out. What is pending is whole on the first rank of its group, and the neutral
// element of the reduction on the others (the value itself for max, min and avg).
TORCH_OVERLAP_API Locals distribute(const Array& global, const Layout& layout);
// The global array of local ones: pending values are reduced in the order of the group. Errors:
// copies that differ, by bits; local shapes that the layout does not give.
TORCH_OVERLAP_API Array collect(const Locals& locals, const Layout& layout, const Shape& shape);

TORCH_OVERLAP_API Locals run_step(const Step& step, const Locals& locals, const Shape& shape);
TORCH_OVERLAP_API Locals simulate(const Plan& plan, Locals locals);

}  // namespace torch_overlap::mesh
