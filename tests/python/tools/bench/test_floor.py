"""The model of the minimal time, against figures that were worked out for measured products."""

from __future__ import annotations

import pytest

from torch_overlap.tools.bench.cases import KIB, Case
from torch_overlap.tools.bench.floor import Rates, floor_us

H200 = Rates(link=386e9, memory=3.9e12)

# op, (M, N, K), ranks, microseconds of the product by itself, floor relative to it
PRODUCTS = [
    ("ag_gemm", (8192, 28672, 4096), 2, 1244.0, 1.0),
    ("ag_gemm", (8192, 28672, 4096), 8, 314.97, 1.0),
    ("ag_gemm", (8192, 10240, 8192), 4, 540.0, 1.0),
    ("ag_gemm", (8192, 10240, 8192), 8, 302.65, 1.1961),
    ("ag_gemm", (8192, 49152, 12288), 4, 3523.0, 1.0),
    ("ag_gemm", (2048, 14336, 4096), 4, 132.0, 1.0),
    ("ag_gemm", (2048, 14336, 4096), 8, 69.48, 1.1),
    ("gemm_rs", (8192, 4096, 14336), 2, 639.0, 1.0023),
    ("gemm_rs", (8192, 4096, 14336), 4, 352.0, 1.0043),
    ("gemm_rs", (8192, 8192, 28672), 4, 1285.0, 1.0012),
    ("gemm_rs", (8192, 8192, 8192), 4, 436.0, 1.0034),
    ("gemm_rs", (8192, 8192, 8192), 8, 221.0, 1.4038),
    ("gemm_rs", (2048, 4096, 14336), 4, 113.0, 1.0133),
    ("gemm_rs", (2048, 4096, 14336), 8, 59.88, 1.1036),
    ("gemm_ar", (8192, 8192, 8192), 2, 839.0, 1.0036),
    ("gemm_ar", (8192, 8192, 8192), 4, 436.0, 1.2374),
    ("gemm_ar", (8192, 8192, 8192), 8, 221.0, 2.7873),
    ("gemm_ar", (2048, 4096, 14336), 8, 59.88, 1.4681),
]

# few tokens: (M, N, K), ranks, microseconds of the product by itself, and of the floor
DECODE = [
    ((16, 8192, 8192), 2, 19.2, 22.1),
    ((64, 8192, 8192), 4, 10.6, 19.2),
    ((16, 8192, 28672), 4, 32.1, 36.4),
]

# op, KiB of the whole tensor, microseconds on four ranks
COLLECTIVES = [
    ("all_reduce", 1, 2.7), ("all_reduce", 64, 3.2), ("all_reduce", 256, 4.7), ("all_reduce", 1024, 8.3),
    ("all_reduce", 16384, 69.4), ("all_reduce", 131072, 525.8), ("all_gather", 1, 2.7), ("all_gather", 1024, 4.7),
    ("reduce_scatter", 4096, 10.8), ("all_to_all", 131072, 263.5),
    ("broadcast", 64, 3.2), ("broadcast", 131072, 351.9),
]  # fmt: skip


@pytest.mark.parametrize(("op", "shape", "tp", "gemm_us", "ratio"), PRODUCTS)
def test_products(op: str, shape: tuple[int, ...], tp: int, gemm_us: float, ratio: float) -> None:
    assert floor_us(Case(op, shape), tp, gemm_us, H200) / gemm_us == pytest.approx(ratio, abs=2e-4)


@pytest.mark.parametrize(("shape", "tp", "gemm_us", "us"), DECODE)
def test_few_tokens(shape: tuple[int, ...], tp: int, gemm_us: float, us: float) -> None:
    assert floor_us(Case("gemm_ar", shape), tp, gemm_us, H200) == pytest.approx(us, abs=0.1)


@pytest.mark.parametrize(("op", "kib", "us"), COLLECTIVES)
def test_collectives(op: str, kib: int, us: float) -> None:
    assert floor_us(Case(op, (kib * KIB,)), 4, None, H200) == pytest.approx(us, abs=0.06)


def test_a_quicker_link_and_one_rank() -> None:
    case = Case("gemm_rs", (8192, 8192, 8192))
    quick = Rates(link=2 * H200.link, memory=H200.memory)
    assert floor_us(case, 8, 221.0, quick) < floor_us(case, 8, 221.0, H200)
    assert floor_us(case, 1, 221.0, H200) == 221.0
    assert floor_us(Case("gemm", (128, 128, 128)), 4, 9.0, H200) == 9.0


def test_8_bit_inputs_halve_what_is_gathered_but_not_what_is_reduced() -> None:
    gather, reduce = ((op, (8192, 8192, 8192)) for op in ("ag_gemm", "gemm_rs"))
    assert 2 * Case(*gather, dtype="fp8").moved(4) == Case(*gather).moved(4)
    assert Case(*reduce, dtype="fp8").moved(4) == Case(*reduce).moved(4)


def test_a_product_needs_its_own_time() -> None:
    with pytest.raises(ValueError, match="expected the time of the product alone"):
        floor_us(Case("ag_gemm", (64, 64, 64)), 2, None, H200)
