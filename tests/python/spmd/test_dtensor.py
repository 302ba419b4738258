"""Conversion to DTensor and back: values, layouts and gradients."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torch_overlap as to
from torch_overlap.mesh import Layout, Mesh, Sharded, connect, from_dtensor, from_local, mesh_of, shard, to_dtensor
from torch_overlap.mesh.dtensor import layout_from_placements, placements_of
from torch_overlap.testing import run_ranks

CASES = (
    ([Shard(0), Shard(0)], "[a,b],[]"),
    ([Shard(1), Replicate()], "[],[a] I{b}"),
    ([Shard(0), Shard(1)], "[a],[b]"),
    ([Replicate(), Partial()], "[],[] P{b} I{a}"),
    ([Replicate(), Replicate()], "[],[] I{a,b}"),
)


def check_second_gradients(d, x, sum_of_cubes):
    (first,) = torch.autograd.grad(sum_of_cubes(d), d, create_graph=True)
    torch.testing.assert_close(first.full_tensor(), 3 * x**2)
    if any(isinstance(p, Partial) for p in d.placements):
        with pytest.raises(to.UnsupportedError, match="expected no Partial placement where a gradient of a gradient"):
            torch.autograd.grad((first**2).sum().full_tensor(), d)
        return
    (second,) = torch.autograd.grad((first**2).sum().full_tensor(), d)
    torch.testing.assert_close(second.full_tensor(), 36 * x**3)


def check_round_trips(rank, size, store, seed):
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.PrefixStore("pg", store), rank=rank, world_size=size, timeout=limit)
    comm = to.new_comm(
        "gloo", "cpu", "dtensor", store=dist.PrefixStore("c", store), rank=rank, size=size, timeout=limit
    )
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh = connect(mesh_of(devices), comm)
    generator = torch.Generator().manual_seed(seed)
    for placements, text in CASES:
        x = torch.randn(7, 6, generator=generator, dtype=torch.float64)
        if any(isinstance(p, Partial) for p in placements):
            d = DTensor.from_local(x if rank % 2 == 0 else torch.zeros_like(x), devices, placements)
        else:
            d = distribute_tensor(x, devices, placements)
        d = d.detach().requires_grad_()
        s = from_dtensor(d, mesh)
        assert str(s.layout) == text
        torch.testing.assert_close(s.full(), x)
        (s * s).sum().backward()
        torch.testing.assert_close(d.grad.full_tensor(), 2 * x)
        check_second_gradients(d, x, lambda d: (from_dtensor(d, mesh) ** 3).sum().full())
        check_second_gradients(d, x, lambda d: (to_dtensor(from_dtensor(d, mesh), devices) ** 3).sum().full_tensor())

        again = Sharded(s.local.detach().requires_grad_(), s.spec)
        back = to_dtensor(again, devices)
        assert list(back.placements) == placements
        torch.testing.assert_close(back.full_tensor(), x)
        (back * back).sum().backward()
        torch.testing.assert_close(again.grad.full(), 2 * x)
        cubes = (to_dtensor(again, devices) ** 3).sum().full_tensor()
        (first,) = torch.autograd.grad(cubes, again.local, create_graph=True)
        if any(isinstance(p, Partial) for p in placements):
            with pytest.raises(to.UnsupportedError, match="expected no Partial placement where a gradient of a grad"):
                torch.autograd.grad(first.sum(), again.local)
        else:
            (second,) = torch.autograd.grad(first.square().sum(), again.local)
            torch.testing.assert_close(second, 36 * again.local.detach() ** 3)

    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    r = shard(x, mesh, Layout.replicated(mesh.mesh, 2)).requires_grad_()  # its gradient is partial
    to_dtensor(r, devices).square().sum().backward()
    torch.testing.assert_close(r.grad.full(), 2 * x)

    for kind in ("sum", "avg", "max", "min", "product"):  # the gradient of each rank's term
        layout = Layout.parse(mesh.mesh, f"[],[] P{{a:{kind}}} I{{b}}")
        terms = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64).requires_grad_()
        reduced = {"sum": terms.sum(0), "avg": terms.mean(0), "max": terms.amax(0), "min": terms.amin(0),
                   "product": terms.prod(0)}[kind]  # fmt: skip
        weights = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        (reduced * weights).sum().backward()
        own = terms.detach()[rank // 2].clone().requires_grad_()
        back = to_dtensor(from_local(own, mesh, layout), devices)
        torch.testing.assert_close(back.full_tensor(), reduced)
        loss = (back.full_tensor() * weights).sum()
        if kind in ("sum", "avg"):
            loss.backward()
            torch.testing.assert_close(own.grad, terms.grad[rank // 2])
        else:  # as for the reduction of a Sharded
            with pytest.raises(RuntimeError, match=f"where a gradient is asked, got '{kind}'"):
                loss.backward()
        held = to_dtensor(from_local(own.detach(), mesh, layout), devices)  # needs no gradient
        assert held.placements == (Partial(kind), Replicate())

    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    with pytest.raises(to.InvalidValueError, match=r"expected a DeviceMesh of shape \(2, 2\)"):
        to_dtensor(r, flat)
    for call in (lambda: r + d, lambda: shard(d, mesh)):
        with pytest.raises(to.InvalidTypeError, match=r"got a DTensor.*; from_dtensor takes it"):
            call()
    mesh.close()
    comm.finalize()
    dist.destroy_process_group()


def test_dtensors_come_and_go(seed):
    run_ranks(check_round_trips, 4, seed, comm=False)


def test_layouts_that_dtensor_has_no_words_for():
    mesh = Mesh({"a": 2, "b": 4})
    with pytest.raises(to.UnsupportedError, match="in the order of the mesh"):
        placements_of(Layout.parse(mesh, "[b,a]"))
    with pytest.raises(to.UnsupportedError, match="expected whole axes"):
        placements_of(Layout.parse(mesh, "[b:(1)2]"))
    with pytest.raises(to.InvalidValueError, match="a placement for each axis"):
        layout_from_placements(mesh, [Shard(0)], 1)
    assert str(layout_from_placements(mesh, [Shard(-1), Partial("max")], 2)) == "[],[a] P{b:max}"
