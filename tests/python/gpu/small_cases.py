"""Data, references and captured steps for the tests of custom collectives."""

import itertools
import json

import torch

import torch_overlap as to
from torch_overlap import ReduceOp, ops

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INTEGERS = [torch.int32, torch.int64]
NOT_BFLOAT16 = [dtype for dtype in FLOATS + INTEGERS if dtype != torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]  # sums of pairs
# Dtypes that are only moved.
OTHERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2]
OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
MODES = ["auto", "ll", "ll128", "simple", "two_shot"]
KI = 1024
# Sizes around each threshold: an LL or LL128 line, a unit of four, a block's threads, a block's chunk, the limits of
# the protocols for any group size.
EDGES = [
    12,
    16,
    120,
    240,
    480,
    7680,
    6 * KI,
    12 * KI,
    64 * KI,
    128 * KI,
    256 * KI,
    384 * KI,
    512 * KI,
    1024 * KI,
    2048 * KI,
    4096 * KI,
]


def edges(element, high=4096 * KI):
    """Returns numbers of elements: a few, and for each edge one less, the same, and one more."""
    counts = {1, 2, 3, 5, 7, 13, 1001}
    for edge in EDGES:
        if edge <= high:
            counts |= {max(edge // element + d, 1) for d in (-1, 0, 1)}
    return sorted(counts)


def draw(comm, seed, dtype, count, rank):
    """Returns rank `rank`'s input, which every rank can compute."""
    random_of = torch.Generator("cuda").manual_seed(seed * 64 + rank)
    if dtype.is_floating_point:
        return torch.randn(count, device="cuda", generator=random_of, dtype=torch.float64).to(dtype)
    return torch.randint(-50, 50, (count,), device="cuda", generator=random_of).to(dtype)


def draw_all(comm, seed, dtype, count):
    return [draw(comm, seed, dtype, count, r) for r in range(comm.get_size())]


def combine(op, a, b):
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        return a + b
    if op == ReduceOp.PRODUCT:
        return a * b
    return torch.minimum(a, b) if op == ReduceOp.MIN else torch.maximum(a, b)


def reduced(op, parts, dtype):
    """Reduces in the order of ranks, 16-bit floats in fp32 with one rounding: equal to the bit."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = combine(op, total, part.to(wide))
    if op == ReduceOp.AVG:
        total = total / torch.full_like(total, len(parts))
    return total.to(dtype)


def check_reduced(got, op, parts, is_ours=True):
    if is_ours or len(parts) == 2:
        assert torch.equal(got, reduced(op, parts, got.dtype))
    if got.dtype.is_floating_point:
        exact = reduced(op, [part.double() for part in parts], torch.float64)
        error = (got.double() - exact).abs()
        scale = sum(part.double().abs() for part in parts) + exact.abs()
        assert (error <= (2 if is_ours else len(parts)) * torch.finfo(got.dtype).eps * scale).all()


def draw_bytes(comm, seed, dtype, count):
    """Returns random bytes of `count` elements of every rank."""
    random_of = torch.Generator("cuda").manual_seed(seed)
    shape = (comm.get_size(), count * dtype.itemsize)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, shape, device="cuda", generator=random_of, dtype=torch.uint8)


# Operations that move or reduce data, with every protocol that they have.
WAYS = [("all_reduce", "two_shot"), ("large_all_reduce", "ll128")] + [
    (name, mode)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "broadcast", "rms_norm")
    for mode in ("ll", "ll128", "simple")
] + [(name, "bulk") for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")]  # fmt: skip


def algorithm_used(comm):
    """Returns the recorder's name of the algorithm that "auto" selects for small messages."""
    has_ll128 = comm.get_size() == 2 and torch.cuda.get_device_capability()[0] >= 9
    return "ll128" if has_ll128 else "ll"


def call_of(comm, name):
    """Returns a call of one round, on tensors of its own."""
    rank, size = comm.get_rank(), comm.get_size()
    x, whole, other = (torch.ones(n, device="cuda") for n in (1000, 1000 * size, 1000 * size))
    rows, counts = x.view(10, 100), [10 * (rank + r) for r in range(size)]
    large = torch.ones(300_000, device="cuda")  # two shot with more than two ranks
    unequal = whole[: sum(counts)], other[: sum(counts)], counts, counts
    return {
        "all_reduce": lambda: comm.all_reduce(x, ReduceOp.SUM, async_op=False),
        "large_all_reduce": lambda: comm.all_reduce(large, ReduceOp.SUM, async_op=False),
        "all_gather": lambda: comm.all_gather_single(whole, x, async_op=False),
        "reduce_scatter": lambda: comm.reduce_scatter_single(x, whole, ReduceOp.SUM, async_op=False),
        "all_to_all": lambda: comm.all_to_all_single(whole, other, async_op=False),
        "all_to_all_v": lambda: comm.all_to_all_v_single(*unequal, async_op=False),
        "broadcast": lambda: comm.broadcast(x, 1, async_op=False),
        "rms_norm": lambda: ops.all_reduce_rms_norm(rows, rows, rows[0], comm),
    }[name]


class Framed:
    """A tensor at an odd offset of a larger one, whose rest must stay unchanged."""

    def __init__(self, count, dtype, offset=0):
        self.whole = torch.full((count + offset + 64,), 77, dtype=dtype, device="cuda")
        self.inside = self.whole[offset : offset + count]
        self.offset = offset

    def check(self):
        assert (self.whole[: self.offset] == 77).all()
        assert (self.whole[self.offset + self.inside.numel() :] == 77).all()


def algorithms(action):
    """Returns the algorithms that the flight recorder has for the calls that `action` makes."""
    to.flight_recorder.reset()
    action()
    return [entry.get("algorithm") for entry in json.loads(to.flight_recorder.dump_json())["entries"]]


class Poison:
    """Leaves NaN in the slots that receive the next operation's data, of all blocks and ranks.

    LL, LL128 and Simple share the count of rounds and have two, four and four slots. Gathers of one round of all
    blocks (of two rounds for LL128) fill one slot after the other. An operation of one round then finds NaN where
    its data arrives, with any protocol. Two all-reduces by LL128, each of two shots, do the same for the slots of
    its sums.
    """

    def __init__(self, comm):
        self.comm = comm
        size = comm.get_size()
        lines = 256 if size == 2 else 128  # blocks
        wide = 192 if size == 2 else 128 if size <= 4 else 64
        vectors = 256 if size == 2 else 128 if size <= 4 else 64
        self.rounds = {"ll": (lines * 256 * 12, 2), "ll128": (wide * 16 * 480, 2), "simple": (vectors * 512 * 16, 4)}
        self.nans = torch.full((size * wide * 16 * 480,), 0xFF, dtype=torch.uint8, device="cuda")
        self.out = torch.empty(size * self.nans.numel(), dtype=torch.uint8, device="cuda")

    def __call__(self):
        size = self.comm.get_size()
        for mode, (count, rounds) in self.rounds.items():
            options = {"async_op": False, "hints": {"custom_collectives": mode}}
            for _ in range(rounds):
                self.comm.all_gather_single(self.out[: size * count], self.nans[:count], **options)
        sums = self.nans.view(torch.float32)
        for _ in range(2):
            self.comm.all_reduce(sums, ReduceOp.SUM, async_op=False, hints={"custom_collectives": "ll128"})


def at_call(which, calls, act):
    """Acts at one call of every `calls`, and again at the same one of the next series."""
    numbers = itertools.count()
    return lambda: act() if next(numbers) % calls == which else None


def unwritten(like):
    """Returns a tensor with all bits set: NaN, or a number that no input has."""
    out = torch.empty_like(like)
    out.view(torch.uint8).fill_(0xFF)
    return out


class Step:
    """Runs every operation once, on inputs that a counter on the device changes; differences are counted there.
    `before` is called before each one. all_to_all_v uses all available blocks."""

    CALLS = 8  # of `before`; has_unequal: one more

    def __init__(self, comm, count, dtype=torch.bfloat16, *, before=lambda: None, has_unequal=True):
        self.comm, self.rank, self.size = comm, comm.get_rank(), comm.get_size()
        self.step = torch.zeros((), dtype=torch.int64, device="cuda")
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.base = torch.arange(count * self.size, device="cuda") % 97
        self.count, self.dtype, self.before, self.has_unequal = count, dtype, before, has_unequal

    def of(self, rank):
        return ((self.base + 3 * rank + 5 * self.step) % 29).to(self.dtype)  # sums of eight are exact

    def same(self, got, expected):
        self.wrong += (got != expected).sum()

    def part(self, sender, receiver):
        """Returns the slice of `sender`'s elements for `receiver` if parts are unequal; it may be empty."""
        count = 0 if (sender + 2 * receiver) % 3 == 2 else self.count - min(receiver, self.count)
        return slice(receiver * self.count, receiver * self.count + count)

    def unequal(self, every):
        """Runs all_to_all_v and compares its result."""
        sent = [self.part(self.rank, r) for r in range(self.size)]
        received = [every[r][self.part(r, self.rank)] for r in range(self.size)]
        expected = torch.cat(received)
        out = unwritten(expected)
        x = torch.cat([every[self.rank][part] for part in sent])
        self.comm.all_to_all_v_single(out, x, [len(one) for one in received], [s.stop - s.start for s in sent],
                                      async_op=False)  # fmt: skip
        self.same(out, expected)

    def __call__(self):
        comm, count = self.comm, self.count
        self.step.add_(1).remainder_(1000)
        every = [self.of(r) for r in range(self.size)]
        mine = every[self.rank]
        parts = [one.view(self.size, count) for one in every]
        for hints in (None, {"custom_collectives": "ll128"}, {"custom_collectives": "two_shot"}):
            self.before()
            x = mine[:count].clone()
            comm.all_reduce(x, ReduceOp.SUM, async_op=False, hints=hints)
            self.same(x, sum(part[0] for part in parts))
        self.before()
        out = unwritten(x)
        comm.reduce_scatter_single(out, mine, ReduceOp.SUM, async_op=False)
        self.same(out, sum(part[self.rank] for part in parts))
        self.before()
        gathered = unwritten(mine)
        comm.all_gather_single(gathered, parts[self.rank][0], async_op=False)
        self.same(gathered, torch.cat([part[0] for part in parts]))
        self.before()
        gathered = unwritten(mine)
        work = comm.all_to_all_single(gathered, mine, async_op=True)
        work.wait()
        self.same(gathered, torch.cat([part[self.rank] for part in parts]))
        if self.has_unequal:
            self.before()
            self.unequal(every)
        for _ in range(2):
            self.before()
            x = parts[1][1].clone() if self.rank == 1 else unwritten(x)
            comm.broadcast(x, 1, async_op=False)
            self.same(x, parts[1][1])

    def capture(self):
        self()  # allocates the memory, and is a test by itself
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph

    def check(self):
        assert self.wrong.item() == 0
