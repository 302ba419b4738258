#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/ops/async.h"
#include "torch_overlap/ops/casts.h"
#include "torch_overlap/ops/ops.h"
#include "torch_overlap/ops/reshard.h"

namespace torch_overlap::ops {
namespace {

using mesh::AxisList;
using mesh::AxisRef;
using mesh::Extent;
using mesh::Layout;
using mesh::Mesh;
using mesh::ReduceKind;
using mesh::Step;
using mesh::StepKind;
using spmd::Group;
using spmd::MeshComms;

// Returns the part of a dimension of size n, sharded along `axes`, that the rank at this index has.
Extent shard_extent(const Mesh& mesh, int64_t index, const AxisList& axes, int64_t n) {
  std::vector<int64_t> sizes;
  std::vector<int64_t> coordinates;
  for (const AxisRef& ref : axes) {
    sizes.push_back(ref.size);
    coordinates.push_back(mesh.coordinate_at(index, ref));
  }
  return mesh::chunk(n, sizes, coordinates);
}

// The parts of a dimension of size n sharded along some axes, in the order of the axes: extent of
// part i, and the member of the communicator that has it.
struct ShardLayout {
  std::vector<Extent> extents;
  std::vector<size_t> members;
  size_t own = 0;
  int64_t largest = 0;
  bool plain = true;  // all parts have one size and are in the order of the members

  ShardLayout(const MeshComms& comms, const Group& group, const AxisList& axes, int64_t n) {
    const std::vector<int64_t> order = comms.mesh().group_at(comms.index(), axes);
    for (size_t i = 0; i < order.size(); ++i) {
      extents.push_back(shard_extent(comms.mesh(), order[i], axes, n));
      const auto member = std::find(group.indices.begin(), group.indices.end(), order[i]);
      members.push_back(static_cast<size_t>(member - group.indices.begin()));
      if (order[i] == comms.index()) own = i;
      largest = std::max(largest, extents[i].size);
      plain = plain && members[i] == i && extents[i].size == extents[0].size;
    }
  }
};

Tensor padded_to(const Tensor& x, int64_t dim, int64_t size) {
  const int64_t missing = size - x.size(dim);
  if (missing == 0) return x;
  std::vector<int64_t> pad(static_cast<size_t>(2 * (x.dim() - dim)), 0);
  pad.back() = missing;
  return at::constant_pad_nd(x, pad);
}

// Returns x, sharded along `dim`, with the parts in the order of the members, padded to the largest
// part.
Tensor to_member_order(const Tensor& x, int64_t dim, const ShardLayout& parts) {
  if (parts.plain) return x;
  std::vector<Tensor> by_member(parts.members.size());
  for (size_t i = 0; i < parts.members.size(); ++i) {
    const Extent& extent = parts.extents[i];
    by_member[parts.members[i]] =
        padded_to(x.narrow(dim, extent.offset, extent.size), dim, parts.largest);
  }
  return at::cat(by_member, dim);
}

// The inverse of to_member_order().
Tensor from_member_order(const Tensor& x, int64_t dim, const ShardLayout& parts) {
  if (parts.plain) return x;
  std::vector<Tensor> in_order;
  for (size_t i = 0; i < parts.members.size(); ++i) {
    in_order.push_back(x.narrow(dim, static_cast<int64_t>(parts.members[i]) * parts.largest,
                                parts.extents[i].size));
  }
  return at::cat(in_order, dim);
}

bool is_invariant(const Layout& layout, const AxisRef& ref) {
  return std::any_of(layout.invariant().begin(), layout.invariant().end(),
                     [&](const AxisRef& other) { return overlap(other, ref); });
}

AxisList invariant_ones(const AxisList& axes, const Layout& layout) {
  AxisList out;
  for (const AxisRef& ref : axes) {
    if (is_invariant(layout, ref)) out.push_back(ref);
  }
  return out;
}

bool is_first(const MeshComms& comms, const AxisList& axes) {
  return std::all_of(axes.begin(), axes.end(), [&](const AxisRef& ref) {
    return comms.mesh().coordinate_at(comms.index(), ref) == 0;
  });
}

class StepRunner {
 public:
  StepRunner(const Tensor& x, const Step& step, const mesh::Shape& shape, MeshComms& comms)
      : step_(step),
        comms_(comms),
        can_split_comm_(can_start_async(x)),
        has_gradient_(!can_split_comm_ || needs_autograd(x)),
        before_(sizes(step.before, shape)),
        after_(sizes(step.after, shape)),
        largest_(mesh::largest_local_shape(step.before, shape)) {}

