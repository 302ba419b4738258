"""torch.autocast around functions of Sharded values."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torch_overlap.mesh import P, choosing, connect, shard
from torch_overlap.mesh.autocast import _FLOAT32, _LOWER, _WIDEST
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
    with torch.autocast("cpu", torch.bfloat16), choosing("sequential"):
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


LOW, WIDE = "low", torch.float32
# name -> (function of 16-bit h [4, 6] and float32 y [4, 6], the dtype that CUDA's lists give)
CASES = {
    "linalg.vector_norm": (lambda h, y: torch.linalg.vector_norm(h), WIDE),
    "linalg.matrix_norm": (lambda h, y: torch.linalg.matrix_norm(h), WIDE),
    "Tensor.norm": (lambda h, y: h.norm(), WIDE),
    "special.softmax": (lambda h, y: torch.special.softmax(h, 1), WIDE),
    "special.log_softmax": (lambda h, y: torch.special.log_softmax(h, 1), WIDE),
    "special.logsumexp": (lambda h, y: torch.special.logsumexp(h, 1), WIDE),
    "special.expm1": (lambda h, y: torch.special.expm1(h), WIDE),
    "interpolate": (lambda h, y: F.interpolate(h[None], scale_factor=2), WIDE),
    "margin_ranking_loss": (lambda h, y: F.margin_ranking_loss(h, h, h), WIDE),
    "poisson_nll_loss": (lambda h, y: F.poisson_nll_loss(h, h), WIDE),
    "linalg.matmul": (lambda h, y: torch.linalg.matmul(y, y.T), LOW),
    "linalg.multi_dot": (lambda h, y: torch.linalg.multi_dot([y, y.T, y]), LOW),
    "linalg.vecdot": (lambda h, y: torch.linalg.vecdot(y, y), LOW),
    "addr": (lambda h, y: torch.addr(y, y[:, 0], y[0]), LOW),
    "tensordot": (lambda h, y: torch.tensordot(h, y.T, 1), WIDE),
    "tensordot of one dtype": (lambda h, y: torch.tensordot(h, h.T, 1), LOW),
    "inner": (lambda h, y: torch.inner(h, y), WIDE),
    "dot": (lambda h, y: torch.dot(h[0], y[0]), WIDE),
    "addcmul": (lambda h, y: torch.addcmul(y, h, h), WIDE),
    "sin": (lambda h, y: torch.sin(h), LOW),
}


def check_lists(comm, seed):
    mesh = connect({"tp": 2}, comm)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, 6, generator=generator).sigmoid()
    for low in (torch.float16, torch.bfloat16):
        h, y = shard(rows.to(low), mesh, P("tp")), shard(rows.clone(), mesh, P("tp"))
        for name, (function, dtype) in CASES.items():
            want = low if dtype == LOW else dtype
            with torch.autocast("cpu", low):
                got = function(h, y)
            assert got.dtype == want, (name, low, got.dtype)
            torch.testing.assert_close(
                got.full().double(), function(rows.double(), rows.double()), rtol=3e-2, atol=3e-2
            )
    large = shard(torch.full((4, 6), 3e4, dtype=torch.float16), mesh)
    with torch.autocast("cpu", torch.float16):  # whose squares have no 16-bit value
        torch.testing.assert_close(torch.linalg.vector_norm(large).full(), torch.tensor(3e4 * 24**0.5))
    mesh.close()


def test_functions_are_cast_whatever_name_they_have(seed):
    run_ranks(check_lists, 2, seed, backend="local")


def test_every_function_of_cudas_lists_is_in_one_of_ours():
    listed = {name.split("::")[1].split(".")[0]
              for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
              if name.startswith("aten::")}  # fmt: skip
    assert {"matmul", "softmax", "cross", "linalg_vector_norm"} <= listed
    known = _LOWER | _FLOAT32 | _WIDEST
    other = {"binary_cross_entropy", "conv_tbc", "convolution", "native_layer_norm", "nll_loss2d", "grid_sampler"}

    def is_internal(name):  # called by others, or of recurrent cells
        return name.startswith(("_", "cudnn", "upsample")) or name.endswith("_cell") or name in other

    assert {name for name in listed if name.removeprefix("linalg_") not in known and not is_internal(name)} == set()
