#include "torch_overlap/mesh/layout.h"

#include <algorithm>
#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::mesh {
namespace {

bool is_linear(ReduceKind kind) { return kind == ReduceKind::kSum || kind == ReduceKind::kAvg; }

}  // namespace

Layout::Layout(Mesh mesh, std::vector<AxisList> dims, std::vector<Partial> partial,
               AxisList invariant)
    : mesh_(std::move(mesh)),
      dims_(std::move(dims)),
      partial_(std::move(partial)),
      invariant_(std::move(invariant)) {
  std::sort(partial_.begin(), partial_.end(),
            [](const Partial& a, const Partial& b) { return a.axis < b.axis; });
  std::sort(invariant_.begin(), invariant_.end());
  check();
}

Layout Layout::replicated(Mesh mesh, size_t dims) {
  return Layout(std::move(mesh), std::vector<AxisList>(dims));
}

void Layout::check() const {
  struct Use {
    AxisRef ref;
    const char* where;
  };
  std::vector<Use> uses;
  const auto add = [&](const AxisRef& ref, const char* where) {
    mesh_.check(ref);
    for (const Use& other : uses) {
      TORCH_OVERLAP_CHECK(!(other.ref == ref), kValue, "Layout: expected every axis once, got '",
                          mesh_.name(ref), "' ", other.where, " and ", where);
      TORCH_OVERLAP_CHECK(!overlap(other.ref, ref), kValue,
                          "Layout: expected parts of an axis that share nothing, got '",
                          mesh_.name(other.ref), "' ", other.where, " and '", mesh_.name(ref), "' ",
                          where);
    }
    uses.push_back({ref, where});
  };
  for (const AxisList& axes : dims_) {
    for (const AxisRef& ref : axes) add(ref, "in a dimension");
  }
  for (const Partial& pending : partial_) {
    add(pending.axis, "partial");
    const ReduceKind first = partial_.front().kind;
    TORCH_OVERLAP_CHECK(pending.kind == first || (is_linear(pending.kind) && is_linear(first)),
                        kValue, "Layout: expected partial kinds that commute, got ",
                        to_string(first), " and ", to_string(pending.kind),
                        "; reduce one of them first");
  }
  for (const AxisRef& ref : invariant_) add(ref, "invariant");
}

bool Layout::uses(const AxisRef& ref) const noexcept {
  for (const AxisList& axes : dims_) {
    for (const AxisRef& other : axes) {
      if (overlap(ref, other)) return true;
    }
  }
  return std::any_of(partial_.begin(), partial_.end(),
                     [&](const Partial& p) { return overlap(ref, p.axis); });
}

Layout Layout::with_dims(std::vector<AxisList> dims) const {
  return Layout(mesh_, std::move(dims), partial_, invariant_);
}

Layout Layout::with_partial(std::vector<Partial> partial) const {
  return Layout(mesh_, dims_, std::move(partial), invariant_);
}

Layout Layout::with_invariant(AxisList invariant) const {
  return Layout(mesh_, dims_, partial_, std::move(invariant));
}

bool operator==(const Layout& a, const Layout& b) {
  return a.dims_ == b.dims_ && a.partial_ == b.partial_ && a.invariant_ == b.invariant_ &&
         a.mesh_ == b.mesh_;
}

size_t Layout::hash() const noexcept {
  size_t seed = mesh_.hash();
  const auto mix = [&](uint64_t value) {
    seed ^= value + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2);
  };
  const auto mix_ref = [&](const AxisRef& ref) {
    mix(static_cast<uint64_t>(ref.axis) << 48 ^ static_cast<uint64_t>(ref.pre) << 24 ^
        static_cast<uint64_t>(ref.size));
  };
  for (const AxisList& axes : dims_) {
    mix(axes.size());
    for (const AxisRef& ref : axes) mix_ref(ref);
  }
  for (const Partial& pending : partial_) {
    mix(100 + static_cast<uint64_t>(pending.kind));
    mix_ref(pending.axis);
  }
  for (const AxisRef& ref : invariant_) {
    mix(200);
    mix_ref(ref);
  }
  return seed;
}