  Tensor operator()(const Tensor& x) const {
    switch (step_.kind) {
      case StepKind::kSlice:
        return slice(x);
      case StepKind::kAllGather:
        return all_gather(x);
      case StepKind::kAllReduce:
        return all_reduce(x);
      case StepKind::kReduceScatter:
        return reduce_scatter(x);
      case StepKind::kAllToAll:
        return all_to_all(x);
      case StepKind::kPermute:
        return permute(x);
      case StepKind::kMakePartial:
        return make_partial(x);
      case StepKind::kCast:
        return cast(x);
    }
    return x;
  }

 private:
  mesh::Shape sizes(const Layout& layout, const mesh::Shape& shape) const {
    mesh::Shape out;
    for (const Extent& extent : mesh::extents_at(layout, shape, comms_.index())) {
      out.push_back(extent.size);
    }
    return out;
  }

  const Group& group(const AxisList& axes) const { return comms_.group(axes, can_split_comm_); }

  static int64_t size(const Group& group) { return static_cast<int64_t>(group.indices.size()); }

  Tensor to_replicated(const Tensor& x, const AxisList& axes) const {
    if (!has_gradient_) return x;
    const Group& members = group(axes);
    return members.comm ? invariant_to_replicated(x, members.comm_name, size(members)) : x;
  }

  // Slices x. The gradient of an invariant value is an all_gather, or if parts are uneven a sum
  // over ranks of zeros and each rank's own part. Without a gradient nothing is sent, and no
  // communicator is needed.
  Tensor slice(const Tensor& x) const {
    const int64_t dim = step_.dim;
    const int64_t n = before_[static_cast<size_t>(dim)];
    const Extent own = shard_extent(comms_.mesh(), comms_.index(), step_.axes, n);
    const AxisList invariant = invariant_ones(step_.axes, step_.before);
    if (invariant.empty()) return x.narrow(dim, own.offset, own.size);
    if (!has_gradient_) {
      return x.narrow(dim, own.offset, own.size).clone(at::MemoryFormat::Contiguous);
    }
    const Group& members = group(step_.axes);
    const ShardLayout parts(comms_, members, step_.axes, n);
    if (invariant.size() == step_.axes.size() && parts.plain && members.comm) {
      return own_part(x, dim, members.comm_name, size(members));
    }
    return to_replicated(x, invariant).narrow(dim, own.offset, own.size);
  }

  // Casts the replicated x to invariant along the axes `invariant`.
  Tensor with_gradient(const Tensor& x, const AxisList& invariant) const {
    return invariant.size() == step_.axes.size() || invariant.empty()
               ? x
               : replicated_to_invariant(x, is_first(comms_, invariant));
  }

  Tensor all_gather(const Tensor& x) const {
    const int64_t dim = step_.dim;
    const Group& members = group(step_.axes);
    if (!members.comm) return x;
    const ShardLayout parts(comms_, members, step_.axes, after_[static_cast<size_t>(dim)]);
    const AxisList invariant = invariant_ones(step_.axes, step_.after);
    const std::string_view grad = invariant.size() == step_.axes.size() ? "I" : "R";
    const Tensor gathered = ops::all_gather(padded_to(x, dim, parts.largest), dim,
                                            members.comm_name, size(members), grad);
    return with_gradient(from_member_order(gathered, dim, parts), invariant);
  }

  Tensor all_reduce(const Tensor& x) const {
    const Group& members = group(step_.axes);
    if (!members.comm) return x;
    const AxisList invariant = invariant_ones(step_.axes, step_.after);
    const std::string_view grad = invariant.size() == step_.axes.size() ? "I" : "R";
    return with_gradient(
        ops::all_reduce(x, to_string(step_.reduce), members.comm_name, size(members), grad),
        invariant);
  }

  Tensor reduce_scatter(const Tensor& x) const {
    const int64_t dim = step_.dim;
    const Group& members = group(step_.axes);
    if (!members.comm) return x;
    const ShardLayout parts(comms_, members, step_.axes, before_[static_cast<size_t>(dim)]);
    const Tensor mine =
        ops::reduce_scatter(to_member_order(x, dim, parts), dim, to_string(step_.reduce),
                            members.comm_name, size(members));
    return mine.narrow(dim, 0, parts.extents[parts.own].size);
  }

