"""The overlap classes over NVLink: values at full shapes, dtypes, epilogues, streams, options, errors."""

import pytest
import torch
from overlap_gpu_cases import (
    AG,
    E4M3,
    EACH,
    FULL,
    KINDS,
    ONE,
    PIPELINE,
    RING,
    RS,
    SMALL,
    SOME,
    BulkGather,
    BulkScatter,
    External,
    Gather,
    GatherFilled,
    Pipeline,
    Scatter,
    capture,
    eager,
    gelu,
    hundred_replays,
    late,
    share,
)

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)


# --- Values ---------------------------------------------------------------------------------------------------------


@EACH
def test_eager_calls_at_full_shapes(comm, kind, dtype):
    case = kind(comm, dtype, **FULL)
    for step in range(5):
        late(case, step, 2)
        eager(case, step)
    assert "send and receive" not in case.buffer.last_path()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_dtypes(comm, kind, dtype):
    case = kind(comm, dtype, **SMALL)
    for step in range(3):
        eager(case, step)


@pytest.mark.parametrize("kind", [Scatter, Pipeline, BulkScatter, GatherFilled], ids=lambda kind: kind.__name__)
def test_double(comm, kind):
    case = kind(comm, torch.float64, **SMALL)
    for step in range(3):
        eager(case, step)


@pytest.mark.parametrize("active", [0, 1, 7, 255, 256])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_active_tokens(comm, kind, active):
    case = kind(comm, active=active, **SMALL)
    for step in range(3):
        eager(case, step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_products_of_two_chunks(comm, dtype):
    if comm.get_size() % 2:
        pytest.skip("needs an even number of ranks")
    for kind in (Gather, GatherFilled):
        case = kind(comm, dtype, aggregate_ag=True, **FULL)
        for step in range(3):
            eager(case, step)
        hundred_replays(comm, capture(case.issue), case, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3], ids=str)
@pytest.mark.usefixtures("sums_in_fp32")
def test_random_data_and_epilogues(comm, seed, dtype):
    """Normal numbers, the epilogues of a linear layer and accumulation, against products in fp64."""
    rank, size = comm.get_rank(), comm.get_size()
    tokens, k, n = 512, 1536, 768
    is_8_bit = dtype == E4M3
    plain = torch.bfloat16 if is_8_bit else dtype
    config = to.CommOverlapConfig(AG, RING, [tokens, k], dtype, size)
    buffer = to.CommOverlapP2PBase(comm, config)
    shared = torch.Generator(device="cuda").manual_seed(seed)
    own = torch.Generator(device="cuda").manual_seed(seed + 1 + rank)
    scale = torch.full((1,), 1 / 32, device="cuda")
    scales = {"scaling_mode": 3, "A_scale_inv": scale, "B_scale_inv": scale} if is_8_bit else {}

    def draw(rows, columns, generator, kind=None):
        values = torch.randn(rows, columns, generator=generator, device="cuda")
        return (values / scale).to(E4M3) if (kind or dtype) == E4M3 else values.to(kind or dtype)

    def value(matrix):
        return matrix.double() * scale.double() if matrix.dtype == E4M3 else matrix.double()

    def close(got, want, magnitude, what, more=0.0):
        eps = torch.finfo(got.dtype).eps
        # Hopper keeps about 14 bits of sums of 8-bit products, and tensor cores do not round to nearest.
        allowed = want.abs() * 2 * eps + magnitude * (2**-10 if is_8_bit else 2**-18) + more + 1e-5
        off = (got.double() - want).abs()
        assert bool((off <= allowed).all()), (
            f"{what}: {int((~(off <= allowed)).sum())} wrong, worst {(off / allowed).max()}"
        )

    for epilogue in ("none", "bias", "gelu", "bias_gelu", "dgelu", "accumulate"):
        x, w = draw(tokens, k, shared), draw(n, k, own)
        out = draw(tokens, n, own, plain)
        want = value(x) @ value(w).T
        magnitude = value(x).abs() @ value(w).abs().T
        call = dict(scales)
        if "bias" in epilogue:
            call["bias"] = draw(1, n, own, plain)[0]
            want = want + call["bias"].double()
        aux, before = None, want
        if epilogue.endswith("gelu") and epilogue != "dgelu":
            aux = call["pre_gelu_out"] = torch.full((tokens, n), float("nan"), device="cuda", dtype=plain)
            wanted_aux = want
            want = gelu(want)
        if epilogue == "dgelu":
            call |= {"grad": True, "pre_gelu_out": draw(tokens, n, own, plain)}
            at = call["pre_gelu_out"].double().requires_grad_()
            want = want * torch.autograd.grad(gelu(at).sum(), at)[0]
        if epilogue == "accumulate":
            call["accumulate"] = True
            want = want + out.double()
        else:
            out.fill_(float("nan"))
        buffer.split_overlap_ag(w, True, x[share(tokens, size, rank)].clone(), False, out, **call)
        # Fused epilogues use the hardware's tanh; kernels round before they accumulate.
        more = before.abs() * 2**-7 if "gelu" in epilogue else before.abs() * torch.finfo(plain).eps
        close(out, want, 1.2 * magnitude, epilogue, more)
        if aux is not None:
            close(aux, wanted_aux, magnitude, f"pre_gelu_out of {epilogue}")


