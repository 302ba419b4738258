#include "torch_overlap/mesh/simulate.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::mesh {
namespace {

int64_t elements_of(const std::vector<Extent>& extents) {
  int64_t product = 1;
  for (const Extent& extent : extents) product *= extent.size;
  return product;
}

// Calls visit(offset in an array of `shape`) for every element of the box, the last dim fastest.
template <typename Visit>
void for_each_offset(const Shape& shape, const std::vector<Extent>& box, const Visit& visit) {
  if (elements_of(box) == 0) return;
  Shape at(box.size(), 0);
  while (true) {
    int64_t offset = 0;
    for (size_t d = 0; d < shape.size(); ++d) offset = offset * shape[d] + box[d].offset + at[d];
    visit(static_cast<size_t>(offset));
    size_t d = box.size();
    while (d > 0 && ++at[d - 1] == box[d - 1].size) at[--d] = 0;
    if (d == 0) return;
  }
}

Shape sizes_of_extents(const std::vector<Extent>& extents) {
  Shape out;
  for (const Extent& extent : extents) out.push_back(extent.size);
  return out;
}

Array empty(const Shape& shape) {
  return {shape, std::vector<double>(static_cast<size_t>(num_elements(shape)))};
}

void store(Array& into, const std::vector<Extent>& box, const Array& values) {
  size_t i = 0;
  for_each_offset(into.shape, box, [&](size_t offset) { into.data[offset] = values.data[i++]; });
}

double reduce(ReduceKind kind, double a, double b) {
  switch (kind) {
    case ReduceKind::kMax:
      return std::max(a, b);
    case ReduceKind::kMin:
      return std::min(a, b);
    case ReduceKind::kProduct:
      return a * b;
    default:
      return a + b;
  }
}

Array reduced(ReduceKind kind, const Locals& locals, const std::vector<int64_t>& group) {
  Array out = locals[static_cast<size_t>(group[0])];
  for (size_t i = 1; i < group.size(); ++i) {
    const Array& next = locals[static_cast<size_t>(group[i])];
    TORCH_OVERLAP_CHECK(next.shape == out.shape, kValue,
                        "simulate: expected equal shapes to reduce, got ", list_string(out.shape),
                        " and ", list_string(next.shape));
    for (size_t e = 0; e < out.data.size(); ++e)
      out.data[e] = reduce(kind, out.data[e], next.data[e]);
  }
  if (kind == ReduceKind::kAvg) {
    for (double& value : out.data) value /= static_cast<double>(group.size());
  }
  return out;
}

std::vector<Extent> whole(const Shape& shape) {
  std::vector<Extent> out;
  for (const int64_t size : shape) out.push_back({0, size});
  return out;
}

// Returns the part of [0, n), sharded along `axes`, that the rank at this mesh index keeps.
Extent local_chunk(const Mesh& mesh, const AxisList& axes, int64_t index, int64_t n) {
  std::vector<int64_t> sizes;
  std::vector<int64_t> coordinates;
  for (const AxisRef& ref : axes) {
    sizes.push_back(ref.size);
    coordinates.push_back(mesh.coordinate_at(index, ref));
  }
  return chunk(n, sizes, coordinates);
}

// Concatenates the arrays of a group along `dim`.
Array concatenate(const std::vector<Array>& parts, size_t dim) {
  Shape shape = parts[0].shape;
  shape[dim] = 0;
  for (const Array& one : parts) shape[dim] += one.shape[dim];
  Array out = empty(shape);
  std::vector<Extent> box = whole(shape);
  box[dim].size = 0;
  for (const Array& one : parts) {
    box[dim] = {box[dim].offset + box[dim].size, one.shape[dim]};
    store(out, box, one);
  }
  return out;
}

Array sliced(const Mesh& mesh, const Step& step, int64_t index, const Array& array) {
  std::vector<Extent> box = whole(array.shape);
  const auto dim = static_cast<size_t>(step.dim);
  box[dim] = local_chunk(mesh, step.axes, index, array.shape[dim]);
  return part(array, box);
}

Array make_partial_local(const Mesh& mesh, const Step& step, int64_t index, Array array) {
  bool is_first = true;
  for (const AxisRef& ref : step.axes) is_first = is_first && mesh.coordinate_at(index, ref) == 0;
  const bool is_additive = step.reduce == ReduceKind::kSum || step.reduce == ReduceKind::kProduct;
  if (!is_first && is_additive) {
    std::fill(array.data.begin(), array.data.end(), step.reduce == ReduceKind::kSum ? 0.0 : 1.0);
  }
  return array;
}

}  // namespace

