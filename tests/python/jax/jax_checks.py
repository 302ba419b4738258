"""Checks over a mesh, for devices in one process and for processes. Every value is compared with float64."""

from __future__ import annotations

import functools
import importlib
import json
import os
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import torch_overlap_jax as toj

AXIS = "tp"
CHECKS: dict[str, Callable[[Mesh, np.random.Generator], None]] = {}
# float8: sums of 8-bit products on Hopper, which have fewer bits than float32.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3, "float8": 2e-4}


def check(function: Callable[..., None]) -> Callable[..., None]:
    CHECKS[function.__name__.removeprefix("check_")] = function
    return function


def run_check(name: str, mesh: Mesh, seed: int) -> None:
    CHECKS[name](mesh, np.random.default_rng([seed, zlib.crc32(name.encode())]))


def mapped(mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def spread(mesh: Mesh, spec: P, values: np.ndarray, dtype: Any = None) -> jax.Array:
    values = np.asarray(values if dtype is None else jnp.asarray(values).astype(dtype))
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])


def assert_close(got: jax.Array, expected: np.ndarray, dtype: str | None = None) -> None:
    """Compares this process's parts of `got` with those of `expected`."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    tolerance = TOLERANCE[dtype or got.dtype.name] * max(1.0, float(np.abs(expected).max(initial=0)))
    for shard in got.addressable_shards:
        np.testing.assert_allclose(
            np.asarray(shard.data).astype(np.float64), expected[shard.index], rtol=0, atol=tolerance
        )


def same_gradients(mesh: Mesh, ours: Any, plain: Any, specs: tuple[P, ...], out_spec: P, *values: np.ndarray) -> None:
    """Compares values and gradients of functions of shard_map, one or a list of them, with those of `plain` under a
    random linear loss."""
    arguments = [spread(mesh, spec, value) for spec, value in zip(specs, values, strict=True)]
    results = []
    for function in (plain, *(ours if isinstance(ours, list) else [ours])):
        wrapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_spec, check_vma=False)

        def loss(*xs: jax.Array, wrapped: Any = wrapped) -> Any:
            out = wrapped(*xs)
            weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
            return (out * weights).sum(), out

        step = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(values))), has_aux=True))
        (_, out), grads = step(*arguments)
        results.append((out, *grads))
    wanted, *found = results
    for got in found:
        for mine, expected in zip(got, wanted, strict=True):
            for a, b in zip(mine.addressable_shards, expected.addressable_shards, strict=True):
                np.testing.assert_allclose(np.asarray(a.data), np.asarray(b.data), rtol=0, atol=1e-11)


# --- Collectives -----------------------------------------------------------------------------------------------------


@check
def check_collectives(mesh: Mesh, rng: np.random.Generator) -> None:
    n = mesh.shape[AXIS]
    x = rng.standard_normal((n * n * 2, n * 3, 2))
    rows = P(AXIS)
    lax = jax.lax
    pairs = [(rank, (rank + 1) % n) for rank in range(n)]
    cases = [
        (lambda x: toj.all_reduce(x, AXIS), lambda x: lax.psum(x, AXIS)),
        (lambda x: toj.all_reduce(x, AXIS, "avg"), lambda x: lax.psum(x, AXIS) / n),
        (lambda x: toj.all_gather(x, AXIS), lambda x: lax.all_gather(x, AXIS, tiled=True)),
        (lambda x: toj.all_gather(x, AXIS, -2), lambda x: lax.all_gather(x, AXIS, axis=1, tiled=True)),
        (lambda x: toj.reduce_scatter(x, AXIS), lambda x: lax.psum_scatter(x, AXIS, tiled=True)),
        (
            lambda x: toj.reduce_scatter(x, AXIS, 1, "avg"),
            lambda x: lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True) / n,
        ),
        (lambda x: toj.all_to_all(x, AXIS, 0, 1), lambda x: lax.all_to_all(x, AXIS, 0, 1, tiled=True)),
        (lambda x: toj.all_to_all(x, AXIS, 1, 0), lambda x: lax.all_to_all(x, AXIS, 1, 0, tiled=True)),
        (lambda x: toj.permute(x, AXIS, pairs), lambda x: lax.ppermute(x, AXIS, pairs)),
        (lambda x: toj.permute(x, AXIS, [(0, n - 1)]), lambda x: lax.ppermute(x, AXIS, [(0, n - 1)])),
        (lambda x: toj.broadcast(x, AXIS, n - 1), lambda x: lax.all_gather(x, AXIS)[n - 1]),
    ]
    for ours, plain in cases:
        same_gradients(mesh, ours, plain, (rows,), rows, x)


@check
def check_reductions(mesh: Mesh, rng: np.random.Generator) -> None:
    n = mesh.shape[AXIS]
    values = rng.integers(1, 5, (n, 6))
    for op, reduced in {"product": values.prod(0), "min": values.min(0), "max": values.max(0)}.items():
        for dtype in (jnp.int32, jnp.int64, jnp.float32, jnp.bfloat16):
            f = mapped(mesh, P(AXIS), P(AXIS))(functools.partial(toj.all_reduce, axis=AXIS, op=op))
            out = f(spread(mesh, P(AXIS), values, dtype))
            assert_close(out, np.tile(reduced, (n, 1)).astype(np.float64), "float64")


@check
def check_independent_calls_keep_their_partners(mesh: Mesh, rng: np.random.Generator) -> None:
    """XLA may run calls that do not depend on each other in any order on each rank; equal shapes would be mixed up."""
    n, count = mesh.shape[AXIS], 12
    xs = rng.standard_normal((count, n * 64, 33))

    @mapped(mesh, P(None, AXIS), P(None, AXIS))
    def f(xs: jax.Array) -> jax.Array:
        return jnp.stack([toj.all_reduce(jnp.sin(x) * (i + 1), AXIS) for i, x in enumerate(xs)])

    parts = np.sin(xs).reshape(count, n, 64, 33).sum(1) * np.arange(1, count + 1)[:, None, None]
    for _ in range(3):
        assert_close(f(spread(mesh, P(None, AXIS), xs)), np.tile(parts, (1, n, 1)))


# --- Overlapped products ---------------------------------------------------------------------------------------------


@check
def check_products(mesh: Mesh, rng: np.random.Generator) -> None:
    n = mesh.shape[AXIS]
    lax = jax.lax
    x, w = rng.standard_normal((3 * n, 2 * n, 4)), rng.standard_normal((4, 5 * n))
    b, full_b = rng.standard_normal(5 * n), rng.standard_normal(6)
    x2, w2 = rng.standard_normal((3 * n, 2 * n, 4 * n)), rng.standard_normal((4 * n, 6))

    def ways(product: Callable[..., jax.Array], **options: Any) -> list[Callable[..., jax.Array]]:
        """Returns the product by each algorithm, as functions of x, w and bias."""
        return [
            lambda x, w, b, algorithm=algorithm: product(x, w, AXIS, bias=b, algorithm=algorithm, **options)
            for algorithm in ("auto", "sequential", "p2p")
        ]

    for dim in (0, 1):
        split = P(AXIS) if dim == 0 else P(None, AXIS)
        same_gradients(
            mesh,
            ways(toj.all_gather_matmul, dim=dim),
            lambda x, w, b: lax.all_gather(x, AXIS, axis=dim, tiled=True) @ w + b,  # noqa: B023
            (split, P(None, AXIS), P(AXIS)),
            P(None, None, AXIS),
            *(x, w, b),
        )
        same_gradients(
            mesh,
            ways(toj.matmul_reduce_scatter, dim=dim),
            lambda x, w, b: lax.psum_scatter(x @ w, AXIS, scatter_dimension=dim, tiled=True) + b,  # noqa: B023
            (P(None, None, AXIS), P(AXIS), P()),
            split,
            *(x2, w2, full_b),
        )
    same_gradients(
        mesh,
        ways(toj.matmul_all_reduce),
        lambda x, w, b: lax.psum(x @ w, AXIS) + b,
        (P(None, None, AXIS), P(AXIS), P()),
        P(),
        *(x2, w2, full_b),
    )


@check
def check_second_order(mesh: Mesh, rng: np.random.Generator) -> None:
    """Gradients of gradients."""
    n, lax = mesh.shape[AXIS], jax.lax
    x, w = rng.standard_normal((2 * n, 3)), rng.standard_normal((3, 2 * n))
    x2, w2 = rng.standard_normal((2 * n, 2 * n)), rng.standard_normal((2 * n, 3))

    def slope(f: Any) -> Any:
        return lambda x, w: jax.grad(lambda x, w: (jnp.sin(f(x, w)) ** 2).sum(), argnums=0)(x, w)

    gather = (P(AXIS), P(None, AXIS)), P(AXIS)
    scatter = (P(None, AXIS), P(AXIS)), P(None, AXIS)
    cases: list[tuple[Any, Any, Any, tuple[np.ndarray, np.ndarray]]] = [
        (
            lambda x, w: toj.all_gather_matmul(x, w, AXIS),
            lambda x, w: lax.all_gather(x, AXIS, tiled=True) @ w,
            gather,
            (x, w),
        ),
        (
            lambda x, w: toj.matmul_reduce_scatter(x, w, AXIS),
            lambda x, w: lax.psum_scatter(x @ w, AXIS, tiled=True),
            scatter,
            (x2, w2),
        ),
        (lambda x, w: toj.matmul_all_reduce(x, w, AXIS), lambda x, w: lax.psum(x @ w, AXIS), scatter, (x2, w2)),
    ]
    for ours, plain, (specs, out_spec), values in cases:
        same_gradients(mesh, slope(ours), slope(plain), specs, out_spec, *values)


@check
def check_product_dtypes(mesh: Mesh, rng: np.random.Generator) -> None:
    n = mesh.shape[AXIS]
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
        x, w = (rng.standard_normal(shape) for shape in ((4 * n, 24), (24, 8 * n)))
        x, w = (np.asarray(jnp.asarray(value).astype(dtype)).astype(np.float64) for value in (x, w))
        f = mapped(mesh, (P(AXIS), P(None, AXIS)), P(None, AXIS))(lambda x, w: toj.all_gather_matmul(x, w, AXIS))
        assert_close(f(spread(mesh, P(AXIS), x, dtype), spread(mesh, P(None, AXIS), w, dtype)), x @ w)


@check
def check_mlp_in_scan(mesh: Mesh, rng: np.random.Generator) -> None:
    """A stack of layers in lax.scan, with checkpoints: gradients of all weights."""
    n, layers = mesh.shape[AXIS], 3
    x = rng.standard_normal((2 * n, 8))
    w1, w2 = rng.standard_normal((layers, 8, 2 * n)) / 3, rng.standard_normal((layers, 2 * n, 8)) / 3

    def stack(up: Any, down: Any) -> Any:
        @jax.checkpoint
        def layer(x: jax.Array, weights: Any) -> Any:
            return x + down(jax.nn.gelu(up(x, weights[0])), weights[1]), None

        return lambda x, w1, w2: jax.lax.scan(layer, x, (w1, w2))[0]

    same_gradients(
        mesh,
        stack(lambda x, w: toj.all_gather_matmul(x, w, AXIS), lambda x, w: toj.matmul_reduce_scatter(x, w, AXIS)),
        stack(
            lambda x, w: jax.lax.all_gather(x, AXIS, tiled=True) @ w,
            lambda x, w: jax.lax.psum_scatter(x @ w, AXIS, tiled=True),
        ),
        (P(AXIS), P(None, None, AXIS), P(None, AXIS)),
        P(AXIS),
        *(x, w1, w2),
    )


@check
def check_vmap_of_x(mesh: Mesh, rng: np.random.Generator) -> None:
    n = mesh.shape[AXIS]
    x, w = rng.standard_normal((3, 2 * n, 4)), rng.standard_normal((4, 2 * n))
    same_gradients(
        mesh,
        lambda x, w: jax.vmap(lambda x: toj.all_gather_matmul(x, w, AXIS))(x),
        lambda x, w: jax.lax.all_gather(x, AXIS, axis=1, tiled=True) @ w,
        (P(None, AXIS), P(None, AXIS)),
        P(None, None, AXIS),
        *(x, w),
    )
    same_gradients(
        mesh,
        jax.vmap(lambda x: toj.reduce_scatter(x, AXIS, 1)),
        lambda x: jax.lax.psum_scatter(x, AXIS, scatter_dimension=2, tiled=True),
        (P(None, None, AXIS),),
        P(None, None, AXIS),
        rng.standard_normal((3, 2, n * n)),
    )


# --- gemm over buffers -----------------------------------------------------------------------------------------------

Type, Method = toj.CommOverlapType, toj.CommOverlapMethod


def overlapped(mesh: Mesh, comm_type: Type, method: Method, shape: tuple[int, int], dtype: Any, **options: Any) -> Any:
    """Returns attributes of a gemm over a new buffer."""
    made = toj.create_comm_overlap_buffer(AXIS, comm_type, method, shape, dtype, **options)
    return {"comm_type": comm_type, "comm_overlap_method": method, "comm_overlap_id": made}


@check
def check_gather_modes(mesh: Mesh, rng: np.random.Generator) -> None:
    n = mesh.shape[AXIS]
    for dtype in (jnp.float64, jnp.float32, jnp.bfloat16):
        for atomic in (False, True):
            x, w, b = (rng.standard_normal(shape) for shape in ((2 * n, 3, 8), (6, 8), (6,)))
            x, w, b = (np.asarray(jnp.asarray(value).astype(dtype)).astype(np.float64) for value in (x, w, b))
            buffer = overlapped(mesh, Type.AG, Method.RING_EXCHANGE, (6 * n, 8), dtype, atomic_gemm=atomic)

            @mapped(mesh, (P(AXIS), P(), P()), (P(), P(), P()))
            def f(x: Any, w: Any, b: Any, buffer: Any = buffer) -> Any:
                epilogue = {"fuse_bias": True, "fuse_gelu": True, "rhs_transposed": True}
                out = toj.gemm(x, w, bias=b, **epilogue, **buffer)
                return out.output, out.pre_gelu_out, out.aux_out

            arguments = [spread(mesh, P(AXIS), x, dtype), spread(mesh, P(), w, dtype), spread(mesh, P(), b, dtype)]
            out, pre_gelu, gathered = f(*arguments)
            before = x @ w.T + b
            assert_close(pre_gelu, before)
            assert_close(out, np.asarray(jax.nn.gelu(before, approximate=True)))
            assert_close(gathered, x)
            toj.destroy_comm_overlap_buffer(buffer["comm_overlap_id"])


@check
def check_scatter_modes(mesh: Mesh, rng: np.random.Generator) -> None:
    n = mesh.shape[AXIS]
    modes = [
        (Method.PIPELINE, False),
        (Method.PIPELINE, True),
        (Method.RING_EXCHANGE, False),
        (Method.RING_EXCHANGE, True),
    ]
    for method, atomic in modes:
        for rows in (2 * n, 2 * n + 1, n - 1):  # the last two are shared unequally
            x, w, b = rng.standard_normal((rows, 4 * n)), rng.standard_normal((4 * n, 8)), rng.standard_normal(8)
            buffer = overlapped(mesh, Type.RS, method, (3 * n, 8), jnp.float64, atomic_gemm=atomic)

            @mapped(mesh, (P(None, AXIS), P(AXIS), P()), P(AXIS))
            def f(x: Any, w: Any, b: Any, buffer: Any = buffer) -> Any:
                return toj.gemm(x, w, bias=b, fuse_bias=True, **buffer).output

            out = f(spread(mesh, P(None, AXIS), x), spread(mesh, P(AXIS), w), spread(mesh, P(), b))
            part = -(-rows // n)
            assert_close(out, np.concatenate([x @ w + b, np.zeros((part * n - rows, 8))]))
            toj.destroy_comm_overlap_buffer(buffer["comm_overlap_id"])


@check
def check_bulk_modes(mesh: Mesh, rng: np.random.Generator) -> None:
    n = mesh.shape[AXIS]
    x, w = rng.standard_normal((5, 4)), rng.standard_normal((4, 3))
    buffer = overlapped(mesh, Type.NONE, Method.BULK, (4 * n, 6), jnp.float64)
    gathers, scatters = buffer | {"comm_type": Type.AG}, buffer | {"comm_type": Type.RS}

    @mapped(mesh, (P(), P(), P(AXIS)), (P(), P()))
    def gather(x: Any, w: Any, aux: Any) -> Any:
        out = toj.gemm(x, w, aux_in=aux, **gathers)
        return out.output, out.aux_out

    @mapped(mesh, (P(), P(), P(AXIS)), (P(), P(AXIS)))
    def scatter(x: Any, w: Any, aux: Any) -> Any:
        out = toj.gemm(x, w, aux_in=aux, **scatters)
        return out.output, out.aux_out

    both = [spread(mesh, P(), x), spread(mesh, P(), w)]
    aux = rng.standard_normal((3 * n, 6))
    product, gathered = gather(*both, spread(mesh, P(AXIS), aux))
    assert_close(product, x @ w)
    assert_close(gathered, aux)
    for rows in (4 * n, 3 * n - 1):
        aux = rng.standard_normal((n, rows, 6))
        product, reduced = scatter(*both, spread(mesh, P(AXIS), aux.reshape(n * rows, 6)))
        part = -(-rows // n)
        assert_close(product, x @ w)
        assert_close(reduced, np.concatenate([aux.sum(0), np.zeros((part * n - rows, 6))]))
    toj.destroy_comm_overlap_buffer(buffer["comm_overlap_id"])


@check
def check_fp8_gather(mesh: Mesh, rng: np.random.Generator) -> None:
    """Tensor scales: the gathered product of 8-bit rows."""
    n = mesh.shape[AXIS]
    e4m3 = jnp.float8_e4m3fn
    x, w = (np.asarray(jnp.asarray(rng.standard_normal(shape)).astype(e4m3)) for shape in ((2 * n, 32), (16, 32)))
    buffer = overlapped(mesh, Type.AG, Method.RING_EXCHANGE, (2 * n, 32), e4m3)

    @mapped(mesh, (P(AXIS), P()), P())
    def f(x: Any, w: Any) -> Any:
        scales = {"lhs_scale_inv": jnp.full((1,), 0.5, jnp.float32), "rhs_scale_inv": jnp.full((1,), 2.0, jnp.float32)}
        mode = toj.ScalingMode.CURRENT_TENSOR_SCALING
        return toj.gemm(x, w, **scales, scaling_mode=mode, rhs_transposed=True, out_dtype=jnp.float32, **buffer).output

    expected = x.astype(np.float64) @ w.astype(np.float64).T
    sums = "float32" if mesh.devices.flat[0].platform == "cpu" else "float8"
    assert_close(f(spread(mesh, P(AXIS), x), spread(mesh, P(), w)), expected, sums)
    toj.destroy_comm_overlap_buffer(buffer["comm_overlap_id"])


# --- Command buffers -------------------------------------------------------------------------------------------------


def is_captured() -> bool:
    """True if a call of this process was captured in a CUDA graph."""
    recorder = importlib.import_module("torch_overlap.flight_recorder")
    return any(entry.get("captured") for entry in json.loads(recorder.dump_json())["entries"])


@check
def check_replays(mesh: Mesh, rng: np.random.Generator) -> None:
    """A program runs many times on memory that changes place: XLA on GPUs captures and replays it."""
    n, on_gpu = mesh.shape[AXIS], mesh.devices.flat[0].platform == "gpu"
    rows, k, hidden = (256 * n, 512, 128 * n) if on_gpu else (4 * n, 8, 4 * n)

    def block(up: Any, down: Any, total: Any) -> Any:
        def f(x: Any, w1: Any, w2: Any) -> Any:
            hidden = jnp.tanh(up(x, w1))
            out = x + down(hidden, w2)
            return out / (1 + total(jnp.abs(out).sum(keepdims=True)) / out.size)

        return mapped(mesh, (P(AXIS), P(None, AXIS), P(AXIS)), P(AXIS))(f)

    lax = jax.lax
    ours = block(
        lambda x, w: toj.all_gather_matmul(x, w, AXIS),
        lambda x, w: toj.matmul_reduce_scatter(x, w, AXIS),
        lambda x: toj.all_reduce(x, AXIS),
    )
    plain = block(
        lambda x, w: lax.all_gather(x, AXIS, tiled=True) @ w,
        lambda x, w: lax.psum_scatter(x @ w, AXIS, tiled=True),
        lambda x: lax.psum(x, AXIS),
    )
    weights = [(P(None, AXIS), (k, hidden)), (P(AXIS), (hidden, k))]
    w1, w2 = (spread(mesh, spec, rng.standard_normal(shape) / shape[0] ** 0.5, jnp.float32) for spec, shape in weights)
    xs = [spread(mesh, P(AXIS), rng.standard_normal((rows, k)), jnp.float32) for _ in range(7)]
    largest = jax.jit(lambda error, a, b: jnp.maximum(error, jnp.abs(a - b).max()))
    kept, error = [], jnp.zeros((), jnp.float32)
    with jax.default_matmul_precision("highest"):
        for step in range(1000 if on_gpu else 20):
            x = xs[step % len(xs)]
            got = ours(x, w1, w2)
            if not on_gpu:  # two programs in flight may use up XLA's threads for the devices of one process
                got.block_until_ready()
            expected = plain(x, w1, w2)
            if not on_gpu:
                expected.block_until_ready()
            error = largest(error, got, expected)
            kept = [*kept, got][-1 - step % 5 :]
    assert float(error) < 2e-4, float(error)
    if on_gpu:
        assert is_captured() == (os.environ["CAPTURED"] == "1")


# --- Partitioned jit -------------------------------------------------------------------------------------------------


@check
def check_partitioned_jit(mesh: Mesh, rng: np.random.Generator) -> None:
    n = mesh.shape[AXIS]
    x, w1, w2 = (rng.standard_normal(shape) for shape in ((4 * n, 6), (6, 2 * n), (2 * n, 6)))
    arguments = [spread(mesh, P(AXIS), x), spread(mesh, P(None, AXIS), w1), spread(mesh, P(AXIS), w2)]

    def loss(column: Any, row: Any) -> Any:
        return lambda x, w1, w2: (jnp.sin(row(jnp.tanh(column(x, w1)), w2)) ** 2).sum()

    ours = loss(lambda x, w: toj.column_parallel(x, w, AXIS), lambda x, w: toj.row_parallel(x, w, AXIS))
    plain = loss(jnp.matmul, jnp.matmul)
    compiled = jax.jit(jax.grad(ours, argnums=(0, 1, 2))).lower(*arguments).compile()
    assert "torch_overlap.AllGatherMatmulHandler" in compiled.as_text()
    assert "torch_overlap.MatmulReduceScatterHandler" in compiled.as_text()
    got = compiled(*arguments)
    expected = jax.grad(plain, argnums=(0, 1, 2))(*(jnp.asarray(value) for value in (x, w1, w2)))
    for one, other in zip(got, expected, strict=True):
        assert_close(one, np.asarray(other), "float32")
