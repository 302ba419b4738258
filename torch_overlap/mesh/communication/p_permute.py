"""ppermute: permutes local tensors among ranks.

Shape and layout are unchanged. Gradient: the inverse permutation. Cost: a rank's tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_overlap._C import InvalidValueError
from torch_overlap.mesh.communication.base import Axes, axis_names, in_mesh_order, sharded_spec
from torch_overlap.mesh.dynamo import as_dynamo_constant
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import ValueSpec, unused_axes, used_axes

__all__ = ["ppermute"]


def ppermute_axes(spec: ValueSpec, permutation: Iterable[tuple[int, int]], axes: Axes = None) -> list[str]:
    """Checks the arguments of ppermute and returns the names of the axes, in mesh order."""
    mesh = spec.mesh.mesh
    names = in_mesh_order(mesh, axis_names("ppermute", mesh, axes) or mesh.axes)
    ranks, pairs = mesh.group(spec.mesh.rank, names), list(permutation)
    for what, used in (("source", [a for a, _ in pairs]), ("target", [b for _, b in pairs])):
        if len(set(used)) != len(used) or any(not 0 <= i < len(ranks) for i in used):
            raise InvalidValueError(
                f"ppermute: expected each place below {len(ranks)}, along {names}, at most once as a {what}, got "
                f"{pairs}"
            )
    rest = [n for n in unused_axes(spec.layout.with_invariant(None)) if ":" in n and n.split(":")[0] in names]
    if rest:
        raise InvalidValueError(
            f"ppermute: expected axes along which local tensors are all copies or none, got copies along {rest} of "
            f"{spec.text}; reshard it"
        )
    differ = used_axes(spec.layout)
    whole = [n for n in names if n not in differ and mesh.axes[n] > 1]
    if whole and len(pairs) != len(ranks):
        raise InvalidValueError(
            f"ppermute: expected a source for each of the {len(ranks)} places, as {spec.text} is the same along "
            f"{whole}, got {pairs}; name the axes that move, or assume_partial it"
        )
    if len({spec.layout.local_shape(spec.shape, rank) for rank in ranks}) > 1:
        raise InvalidValueError(
            f"ppermute: expected local tensors of one shape along {names}, got {tuple(spec.shape)} under {spec.text}"
        )
    return names


def _group(spec: ValueSpec, pairs: list[tuple[int, int]], axes: Axes) -> str | None:
    comm = spec.mesh.group_comm(ppermute_axes(spec, pairs, axes))
    return None if comm is None else comm.get_name()


def ppermute(x: Sharded, permutation: Iterable[tuple[int, int]], axes: Axes = None) -> Sharded:
    """Copies the local tensor of position `src` to position `dst`, for each pair. A position without a source gets
    zeros.

    Positions are numbered in row-major order along `axes`, in the order of the mesh. Default for `axes`: the whole
    mesh. Along other axes each group permutes independently. The gradient is permuted in reverse.

    Raises:
        InvalidValueError: a position twice as a source or a target, or out of range; local tensors of different shapes.
    """
    spec = sharded_spec("ppermute", x)
    pairs = list(permutation)
    comm = as_dynamo_constant(_group, spec, pairs, axes)
    if comm is None:
        return x
    local = torch.ops.torch_overlap.permute(x.local, [i for pair in pairs for i in pair], comm)
    return Sharded(local, spec)
