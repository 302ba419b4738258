"""torch.autocast around functions of Sharded values."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torch_overlap.mesh import P, connect, shard
from torch_overlap.testing import run_ranks


def check(comm, seed):
    mesh = connect({"dp": 2, "tp": 2}, comm)
    generator = torch.Generator().manual_seed(seed)
    x, w, v = (torch.randn(*s, generator=generator) for s in ((8, 16), (32, 16), (4, 32)))
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
    torch.testing.assert_close(p.full(), expected, rtol=2e-2, atol=2e-2)  # pending sums are rounded apart
    for leaf, reference in zip(leaves, plain, strict=True):
        assert leaf.grad.dtype == torch.float32
        torch.testing.assert_close(leaf.grad.full(), reference.grad, rtol=5e-2, atol=5e-2)
    half = leaves[0].detach().to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert F.linear(half, half).dtype == torch.bfloat16
    mesh.close()


def test_products_are_cast_down_and_sums_of_exponentials_up(seed):
    run_ranks(check, 4, seed, backend="local")