# --- Streams and options --------------------------------------------------------------------------------------------


@ONE
def test_streams_other_than_the_current_one(comm, kind):
    """Calls run on two streams that nothing orders; each call follows the previous one."""
    case = kind(comm, **SMALL)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(40):
        stream = streams[step % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if step % 7 == 0:
                late(case, step, 2)
            case.fill(step)
            case.issue()
            case.check(step)


def test_two_buffers_on_two_streams_at_once(comm):
    cases = [Gather(comm, **FULL), Scatter(comm, **FULL)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(10):
        for case in cases:
            case.fill(step)
        torch.cuda.synchronize()
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                late(case, step, 1)
                case.issue()
        torch.cuda.synchronize()
        for case in cases:
            case.check(step)


def test_an_external_all_gather_beside_the_product_of_its_lender(comm):
    case = External(comm, **FULL)
    side = torch.cuda.Stream()
    for step in range(10):
        case.fill(step)
        side.wait_stream(torch.cuda.current_stream())
        case.lender.issue()
        with torch.cuda.stream(side):
            case.buffer.copy_into_buffer(case.x, local_chunk=True)
            case.buffer.bulk_overlap_external_ag(case.lender.buffer)
        torch.cuda.current_stream().wait_stream(side)
        case.check(step)


OPTIONS = [
    (Gather, {"use_ce": True}),
    (Gather, {"use_ce": False, "num_comm_sm": 1}),
    (Gather, {"use_ce": False, "num_comm_sm": 32, "comm_cga_size": 4}),
    (Gather, {"num_max_streams": 1}),
    (Gather, {"num_max_streams": 8, "gemm_priority": -1, "comm_priority": -2}),
    (Scatter, {"use_ce": False, "num_comm_sm": 8, "comm_cga_size": 2, "set_sm_margin": True}),
    (Scatter, {"use_ce": True, "num_max_streams": 1}),
    (Pipeline, {"num_comm_sm": 2, "comm_cga_size": 1, "num_splits": 2}),
    (Pipeline, {"num_comm_sm": 32, "comm_cga_size": 8, "num_splits": 3}),
    (Pipeline, {"set_sm_margin": False, "rs_overlap_first_gemm": True}),
    (Pipeline, {"num_max_streams": 4, "num_splits": 8, "rs_overlap_first_gemm": True}),
    (BulkGather, {"num_comm_sm": 4, "comm_cga_size": 4}),
    (BulkGather, {"use_ce": True, "set_sm_margin": False}),
    (BulkScatter, {"num_comm_sm": 1, "comm_cga_size": 1}),
    (BulkScatter, {"num_comm_sm": 24, "comm_cga_size": 8, "set_sm_margin": False}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=lambda v: getattr(v, "__name__", None) or "-".join(v))
def test_options(comm, kind, options):
    case = kind(comm, **options, **FULL)
    for step in range(3):
        eager(case, step)
    hundred_replays(comm, capture(case.issue), case, 3)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_ranks_that_cannot_reach_each_other(comm, kind):
    pretence = to._C._PretendUnreachable()
    case = kind(comm, **SMALL)
    del pretence
    for step in range(3):
        eager(case, step)
    path = case.buffer.last_path()
    assert "send and receive" in path, path
    assert "ranks pretend that peers' memory is unreachable" in path, path
    hundred_replays(comm, capture(case.issue), case, 3)


def test_a_part_of_the_ranks(comm):
    half = comm.split([r for r in range(comm.get_size()) if r % 2 == comm.get_rank() % 2], f"part{comm.get_rank() % 2}")
    cases = [kind(one, **SMALL) for one in (comm, half) for kind in SOME]
    for step in range(5):
        for case in cases:
            eager(case, step)
    del cases, case
    torch.cuda.synchronize()
    half.finalize()


def test_errors_leave_the_buffer_as_it_was(comm):
    cases = [Gather(comm, **SMALL), Scatter(comm, **SMALL), Pipeline(comm, **SMALL)]
    for case in cases:
        eager(case, 0)
        if case.rank == case.size - 1:  # only one rank: had it sent anything, the others would be wrong
            kept = case.x, case.w if isinstance(case, Gather) else case.bias
            case.x = case.x.cpu()
            with pytest.raises(to.InvalidTypeError, match="expected "):
                case.issue()
            case.x = kept[0]
            if not isinstance(case, Gather):
                for wrong in (case.bias[:-8], case.bias.cpu(), case.bias.float()):
                    case.bias = wrong
                    with pytest.raises((to.InvalidValueError, to.InvalidTypeError), match="expected bias"):
                        case.issue()
                case.bias = kept[1]
            with pytest.raises(to.InvalidValueError):
                case.buffer.set_active_tokens(case.capacity + 1)
        eager(case, 1)


def test_no_buffer_is_made_in_a_capture(comm):
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(8, device="cuda")
    config = to.CommOverlapConfig(RS, PIPELINE, [64, 64], torch.bfloat16, comm.get_size())
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x.add_(1)
        with pytest.raises(to.StateError, match="make buffers before the capture"):
            to.CommOverlapBase(comm, config)
    graph.replay()
    torch.cuda.synchronize()
    assert (x == 1).all()