// --- Shapes -------------------------------------------------------------------------------------

Extent chunk(int64_t n, const std::vector<int64_t>& sizes,
             const std::vector<int64_t>& coordinates) {
  Extent part{0, n};
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t step = (part.size + sizes[i] - 1) / sizes[i];
    const int64_t begin = std::min(coordinates[i] * step, part.size);
    const int64_t end = std::min(begin + step, part.size);
    part = {part.offset + begin, end - begin};
  }
  return part;
}

int64_t largest_chunk(int64_t n, const AxisList& axes) noexcept {
  for (const AxisRef& ref : axes) n = (n + ref.size - 1) / ref.size;
  return n;
}

bool is_even(int64_t n, const AxisList& axes) noexcept { return n % size_of(axes) == 0; }

std::vector<Extent> extents_at(const Layout& layout, const Shape& shape, int64_t index) {
  check_shape("extents", layout, shape);
  std::vector<Extent> out;
  out.reserve(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> sizes;
    std::vector<int64_t> coordinates;
    for (const AxisRef& ref : layout.dims()[d]) {
      sizes.push_back(ref.size);
      coordinates.push_back(layout.mesh().coordinate_at(index, ref));
    }
    out.push_back(chunk(shape[d], sizes, coordinates));
  }
  return out;
}

std::vector<Extent> extents(const Layout& layout, const Shape& shape, int64_t rank) {
  return extents_at(layout, shape, layout.mesh().index_of(rank));
}

Shape local_shape(const Layout& layout, const Shape& shape, int64_t rank) {
  Shape out;
  for (const Extent& extent : extents(layout, shape, rank)) out.push_back(extent.size);
  return out;
}

Shape largest_local_shape(const Layout& layout, const Shape& shape) {
  check_shape("largest_local_shape", layout, shape);
  Shape out;
  for (size_t d = 0; d < shape.size(); ++d) {
    out.push_back(largest_chunk(shape[d], layout.dims()[d]));
  }
  return out;
}

Shape global_shape(const Layout& layout, const std::vector<Shape>& local_shapes) {
  const Mesh& mesh = layout.mesh();
  TORCH_OVERLAP_CHECK(static_cast<int64_t>(local_shapes.size()) == mesh.size(), kValue,
                      "global_shape: expected one shape for each of the ", mesh.size(),
                      " ranks, got ", local_shapes.size());
  Shape out(layout.num_dims(), 0);
  for (size_t d = 0; d < out.size(); ++d) {
    for (const int64_t member : mesh.group_at(0, layout.dims()[d])) {
      const Shape& local = local_shapes[static_cast<size_t>(member)];
      check_shape("global_shape", layout, local);
      out[d] += local[d];
    }
  }
  for (int64_t index = 0; index < mesh.size(); ++index) {
    const Shape& local = local_shapes[static_cast<size_t>(index)];
    check_shape("global_shape", layout, local);
    const std::vector<Extent> expected = extents_at(layout, out, index);
    for (size_t d = 0; d < out.size(); ++d) {
      TORCH_OVERLAP_CHECK(local[d] == expected[d].size, kValue, "global_shape: expected size ",
                          expected[d].size, " in dimension ", d, " on rank ",
                          mesh.ranks()[static_cast<size_t>(index)], " for a global size of ",
                          out[d], " under ", layout.str(), ", got ", local[d]);
    }
  }
  return out;
}

void check_shape(std::string_view op, const Layout& layout, const Shape& shape) {
  TORCH_OVERLAP_CHECK(shape.size() == layout.num_dims(), kValue, op, ": expected a shape of ",
                      layout.num_dims(), " dimensions for ", layout.str(), ", got ",
                      list_string(shape));
  for (const int64_t size : shape) {
    TORCH_OVERLAP_CHECK(size >= 0, kValue, op, ": expected sizes of at least 0, got ",
                        list_string(shape));
  }
}

int64_t num_elements(const Shape& shape) noexcept {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

}  // namespace torch_overlap::mesh