  Tensor all_to_all(const Tensor& x) const {
    const int64_t dim = step_.dim;
    const int64_t from = step_.from_dim;
    const Group& members = group(step_.axes);
    if (!members.comm) return x;
    const ShardLayout cut(comms_, members, step_.axes, before_[static_cast<size_t>(dim)]);
    const ShardLayout joined(comms_, members, step_.axes, after_[static_cast<size_t>(from)]);
    const Tensor sent = to_member_order(padded_to(x, from, joined.largest), dim, cut);
    const Tensor got = ops::all_to_all(sent, dim, from, members.comm_name, size(members));
    return from_member_order(got.narrow(dim, 0, cut.extents[cut.own].size), from, joined);
  }

  Tensor permute(const Tensor& x) const {
    const Group& members = group(step_.axes);
    if (!members.comm) return x;
    const auto begin = members.indices.begin();
    std::vector<int64_t> pairs;
    for (size_t target = 0; target < members.indices.size(); ++target) {
      const auto source =
          std::find(begin, members.indices.end(), step_.source_at(members.indices[target]));
      pairs.push_back(source - begin);
      pairs.push_back(static_cast<int64_t>(target));
    }
    // Axes along which the value was whole before, and along which it is whole afterwards. If all
    // of them are invariant, so are the gradients in the backward pass.
    const AxisList whole_before = unused(step_.before);
    const AxisList whole_after = unused(step_.after);
    const AxisList before = invariant_ones(whole_before, step_.before);
    const AxisList after = invariant_ones(whole_after, step_.after);
    const bool stays = before.size() == whole_before.size() && after.size() == whole_after.size();
    // The received tensor may be larger or smaller than the sent one.
    Tensor sent = stays || before.empty() ? x : to_replicated(x, before);
    for (int64_t d = 0; d < x.dim(); ++d)
      sent = padded_to(sent, d, largest_[static_cast<size_t>(d)]);
    Tensor got = ops::permute(sent, pairs, members.comm_name);
    for (int64_t d = 0; d < x.dim(); ++d) got = got.narrow(d, 0, after_[static_cast<size_t>(d)]);
    return stays || after.empty() ? got : replicated_to_invariant(got, is_first(comms_, after));
  }

  // Returns those axes of the step along which all ranks have the same value.
  AxisList unused(const Layout& layout) const {
    AxisList out = step_.axes;
    std::erase_if(out, [&](const AxisRef& ref) { return layout.uses(ref); });
    return out;
  }

  // A value that all ranks have is its own average, maximum and minimum.
  Tensor make_partial(const Tensor& x) const {
    const bool counts_once =
        step_.reduce == ReduceKind::kSum || step_.reduce == ReduceKind::kProduct;
    const AxisList invariant = invariant_ones(step_.axes, step_.before);
    if (!counts_once) return invariant.empty() ? x : to_replicated(x, invariant);
    const bool mine = is_first(comms_, step_.axes);
    const double fill = step_.reduce == ReduceKind::kSum ? 0 : 1;
    if (invariant.size() == step_.axes.size()) return invariant_to_partial(x, mine, fill);
    return replicated_to_partial(invariant.empty() ? x : to_replicated(x, invariant), mine, fill);
  }

  Tensor cast(const Tensor& x) const {
    const AxisList to_invariant = invariant_ones(step_.axes, step_.after);
    AxisList to_plain;
    for (const AxisRef& ref : step_.axes) {
      if (!is_invariant(step_.after, ref)) to_plain.push_back(ref);
    }
    const Tensor y = to_plain.empty() ? x : to_replicated(x, to_plain);
    return to_invariant.empty() ? y : replicated_to_invariant(y, is_first(comms_, to_invariant));
  }

  const Step& step_;
  MeshComms& comms_;
  const bool can_split_comm_;
  const bool has_gradient_;   // or may have one: unknown under a compiler or vmap
  const mesh::Shape before_;  // shape of this rank's tensor
  const mesh::Shape after_;
  const mesh::Shape largest_;  // largest shape of all ranks before the step
};

}  // namespace

Tensor run_step(const Tensor& x, const Step& step, const mesh::Shape& shape, MeshComms& comms) {
  return StepRunner(x, step, shape, comms)(x);
}

}  // namespace torch_overlap::ops