Array part(const Array& array, const std::vector<Extent>& extents) {
  Array out{sizes_of_extents(extents), {}};
  out.data.reserve(static_cast<size_t>(num_elements(out.shape)));
  for_each_offset(array.shape, extents,
                  [&](size_t offset) { out.data.push_back(array.data[offset]); });
  return out;
}

Locals distribute(const Array& global, const Layout& layout) {
  Locals out;
  for (int64_t index = 0; index < layout.mesh().size(); ++index) {
    Array local = part(global, extents_at(layout, global.shape, index));
    for (const Partial& p : layout.partial()) {
      const Step step{.axes = {p.axis}, .reduce = p.kind, .before = layout, .after = layout};
      local = make_partial_local(layout.mesh(), step, index, std::move(local));
    }
    out.push_back(std::move(local));
  }
  return out;
}

Array collect(const Locals& locals, const Layout& layout, const Shape& shape) {
  const Mesh& mesh = layout.mesh();
  TORCH_OVERLAP_CHECK(static_cast<int64_t>(locals.size()) == mesh.size(), kValue,
                      "collect: expected one array for each of the ", mesh.size(), " ranks, got ",
                      locals.size());
  // Sums and averages commute with each other; another kind occurs only by itself.
  Locals values = locals;
  for (const Partial& p : layout.partial()) {
    Locals next;
    for (int64_t index = 0; index < mesh.size(); ++index) {
      next.push_back(reduced(p.kind, values, mesh.group_at(index, {p.axis})));
    }
    values = std::move(next);
  }
  Array out = empty(shape);
  std::vector<char> is_set(out.data.size(), 0);
  for (int64_t index = 0; index < mesh.size(); ++index) {
    const std::vector<Extent> box = extents_at(layout, shape, index);
    const Array& local = values[static_cast<size_t>(index)];
    TORCH_OVERLAP_CHECK(local.shape == sizes_of_extents(box), kValue, "collect: expected shape ",
                        list_string(sizes_of_extents(box)), " at index ", index, " for ",
                        layout.str(), ", got ", list_string(local.shape));
    size_t i = 0;
    for_each_offset(shape, box, [&](size_t offset) {
      const double value = local.data[i++];
      const double other = out.data[offset];
      const bool is_equal = other == value || (std::isnan(other) && std::isnan(value));
      TORCH_OVERLAP_CHECK(is_set[offset] == 0 || is_equal, kValue,
                          "collect: expected equal copies under ", layout.str(), ", got ", other,
                          " and ", value, " at index ", index);
      out.data[offset] = value;
      is_set[offset] = 1;
    });
  }
  return out;
}

Locals run_step(const Step& step, const Locals& locals, const Shape& shape) {
  const Mesh& mesh = step.before.mesh();
  const auto dim = static_cast<size_t>(std::max<int64_t>(step.dim, 0));
  Locals out;
  for (int64_t index = 0; index < mesh.size(); ++index) {
    const Array& own = locals[static_cast<size_t>(index)];
    const std::vector<int64_t> group = mesh.group_at(index, step.axes);
    switch (step.kind) {
      case StepKind::kSlice:
        out.push_back(sliced(mesh, step, index, own));
        break;
      case StepKind::kAllReduce:
        out.push_back(reduced(step.reduce, locals, group));
        break;
      case StepKind::kReduceScatter:
        out.push_back(sliced(mesh, step, index, reduced(step.reduce, locals, group)));
        break;
      case StepKind::kAllGather: {
        std::vector<Array> parts;
        for (const int64_t member : group) parts.push_back(locals[static_cast<size_t>(member)]);
        out.push_back(concatenate(parts, dim));
        break;
      }
      case StepKind::kAllToAll: {
        std::vector<Array> parts;  // the part that every member sends to this rank
        for (const int64_t member : group) {
          parts.push_back(sliced(mesh, step, index, locals[static_cast<size_t>(member)]));
        }
        out.push_back(concatenate(parts, static_cast<size_t>(step.from_dim)));
        break;
      }
      case StepKind::kPermute:
        out.push_back(locals[static_cast<size_t>(step.source_at(index))]);
        break;
      case StepKind::kMakePartial:
        out.push_back(make_partial_local(mesh, step, index, own));
        break;
      case StepKind::kCast:
        out.push_back(own);
        break;
    }
    const Shape expected = sizes_of_extents(extents_at(step.after, shape, index));
    TORCH_OVERLAP_CHECK(out.back().shape == expected, kValue, "simulate: expected shape ",
                        list_string(expected), " at index ", index, " after ", step.str(), ", got ",
                        list_string(out.back().shape));
  }
  return out;
}

Locals simulate(const Plan& plan, Locals locals) {
  for (const Step& step : plan.steps) locals = run_step(step, locals, plan.shape);
  return locals;
}

}  // namespace torch_overlap::mesh
