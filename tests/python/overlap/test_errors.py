"""What is refused: before anything is sent, on the rank that is wrong, and the buffer is as good as before."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlap_cases import AG, BULK, E4M3, PIPELINE, RING, RS, Bulk, Case, Gather, Scatter, make

import torch_overlap as to
from torch_overlap import CommOverlapMethod as Method
from torch_overlap import CommOverlapType as Type
from torch_overlap.testing import run_ranks

META = torch.device("meta")
Bad = tuple[Callable[[], Any], type[Exception], str]


def t(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, device=device).to(dtype)


# --- What a class has ---------------------------------------------------------------------------------------------------

BUFFERS = [(Type.NONE, BULK), (AG, BULK), (RS, BULK), (RS, PIPELINE), (AG, RING), (RS, RING)]
SUPPORTED = {
    "bulk_overlap": [(Type.NONE, BULK), (AG, BULK), (RS, BULK), (RS, PIPELINE)],
    "bulk_overlap_external_ag": [(Type.NONE, BULK), (AG, BULK), (RS, BULK), (RS, PIPELINE)],
    "split_overlap_ag": [(AG, RING)],
    "split_overlap_rs": [(RS, PIPELINE), (RS, RING)],
    "atomic_gemm_overlap_ag": [(AG, RING)],
    "atomic_gemm_overlap_rs": [(RS, PIPELINE), (RS, RING)],
}


def run_table(comm: to.TorchComm) -> None:
    for kind, method in BUFFERS:
        buffer = make(comm, kind, method, (8, 16), torch.float32)
        for name, supported in SUPPORTED.items():
            args: tuple[Any, ...] = (buffer,) if "external" in name else (t(16, 16), True, None, False, None)
            if (kind, method) not in supported:
                with pytest.raises(to.UnsupportedError, match=f"^{name}: Operation not supported") as info:
                    getattr(buffer, name)(*args)
                assert method.name in str(info.value)
            elif "atomic" in name:
                match = f"{name}: expected a buffer made with atomic_gemm, got one without; use split_overlap_{name[-2:]}"
                with pytest.raises(to.StateError, match=match):
                    getattr(buffer, name)(*args)
        assert buffer.is_p2p_overlap() is (method == RING)
        assert buffer.last_path() == ""


@pytest.mark.parametrize("backend", ["gloo", "local", "fake"])
def test_what_a_class_does_not_have_says_so(backend: str) -> None:
    run_ranks(run_table, 2, backend=backend)


# --- Parameters of a buffer ---------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"comm_type": RS, "method": PIPELINE, "buffer_shape": [8, 16], "buffer_dtype": torch.float32}
CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "method": ({"method": Method.NONE}, to.InvalidValueError,
               r"invalid method: expected BULK \(1\), PIPELINE \(2\) or RING_EXCHANGE \(3\), got 0"),
    "type": ({"comm_type": Type.NONE}, to.InvalidValueError,
             "invalid collective type: expected RS or AG for PIPELINE, got NONE"),
    "ring type": ({"comm_type": Type.NONE, "method": RING}, to.InvalidValueError,
                  "invalid collective type: expected RS or AG for RING_EXCHANGE, got NONE"),
    "pipeline ag": ({"comm_type": AG}, to.UnsupportedError, "expected RS for PIPELINE, got AG; use RING_EXCHANGE or BULK"),
    "one dimension": ({"buffer_shape": [8]}, to.InvalidValueError, r"to be \[tokens, features\], got \[8\]"),
    "three dimensions": ({"buffer_shape": [2, 8, 8]}, to.InvalidValueError, r"got \[2, 8, 8\]"),
    "none": ({"buffer_shape": []}, to.InvalidValueError, r"got \[\]"),
    "no tokens": ({"buffer_shape": [0, 8]}, to.InvalidValueError, r"expected sizes in \[1, 2\^31\) in buffer_shape, got"),
    "many tokens": ({"buffer_shape": [1 << 31, 8]}, to.InvalidValueError, r"expected sizes in \[1, 2\^31\)"),
    "negative": ({"buffer_shape": [8, -8]}, to.InvalidValueError, r"expected sizes in \[1, 2\^31\)"),
    "dtype": ({"buffer_dtype": torch.int64}, to.InvalidTypeError, "expected buffer_dtype to be one of float64, .*got Long"),
    "bytes": ({"buffer_dtype": torch.uint8}, to.InvalidTypeError, "expected a floating-point buffer_dtype for RS, got uint8"),
    "tp_size 0": ({"tp_size": 0}, to.InvalidValueError, r"expected tp_size in \[1, 65536\], got 0"),
    "splits": ({"num_splits": 0}, to.InvalidValueError, r"expected num_splits in \[1, 64\], got 0"),
    "many splits": ({"num_splits": 65}, to.InvalidValueError, r"expected num_splits in \[1, 64\], got 65"),
    "streams": ({"num_max_streams": 33}, to.InvalidValueError, r"expected num_max_streams in \[1, 32\], got 33"),
    "cluster": ({"comm_cga_size": 9}, to.InvalidValueError, r"expected comm_cga_size in \[1, 8\], got 9"),
    "no SM": ({"num_comm_sm": 0}, to.InvalidValueError, r"expected num_comm_sm in \[1, 1024\], got 0"),
    "SMs of a cluster": ({"num_comm_sm": 6, "comm_cga_size": 4}, to.InvalidValueError,
                         "expected num_comm_sm to be a multiple of comm_cga_size 4, got 6"),
    "aggregate": ({"aggregate_ag": True}, to.InvalidValueError, "expected RING_EXCHANGE and AG with aggregate_ag, got PIPELINE"),
    "aggregate rs": ({"aggregate_ag": True, "method": RING}, to.InvalidValueError, "got RING_EXCHANGE and RS"),
    "odd": ({"aggregate_ag": True, "method": RING, "comm_type": AG}, to.InvalidValueError,
            "expected an even tp_size with aggregate_ag, got 3"),
    "atomic bulk": ({"method": BULK, "atomic_gemm": True}, to.InvalidValueError,
                    "expected PIPELINE or RING_EXCHANGE with atomic_gemm, got BULK"),
    "tp_size": ({"tp_size": 4}, to.InvalidValueError,
                "expected tp_size to be the size of the group, 3, got 4; split the communicator first"),
}  # fmt: skip


def config_of(comm: to.TorchComm, **changes: Any) -> to.CommOverlapConfig:
    return to.CommOverlapConfig(**{**GOOD, "tp_size": comm.get_size(), **changes})


def refuse_config(comm: to.TorchComm, changes: dict[str, Any], error: type[Exception], match: str) -> None:
    """Wrong on all ranks, then on the last one; afterwards a good one at once."""
    config = config_of(comm, **changes)
    cls = to.CommOverlapP2PBase if config.method == RING else to.CommOverlapBase
    with pytest.raises(error, match=f"^CommOverlap: .*{match}"):
        cls(comm, config)
    wrong = comm.get_rank() == comm.get_size() - 1
    told = match if wrong else f"rank {comm.get_size() - 1} could not take part: CommOverlap: .*{match}"
    with pytest.raises(error, match=f"^CommOverlap: .*{told}"):
        cls(comm, config) if wrong else to.CommOverlapBase(comm, config_of(comm))


def run_configs(comm: to.TorchComm, seed: int, names: list[str]) -> None:
    for i, name in enumerate(names):
        try:
            refuse_config(comm, *CONFIGS[name])
            Scatter(comm, PIPELINE, torch.float32).step(seed + i)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_wrong_parameters_are_refused_on_all_ranks(backend: str, seed: int) -> None:
    run_ranks(run_configs, 3, seed, list(CONFIGS), backend=backend, timeout=120)


def run_digest(comm: to.TorchComm, seed: int) -> None:
    changes = [{"num_splits": 2}, {"buffer_shape": [8, 32]}, {"buffer_dtype": torch.float64}, {"num_max_streams": 2},
               {"comm_cga_size": 1}, {"num_comm_sm": 8}, {"set_sm_margin": False}, {"use_ce": True},
               {"gemm_priority": 1}, {"comm_priority": -1}, {"atomic_gemm": True}, {"rs_overlap_first_gemm": True},
               {"method": BULK}]  # fmt: skip
    rank, size = comm.get_rank(), comm.get_size()
    for i, change in enumerate(changes):
        mine = config_of(comm, **(change if rank == size - 1 else {}))
        with pytest.raises(to.InvalidValueError, match="CommOverlap: expected the same on all ranks, got ") as info:
            to.CommOverlapBase(comm, mine)
        first, last = str(info.value).split(" on rank 0 and ")
        assert last.endswith(f" on rank {size - 1}")
        (name,) = change
        for text, config in ((first, config_of(comm)), (last, config_of(comm, **change))):
            value = getattr(config, name)
            if name == "buffer_dtype":
                shown = "Double" if value == torch.float64 else "Float"
            else:
                shown = int(value) if isinstance(value, bool) else getattr(value, "name", value)
            assert f"{name}={shown}" in text, (name, text)
        Scatter(comm, PIPELINE).step(seed + i)


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_parameters_that_differ_between_ranks_are_shown(backend: str, seed: int) -> None:
    run_ranks(run_digest, 3, seed, backend=backend)


def run_wrong_class(comm: to.TorchComm) -> None:
    with pytest.raises(to.InvalidValueError, match="CommOverlapBase: expected method BULK or PIPELINE, got RING_EXCHANGE; use"):
        to.CommOverlapBase(comm, config_of(comm, method=RING))
    with pytest.raises(to.InvalidValueError, match="CommOverlapP2PBase: expected method RING_EXCHANGE, got PIPELINE; use"):
        to.CommOverlapP2PBase(comm, config_of(comm))


def test_the_class_of_a_method() -> None:
    run_ranks(run_wrong_class, 2)


# --- Calls --------------------------------------------------------------------------------------------------------------


def bad_buffer_calls(case: Case) -> dict[str, Bad]:
    b, tokens = case.buffer, case.tokens
    width = b.get_buffer().shape[1]
    value, kind = to.InvalidValueError, to.InvalidTypeError
    return {
        "too many tokens": (lambda: b.set_active_tokens(tokens + 1), value,
                            f"set_active_tokens: expected at most the {tokens} tokens of the buffer, got {tokens + 1}"),
        "negative tokens": (lambda: b.set_active_tokens(-1), value, "set_active_tokens: .*got -1"),
        "chunk": (lambda: b.get_buffer_chunk_by_id(case.size), value, r"get_buffer_chunk_by_id: expected a chunk in \[0, 2\), got 2"),
        "negative chunk": (lambda: b.get_buffer_chunk_by_id(-1), value, "get_buffer_chunk_by_id: .*got -1"),
        "fill dtype": (lambda: b.copy_into_buffer(t(tokens, width, dtype=torch.float64)), kind,
                       "copy_into_buffer: expected elements of 4 bytes, as the buffer's, got Double"),
        "fill shape": (lambda: b.copy_into_buffer(t(tokens - 1, width)), value,
                       rf"copy_into_buffer: expected a tensor of shape \[{tokens}, {width}\] for the whole buffer"),
        "fill chunk": (lambda: b.copy_into_buffer(t(tokens, width), local_chunk=True), value, "for the rows of this rank"),
        "fill device": (lambda: b.copy_into_buffer(t(tokens, width, device=META)), kind,
                        "copy_into_buffer: expected a tensor on cpu, got meta"),
        "factor": (lambda: b.set_ubuf_scale_inv(t(1)), kind,
                   "set_ubuf_scale_inv: expected a buffer of 8-bit elements, got one of Float"),
    }  # fmt: skip


def bad_gathers(case: Gather) -> dict[str, Bad]:
    rows, tokens, k, n = case.rows, case.active, case.k, case.n
    value, kind, unsupported = to.InvalidValueError, to.InvalidTypeError, to.UnsupportedError

    def call(A: Any = None, transb: bool = False, **changes: Any) -> Callable[[], Any]:  # noqa: N803
        args = {"B": t(rows, k), "D": t(tokens, n), **changes}
        return lambda: case.buffer.split_overlap_ag(t(n, k) if A is None else A, True, args.pop("B"), transb, **args)

    own = "split_overlap_ag: expected lhs to be this rank's rows, contiguous, "
    copy = "AG->GEMM overlap auxiliary buffer is sized incorrectly: expected "
    return {
        "rows": (call(B=t(rows + 1, k)), value, own),
        "all rows": (call(B=t(tokens, k)), value, own),
        "strides": (call(B=t(rows, 2 * k)[:, :k]), value, own),
        "element size": (call(B=t(rows, k, dtype=torch.bfloat16)), value, own),
        "lhs on another device": (call(B=t(rows, k, device=META)), kind, "lhs.*on cpu, got meta"),
        "transposed": (call(B=t(k, rows), transb=True), unsupported, "expected lhs as it is, .*got it transposed"),
        "blocks": (call(scaling_mode=2, B_scale_inv=t(1)), unsupported, "expected lhs without scaling, .*got MXFP8"),
        "mode": (call(scaling_mode=77), value, "split_overlap_ag: .*77"),
        "copy shape": (call(B_copy=t(tokens - 1, k)), value, copy),
        "copy dtype": (call(B_copy=t(tokens, k, dtype=torch.float64)), value, copy),
        "copy on another device": (call(B_copy=t(tokens, k, device=META)), kind, "B_copy|gathered|auxiliary"),
        "no D": (call(D=None), value, "split_overlap_ag: expected out, got none"),
        "D rows": (call(D=t(rows, n)), value, "split_overlap_ag: expected out of shape"),
        "D dtype": (call(D=t(tokens, n, dtype=torch.float64)), kind, "split_overlap_ag: expected out of"),
        "D device": (call(D=t(tokens, n, device=META)), kind, "split_overlap_ag: expected "),
        "weight": (call(A=t(n, k + 1)), value, "split_overlap_ag: expected op"),
        "weight dtype": (call(A=t(n, k, dtype=torch.float64)), kind, "split_overlap_ag: expected "),
        "weight device": (call(A=t(n, k, device=META)), kind, "split_overlap_ag: expected "),
        "bias": (call(bias=t(n + 1)), value, "split_overlap_ag: expected bias of shape"),
        "aux": (call(pre_gelu_out=t(rows, n)), value, "split_overlap_ag: expected pre_gelu_out of shape"),
        "sum of rows": (call(grad=True, bias=t(n), pre_gelu_out=t(tokens, n)), unsupported, "split_overlap_ag: .*bias"),
    }  # fmt: skip


def bad_scatters(case: Scatter) -> dict[str, Bad]:
    rows, tokens, k, n = case.rows, case.active, case.k, case.n
    value, kind, unsupported = to.InvalidValueError, to.InvalidTypeError, to.UnsupportedError

    def call(A: Any = None, B: Any = None, **changes: Any) -> Callable[[], Any]:  # noqa: N803
        args = {"rs_output": t(rows, n), **changes}
        return lambda: case.buffer.split_overlap_rs(
            t(n, k) if A is None else A, True, t(tokens, k) if B is None else B, False, None, **args
        )

    output = f"GEMM->RS overlap output buffer is sized incorrectly: expected \\[{rows}, {n}\\]"
    return {
        "accumulate": (call(accumulate=True), unsupported, "split_overlap_rs: expected accumulate=False"),
        "gelu": (call(pre_gelu_out=t(tokens, n)), unsupported, "split_overlap_rs: expected no GELU and no bias gradient"),
        "dgelu": (call(grad=True, pre_gelu_out=t(tokens, n)), unsupported, "expected no GELU and no bias gradient"),
        "dbias": (call(grad=True, bias=t(n)), unsupported, "expected no GELU and no bias gradient"),
        "tokens": (call(B=t(tokens - 1, k)), value, f"expected a product of the {tokens} tokens that are active"),
        "features": (call(A=t(n - 16, k)), value, f"expected a product of the {n} features of the buffer"),
        "no output": (call(rs_output=None), value, output + ".*got no tensor"),
        "output rows": (call(rs_output=t(tokens, n)), value, output),
        "output strides": (call(rs_output=t(n, rows).t()), value, output + ".*of strides"),
        "output dtype": (call(rs_output=t(rows, n, dtype=torch.bfloat16)), kind, "expected rs_output of Float, got BFloat16"),
        "output device": (call(rs_output=t(rows, n, device=META)), kind, "expected rs_output on cpu, got meta"),
        "weight": (call(A=t(n, k + 1)), value, "split_overlap_rs: expected op"),
        "operand dtype": (call(B=t(tokens, k, dtype=torch.float64)), kind, "split_overlap_rs: expected "),
        "bias length": (call(bias=t(n - 1)), value, "split_overlap_rs: expected bias of shape"),
        "one bias": (call(bias=t(1)), value, "split_overlap_rs: expected bias of shape"),
        "bias dtype": (call(bias=t(n, dtype=torch.float64)), kind, "split_overlap_rs: expected bias"),
        "bias device": (call(bias=t(n, device=META)), kind, "split_overlap_rs: expected .*cpu"),
    }  # fmt: skip


def bad_bulks(case: Bulk) -> dict[str, Bad]:
    rows, tokens, n = case.rows, case.active, case.n
    value, kind = to.InvalidValueError, to.InvalidTypeError

    def call(D: Any = None, **changes: Any) -> Callable[[], Any]:  # noqa: N803
        args = {"comm_type": case.kind, **changes}
        return lambda: case.buffer.bulk_overlap(t(8, 8), True, t(8, 8), False, t(8, 8) if D is None else D, **args)

    other = AG if case.kind == RS else RS
    calls: dict[str, Bad] = {
        "no type": (call(comm_type=Type.NONE), value, "bulk_overlap: invalid collective type: expected AG or RS, got NONE"),
        "other type": (call(comm_type=other), value,
                       f"bulk_overlap: invalid collective type: expected that of the buffer, {case.kind.name}, got {other.name}"),
        "product": (call(D=t(8, 9)), value, "bulk_overlap: expected out of shape"),
    }  # fmt: skip
    if case.kind == AG:
        calls["output"] = (call(rs_output=t(rows, n)), value, "bulk_overlap: expected no rs_output with AG, got one")
    else:
        output = "GEMM->RS overlap output buffer is sized incorrectly"
        calls["output rows"] = (call(rs_output=t(tokens, n)), value, output)
        calls["output dtype"] = (call(rs_output=t(rows, n, dtype=torch.float16)), kind, "expected rs_output of Float")
    return calls


def refuse(comm: to.TorchComm, case: Case, bad: dict[str, Bad], seed: int) -> None:
    """Each by the last rank alone; then a good call of all. Had anything been sent, that would be wrong or late."""
    for i, (name, (call, error, match)) in enumerate(bad.items()):
        if comm.get_rank() == comm.get_size() - 1:
            try:
                call()
            except error as raised:
                assert re.search(match, str(raised)), f"{name}: {raised}"
            except Exception as raised:
                raise AssertionError(f"{name}: expected {error.__name__}, got {raised!r}") from raised
            else:
                raise AssertionError(f"{name}: expected {error.__name__}, got none")
        case.step(seed + i)


def run_refusals(comm: to.TorchComm, seed: int, name: str) -> None:
    case: Any
    if name == "AG":
        case = Gather(comm)
        refuse(comm, case, {**bad_buffer_calls(case), **bad_gathers(case)}, seed)
    elif name.startswith("RS"):
        case = Scatter(comm, PIPELINE if "PIPELINE" in name else RING)
        refuse(comm, case, bad_scatters(case), seed)
    else:
        case = Bulk(comm, AG if "AG" in name else RS)
        refuse(comm, case, bad_bulks(case), seed)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "unreachable"])
@pytest.mark.parametrize("name", ["AG", "RS RING", "RS PIPELINE", "BULK AG", "BULK RS"])
def test_wrong_calls_are_refused_before_anything_is_sent(name: str, direct: bool, seed: int) -> None:
    run_ranks(run_refusals if direct else run_refusals_unreachable, 2, seed, name)


def run_refusals_unreachable(comm: to.TorchComm, seed: int, name: str) -> None:
    pretence = to._C._PretendUnreachable()
    try:
        run_refusals(comm, seed, name)
    finally:
        del pretence


def run_8_bits(comm: to.TorchComm, seed: int) -> None:
    for method in (RING, PIPELINE):
        case = Scatter(comm, method, E4M3)
        x, w, out = t(13, 32, dtype=torch.bfloat16), t(48, 32, dtype=torch.bfloat16), t(case.rows, 48)
        missing = (lambda case=case, w=w, x=x, out=out: case.buffer.split_overlap_rs(
            w, True, x, False, None, rs_output=out, D_scale=torch.ones(1)))  # fmt: skip
        with pytest.raises(to.StateError, match="Missing inverse scaling factor: expected set_ubuf_scale_inv"):
            missing()
        case.step(seed)
        with pytest.raises(to.InvalidValueError, match="split_overlap_rs: .*out_scale"):
            case.buffer.split_overlap_rs(w, True, x, False, None, rs_output=out)
        with pytest.raises(to.InvalidTypeError, match="expected rs_output of float32, float16 or bfloat16, got Double"):
            case.buffer.split_overlap_rs(w, True, x, False, None, rs_output=out.double(), D_scale=torch.ones(1))
        with pytest.raises(to.InvalidTypeError, match="expected rs_output of float32, float16 or bfloat16, got Float8"):
            case.buffer.split_overlap_rs(w, True, x, False, None, rs_output=out.to(E4M3), D_scale=torch.ones(1))
        for wrong in (t(2), t(1, dtype=torch.float64), t(1, device=META)):
            with pytest.raises(to.InvalidTypeError, match="set_ubuf_scale_inv: expected one float32 on cpu, got "):
                case.buffer.set_ubuf_scale_inv(wrong)
        case.step(seed + 1)
    bulk = Bulk(comm, RS, E4M3, in_place=False)
    assert bulk.buffer.is_fp8_ubuf()
    product = (t(8, 8), True, t(8, 8), False, t(8, 8))
    with pytest.raises(to.StateError, match="bulk_overlap: Missing inverse scaling factor"):
        bulk.buffer.bulk_overlap(*product, rs_output=t(bulk.rows, 48), comm_type=RS)
    with pytest.raises(to.InvalidValueError, match="bulk_overlap: expected rs_output for the sum of an 8-bit buffer, got none"):
        bulk.buffer.bulk_overlap(*product, comm_type=RS)
    bulk.step(seed)
    both = make(comm, Type.NONE, BULK, (8, 16), torch.uint8)
    both.set_ubuf_scale_inv(torch.ones(1))
    with pytest.raises(to.InvalidTypeError, match="bulk_overlap: expected .*uint8.*no sums"):
        both.bulk_overlap(*product, rs_output=t(4, 16), comm_type=RS)


def test_buffers_of_8_bits(seed: int) -> None:
    run_ranks(run_8_bits, 2, seed)


def run_blocks(comm: to.TorchComm, seed: int) -> None:
    """Scales of blocks cannot be cut at this rank's rows."""
    case = Scatter(comm, RING, torch.bfloat16)
    x, w = t(13, 32, dtype=E4M3), t(48, 32, dtype=E4M3)
    x_scale, w_scale = torch.full((13, 1), 127, dtype=torch.uint8), torch.full((48, 1), 127, dtype=torch.uint8)
    with pytest.raises((to.UnsupportedError, to.InvalidValueError, to.InvalidTypeError)):
        case.buffer.split_overlap_rs(w, True, x, False, None, rs_output=t(case.rows, 48, dtype=torch.bfloat16),
                                     scaling_mode=2, A_scale_inv=w_scale, B_scale_inv=x_scale)  # fmt: skip
    case.step(seed)


def test_scales_that_cannot_be_cut_are_refused_before_anything_is_sent(seed: int) -> None:
    run_ranks(run_blocks, 2, seed)


def run_none(comm: to.TorchComm) -> None:
    bulk = make(comm, AG, BULK, (8, 16), torch.float32)
    with pytest.raises(TypeError):
        bulk.bulk_overlap_external_ag(None)
    with pytest.raises(TypeError):
        to.CommOverlapBase(None, config_of(comm))
    with pytest.raises(TypeError):
        to.create_comm_overlap_buffer(None, RS, PIPELINE, (8, 16), torch.float32, tp_size=2)
    with pytest.raises(TypeError):
        bulk.set_ubuf_scale_inv(None)


def test_none_is_no_object() -> None:
    run_ranks(run_none, 2)
