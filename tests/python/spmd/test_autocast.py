"""torch.autocast around functions of Sharded values."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torch_overlap.mesh import P, choosing, connect, shard
from torch_overlap.testing import run_ranks


def check(comm, seed):
    mesh = connect({"dp": 2, "tp": 2}, comm)
    generator = torch.Generator().manual_seed(seed)
    # Logits are about one: if they are large, the rounding error of bfloat16 dominates the softmax.
    x, w, v = (torch.randn(*s, generator=generator) / s[1] ** 0.5 for s in ((8, 16), (32, 16), (4, 32)))
    leaves = [shard(t, mesh, p).requires_grad_() for t, p in ((x, P("dp")), (w, P("tp")), (v, P(None, "tp")))]
    with torch.autocast("cpu", torch.bfloat16):
        h = F.gelu(F.linear(leaves[0], leaves[1]))
        y = F.linear(h, leaves[2])
        p = y.softmax(-1)
        both = y + leaves[0][:, :4]
    assert (h.dtype, y.dtype, p.dtype, both.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    p.square().sum().backward()

    plain = [t.clone().requires_grad_() for t in (x, w, v)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(F.gelu(F.linear(plain[0], plain[1])), plain[2]).float().softmax(-1)
    expected.square().sum().backward()
    torch.testing.assert_close(p.full(), expected, rtol=1e-2, atol=0)  # partial sums are rounded separately
    for leaf, reference in zip(leaves, plain, strict=True):
        assert leaf.grad.dtype == torch.float32
        torch.testing.assert_close(
            leaf.grad.full(), reference.grad, rtol=0, atol=4e-2 * float(reference.grad.abs().max())
        )
    half = leaves[0].detach().to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert F.linear(half, half).dtype == torch.bfloat16
    mesh.close()


def test_products_are_cast_down_and_sums_of_exponentials_up(seed):
    run_ranks(check, 4, seed, backend="local")


def check_casts(comm, seed):
    """A long weight and few rows: a gather of the weight's cast would be cheaper than one of the rows."""
    mesh = connect({"tp": 2}, comm)
    generator = torch.Generator().manual_seed(seed)
    rows, weights = torch.randn(256, 8, generator=generator), torch.randn(2, 4, 8, generator=generator)
    x = shard(rows, mesh, P("tp")).requires_grad_()
    anchored = [shard(w, mesh, P("tp")).requires_grad_().anchor() for w in weights]
    names = []
    comm.register_pre_hook(lambda name, *_: names.append(name.name))
    h = x * 1.0  # a function's result: its casts and reshards are cached
    with torch.autocast("cpu", torch.bfloat16), choosing("plain"):
        outs = [F.linear(h, w) for w in anchored]
        transposed = h @ anchored[0].T
    # The rows were cast once, and gathered once; no weight was.
    assert names == ["all_gather_single"]
    expected = [rows.bfloat16() @ w.T.bfloat16() for w in weights]
    for out, reference in zip([*outs, transposed], [*expected, expected[0]], strict=True):
        assert (out.dtype, str(out.layout.with_invariant(None))) == (torch.bfloat16, "[],[tp]")
        torch.testing.assert_close(out.full(), reference, rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        x.local.fill_(2)  # values that no function made are cast again
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(F.linear(x, anchored[0]).full(), 2 * weights[0].sum(1).bfloat16().expand(256, 4),
                                       rtol=2e-2, atol=5e-2)  # fmt: skip
    mesh.close()


def check_writes(comm):
    """The cast of a view, or of a result, is made again after the memory was written."""
    mesh = connect({"tp": comm.get_size()}, comm)
    x = shard(torch.ones(4, 6), mesh, P())
    w = shard(torch.ones(8, 6), mesh, P("tp"))
    views = [w.T, w.reshape(8, 6).T, w.float().T]
    result = w * 1
    with torch.no_grad():
        for value in (1, 2, 3):
            w.local.fill_(value)
            result.local.fill_(value)
            with torch.autocast("cpu", torch.bfloat16):
                for transposed in (*views, result.T):
                    assert ((x @ transposed).full() == 6 * value).all()
                assert (F.linear(x, result).full() == 6 * value).all()
    mesh.close()


def test_a_cast_is_of_what_the_memory_holds():
    run_ranks(check_writes, 2, backend="local")


def test_a_cast_keeps_its_anchor_and_is_made_once(seed):
    run_ranks(check_casts, 2, seed, backend="local")
