"""Invalid arguments of bootstrap, buffers, collectives and products, and vmap that is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax_checks import mapped

import torch_overlap_jax as toj

Type, Method = toj.CommOverlapType, toj.CommOverlapMethod


@pytest.fixture(scope="module")
def mesh():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    axis = toj.bootstrap(mesh, "tp", timeout=30)
    yield mesh
    axis.close()


def traced(mesh, f, *values):
    return mapped(mesh, tuple(P() for _ in values), P())(f).lower(*values)


def test_bootstrap_names_the_axis(mesh):
    with pytest.raises(ValueError, match=r"bootstrap: expected axis to be one of \('tp',\), got 'dp'"):
        toj.bootstrap(mesh, "dp")
    with pytest.raises(ValueError, match=r"all_reduce: expected axis to be one of \['tp'\], got 'dp'"):
        toj.all_reduce(jnp.ones(3), "dp")


def test_concurrent_commands_are_refused(mesh, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT --xla_other=1")
    with pytest.raises(ValueError, match=r"keep the order of calls .* Remove it, or use LHS or SERIALIZE"):
        toj.bootstrap(mesh, "tp", command_buffers=True)
    monkeypatch.delenv("XLA_FLAGS")
    with pytest.raises(ValueError, match=r"bootstrap: expected command_buffers=False, as in the first call of this"):
        toj.bootstrap(mesh, "tp", command_buffers=True)


def test_a_program_over_another_mesh_is_refused(mesh):
    x, w = jnp.ones((4, 4)), jnp.ones((4, 4))
    square = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("dp", "tp"))
    for call in (
        lambda x: toj.all_reduce(x, "tp"),
        lambda x: toj.matmul_reduce_scatter(x, x, "tp"),
    ):
        with pytest.raises(
            ValueError, match=r"expected a mesh with 2 devices along 'tp', as that of bootstrap\(\), got 4"
        ):
            mapped(square, P(), P())(call).lower(x)
    reverse = Mesh(np.array(jax.devices()[1::-1]), ("tp",))
    for product in (toj.column_parallel, toj.row_parallel):
        place = jax.NamedSharding(reverse, P("tp"))
        with pytest.raises(Exception, match=r"expected the mesh that bootstrap\(\) was called with"):
            jax.jit(lambda x, w: product(x, w, "tp"))(jax.device_put(x, place), jax.device_put(w, place))  # noqa: B023


def test_where_partitioned_products_are_refused(mesh):
    x = jnp.ones((4, 4))
    with pytest.raises(ValueError, match=r"column_parallel: .* outside of shard_map, .* Call all_gather_matmul there"):
        traced(mesh, lambda x: toj.column_parallel(x, x, "tp"), x)
    explicit = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    place = jax.NamedSharding(explicit, P("tp"))
    with pytest.raises(ValueError, match="row_parallel: expected arrays of a mesh whose axes are Auto"):
        jax.jit(lambda x: toj.row_parallel(x, x, "tp")).lower(jax.device_put(x, place))


def test_results_vary_over_the_ranks(mesh):
    """With check_vma=True, JAX refuses to take parts of the ranks for one value, and gradients are the same."""
    x = jnp.arange(12.0).reshape(4, 3)

    def checked(f, out, where):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=where, out_specs=out))

    for where in (P("tp"), P()):
        with pytest.raises(ValueError, match="out_specs"):
            checked(lambda x: toj.reduce_scatter(x, "tp"), P(), where).lower(x)
    made = toj.create_comm_overlap_buffer("tp", Type.RS, Method.PIPELINE, (4, 4), jnp.float64)
    buffer = {"comm_type": Type.RS, "comm_overlap_method": Method.PIPELINE, "comm_overlap_id": made}
    with pytest.raises(ValueError, match="out_specs"):
        checked(lambda x: toj.gemm(x, x.T, **buffer).output, P(), P()).lower(x)
    toj.destroy_comm_overlap_buffer(made)
    lax = jax.lax
    for ours, plain in (
        (lambda x: toj.all_gather(x, "tp"), lambda x: lax.all_gather(x, "tp", tiled=True)),
        (lambda x: toj.reduce_scatter(x, "tp"), lambda x: lax.psum_scatter(x, "tp", tiled=True)),
        (
            lambda x: toj.matmul_reduce_scatter(x, x.T, "tp"),
            lambda x: lax.psum_scatter(x @ x.T, "tp", tiled=True),
        ),
    ):
        got, want = (
            jax.value_and_grad(lambda x: (jnp.sin(checked(f, P("tp"), P("tp"))(x)) ** 2).sum())(x)  # noqa: B023
            for f in (ours, plain)
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-10)


def test_bad_options_are_named(mesh):
    x, w = jnp.ones((2, 4)), jnp.ones((4, 2))
    with pytest.raises(ValueError, match=r"expected algorithm to be one of auto, fused, .* got 'quick'"):
        traced(mesh, lambda x, w: toj.all_gather_matmul(x, w, "tp", algorithm="quick"), x, w)
    with pytest.raises(TypeError, match="expected bias of dtype float64 as x, got float32"):
        traced(mesh, lambda x, w: toj.matmul_all_reduce(x, w, "tp", bias=jnp.ones(2, jnp.float32)), x, w)
    with pytest.raises(TypeError, match="integer"):
        traced(mesh, lambda x: toj.broadcast(x, "tp", 1.0), x)
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="bootstrap: expected timeout to be a positive number of seconds"):
            toj.bootstrap(mesh, "tp", timeout=bad)
    with pytest.raises(ValueError, match="expected num_splits to be None or a number from 0, got -3"):
        toj.create_comm_overlap_buffer("tp", Type.RS, Method.PIPELINE, (8, 8), jnp.float32, num_splits=-3)
    with pytest.raises(ValueError, match="gemm: expected workspace_bytes from 0, got -1"):
        toj.gemm(x, w, workspace_bytes=-1)


def test_two_axes_of_one_process():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "mp"))
    axes = [toj.bootstrap(mesh, name, timeout=30) for name in mesh.axis_names]
    x = np.arange(4.0).reshape(2, 2)

    @mapped(mesh, P("dp", "mp"), P("dp", "mp"))
    def f(x):
        return toj.all_reduce(x, "mp") + 100 * toj.all_reduce(x, "dp")

    np.testing.assert_array_equal(np.asarray(f(x)), x.sum(1, keepdims=True) + 100 * x.sum(0, keepdims=True))
    for axis in axes:
        axis.close()


def test_buffers_are_counted_and_checked(mesh):
    arguments = ("tp", Type.RS, Method.PIPELINE, (8, 4), jnp.float32)
    made = toj.create_comm_overlap_buffer(*arguments)
    assert toj.create_comm_overlap_buffer(*arguments) == made
    assert toj.create_comm_overlap_buffer(*arguments, num_splits=2) != made
    toj.destroy_comm_overlap_buffer(made)
    toj.destroy_comm_overlap_buffer(made)
    with pytest.raises(ValueError, match=f"expected the id of a live buffer, got {made}, which was destroyed"):
        toj.destroy_comm_overlap_buffer(made)
    for expected, error, change in [
        ("expected RS for PIPELINE, got AG", NotImplementedError, {1: Type.AG}),
        ("expected buffer_dtype to be one of", TypeError, {4: jnp.int32}),
        (r"expected buffer_shape to be \(tokens, features\)", ValueError, {3: (8,)}),
        ("invalid method", ValueError, {2: Method.NONE}),
    ]:
        changed = [change.get(place, value) for place, value in enumerate(arguments)]
        with pytest.raises(error, match=expected):
            toj.create_comm_overlap_buffer(*changed)
    with pytest.raises(ValueError, match="expected tp_size to be the size of the group, 2, got 3"):
        toj.create_comm_overlap_buffer(*arguments, tp_size=3)
    toj.destroy_all_comm_overlap_buffers()


def test_shapes_are_checked_when_a_program_is_traced(mesh):
    x, w = jnp.ones((3, 4)), jnp.ones((4, 6))
    for expected, f in [
        (
            "reduce_scatter: expected a dimension 0 of x that 2 ranks can share equally, got 3",
            lambda x, w: toj.reduce_scatter(x, "tp"),
        ),
        ("all_to_all: expected split_dim in", lambda x, w: toj.all_to_all(x, "tp", 2, 0)),
        ("all_reduce: expected op to be one of", lambda x, w: toj.all_reduce(x, "tp", "mean")),
        ("broadcast: expected root in", lambda x, w: toj.broadcast(x, "tp", 2)),
        ("permute: expected each rank at most once", lambda x, w: toj.permute(x, "tp", [(0, 1), (0, 0)])),
        ("permute: expected ranks in", lambda x, w: toj.permute(x, "tp", [(0, 2)])),
        (r"all_gather_matmul: expected x \[\.\.\., k\] and w \[k, n\]", lambda x, w: toj.all_gather_matmul(x, x, "tp")),
        (
            "all_gather_matmul: expected dim to be a dimension of rows",
            lambda x, w: toj.all_gather_matmul(x, w, "tp", dim=1),
        ),
        ("matmul_reduce_scatter: expected a dimension 0 of x", lambda x, w: toj.matmul_reduce_scatter(x, w, "tp")),
        ("matmul_all_reduce: expected bias of shape", lambda x, w: toj.matmul_all_reduce(x, w, "tp", bias=x[0])),
    ]:
        with pytest.raises(ValueError, match=expected):
            traced(mesh, f, x, w)
    with pytest.raises(TypeError, match="expected w of dtype float64 as x, got float32"):
        traced(mesh, lambda x, w: toj.matmul_all_reduce(x, w, "tp"), x, w.astype(jnp.float32))
    for product in (toj.all_gather_matmul, toj.matmul_reduce_scatter, toj.matmul_all_reduce):
        with pytest.raises(TypeError, match="expected x of numbers, got dtype bool"):
            traced(mesh, lambda x, w: product(x, w, "tp"), x > 0, w > 0)  # noqa: B023


def test_an_algorithm_that_cannot_run_reaches_python(mesh):
    x, w = jnp.ones((2, 4)), jnp.ones((4, 6))
    f = mapped(mesh, (P(), P()), P())(lambda x, w: toj.all_gather_matmul(x, w, "tp", algorithm="fused"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="all_gather_matmul: expected what algorithm 'fused' needs"):
        jax.block_until_ready(f(x, w))
    # The axis stays usable.
    out = mapped(mesh, P(), P())(lambda x: toj.all_reduce(x, "tp"))(x)
    np.testing.assert_array_equal(np.asarray(out), 2 * np.ones((2, 4)))


def test_a_gradient_of_max_is_refused(mesh):
    f = mapped(mesh, P(), P())(lambda x: toj.all_reduce(x, "tp", "max"))
    with pytest.raises(
        NotImplementedError, match="all_reduce: expected op sum or avg where a gradient is asked, got max"
    ):
        jax.grad(lambda x: f(x).sum())(jnp.ones(3))


def test_vmap_over_weights_is_refused(mesh):
    x, ws = jnp.ones((2, 4)), jnp.ones((3, 4, 6))
    with pytest.raises(NotImplementedError, match="matmul_all_reduce: expected vmap over x alone"):
        traced(mesh, lambda x, ws: jax.vmap(lambda w: toj.matmul_all_reduce(x, w, "tp"))(ws), x, ws)


def test_empty_arrays(mesh):
    f = mapped(mesh, (P(), P()), (P(), P(), P()))(
        lambda x, w: (
            toj.all_reduce(x, "tp"),
            toj.all_gather_matmul(x, w, "tp"),
            toj.matmul_reduce_scatter(x, w, "tp"),
        )
    )
    for got in f(jnp.zeros((0, 4)), jnp.ones((4, 6))):
        assert got.shape[0] == 0


def test_a_destroyed_buffer_is_named(mesh):
    made = toj.create_comm_overlap_buffer("tp", Type.AG, Method.RING_EXCHANGE, (8, 4), jnp.float64)
    attributes = {"comm_type": Type.AG, "comm_overlap_method": Method.RING_EXCHANGE, "comm_overlap_id": made}
    f = mapped(mesh, (P(), P()), P())(lambda x, w: toj.gemm(x, w, **attributes).output)
    x, w = jnp.ones((4, 4)), jnp.ones((4, 6))
    np.testing.assert_array_equal(np.asarray(f(x, w)), 4 * np.ones((8, 6)))
    with pytest.raises(NotImplementedError, match="gemm: expected comm_type NONE where a gradient is asked, got AG"):
        jax.grad(lambda x: f(x, w).sum())(x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected at most the 8 tokens of the buffer"):
        jax.block_until_ready(f(jnp.ones((6, 4)), w))
    toj.destroy_comm_overlap_buffer(made)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"got {made}, which was destroyed"):
        jax.block_until_ready(f(x, w))


def test_an_axis_may_be_closed_as_soon_as_a_result_is_there():
    """The last call of an axis may still be ending on its thread."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("brief",))
    x, w = jnp.ones((4, 4)), jnp.ones((4, 4))
    for _ in range(30):
        axis = toj.bootstrap(mesh, "brief")
        f = mapped(mesh, (P("brief"), P()), P("brief"))(
            lambda x, w: toj.matmul_reduce_scatter(toj.all_gather_matmul(x, w, "brief"), w, "brief")
        )
        f(x, w).block_until_ready()
        axis.close()
