"""Collectives of torch.distributed on tensors whose memory has another order than their elements, by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

SHAPE = (6, 2, 4)  # of one rank's part; the number of ranks divides dimension 0
POISON = -77.0


def plain(values):
    return values.clone(), None


def transposed(values):
    return values.transpose(0, -1).contiguous().transpose(0, -1), None


def permuted(values):
    return values.permute(2, 0, 1).contiguous().permute(1, 2, 0), None


def strided(values):
    whole = torch.full((*values.shape[:-1], 2 * values.shape[-1]), POISON, dtype=values.dtype, device=values.device)
    whole[..., ::2] = values
    return whole[..., ::2], whole[..., 1::2]


def column(values):
    whole = torch.full((*values.shape, 3), POISON, dtype=values.dtype, device=values.device)
    whole[..., 1] = values
    return whole[..., 1], whole[..., ::2]


LAYOUTS: list[Callable] = [plain, transposed, permuted, strided, column]


def fresh(seed: int, rank: int, *shape: int, device="cpu"):
    """Returns integers, whose sums are exact; every rank knows those of every rank."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    return torch.randint(-1000, 1000, shape, generator=generator).float().to(device)


class Case:
    """One rank's tensors of one layout; `check` compares the written elements and the gaps around them."""

    def __init__(self, layout: Callable, device):
        self.layout, self.device, self.gaps = layout, device, []

    def of(self, values):
        tensor, gap = self.layout(values)
        if gap is not None:
            self.gaps.append(gap)
        return tensor

    def room(self, *shape):
        return self.of(torch.full(shape, POISON - 1, device=self.device))

    def check(self, *pairs):
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        for gap in self.gaps:
            torch.testing.assert_close(gap, torch.full_like(gap, POISON), rtol=0, atol=0)


def cases(seed: int, rank: int, size: int, make: Callable[[], Case], device) -> Iterator[tuple[str, Callable]]:
    """Yields (name, run(async_op)) of every operation; `make` gives this rank's case."""
    mine = [fresh(seed, r, *SHAPE, device=device) for r in range(size)]
    wide = [fresh(seed + 1, r, size * SHAPE[0], *SHAPE[1:], device=device) for r in range(size)]
    parts = [list(w.chunk(size)) for w in wide]
    total = sum(mine)
    right, left, root = (rank + 1) % size, (rank - 1) % size, size - 1

    def finish(work):
        for one in work if isinstance(work, list) else [work]:
            if one is not None:
                one.wait()

    def broadcast(case, **how):
        x = case.of(mine[rank])
        finish(dist.broadcast(x, root, **how))
        case.check((x, mine[root]))

    def all_reduce(case, **how):
        x = case.of(mine[rank])
        finish(dist.all_reduce(x, **how))
        case.check((x, total))

    def reduce(case, **how):
        x = case.of(mine[rank])
        finish(dist.reduce(x, root, **how))
        case.check((x, total if rank == root else mine[rank]))

    def all_gather(case, **how):
        outputs = [case.room(*SHAPE) for _ in range(size)]
        finish(dist.all_gather(outputs, case.of(mine[rank]), **how))
        case.check(*zip(outputs, mine, strict=True))

    def all_gather_into_tensor(case, **how):
        output = case.room(size * SHAPE[0], *SHAPE[1:])
        finish(dist.all_gather_into_tensor(output, case.of(mine[rank]), **how))
        case.check((output, torch.cat(mine)))

    def gather(case, **how):
        outputs = [case.room(*SHAPE) for _ in range(size)] if rank == root else None
        finish(dist.gather(case.of(mine[rank]), outputs, dst=root, **how))
        case.check(*(zip(outputs, mine, strict=True) if outputs else ()))

    def scatter(case, **how):
        output = case.room(*SHAPE)
        finish(dist.scatter(output, [case.of(p) for p in parts[root]] if rank == root else None, src=root, **how))
        case.check((output, parts[root][rank]))

    def reduce_scatter(case, **how):
        output = case.room(*SHAPE)
        finish(dist.reduce_scatter(output, [case.of(p) for p in parts[rank]], **how))
        case.check((output, sum(p[rank] for p in parts)))

    def reduce_scatter_tensor(case, **how):
        output = case.room(*SHAPE)
        finish(dist.reduce_scatter_tensor(output, case.of(wide[rank]), **how))
        case.check((output, sum(p[rank] for p in parts)))

    def all_to_all_single(case, **how):
        output = case.room(*wide[rank].shape)
        finish(dist.all_to_all_single(output, case.of(wide[rank]), **how))
        case.check((output, torch.cat([p[rank] for p in parts])))

    def all_to_all_splits(case, **how):
        rows = SHAPE[0]
        splits = [rows + 1, rows - 1] + [rows] * (size - 2)  # to rank 0, to rank 1, ...
        output = case.room(size * splits[rank], *SHAPE[1:])
        finish(dist.all_to_all_single(output, case.of(wide[rank]), [splits[rank]] * size, splits, **how))
        case.check((output, torch.cat([w.split(splits)[rank] for w in wide])))

    def all_to_all(case, **how):
        outputs = [case.room(*SHAPE) for _ in range(size)]
        finish(dist.all_to_all(outputs, [case.of(p) for p in parts[rank]], **how))
        case.check(*((outputs[r], parts[r][rank]) for r in range(size)))

    def send_recv(case, **how):
        received = case.room(*SHAPE)
        if how["async_op"]:
            finish([dist.isend(case.of(mine[rank]), right), dist.irecv(received, left)])
        elif rank % 2 == 0:  # in turns; the last rank of an odd number communicates with rank 0 at the end
            dist.send(case.of(mine[rank]), right)
            dist.recv(received, left)
        else:
            dist.recv(received, left)
            dist.send(case.of(mine[rank]), right)
        case.check((received, mine[left]))

    def batch(case, **how):
        received = case.room(*SHAPE)
        finish(dist.batch_isend_irecv([dist.P2POp(dist.isend, case.of(mine[rank]), right),
                                       dist.P2POp(dist.irecv, received, left)]))  # fmt: skip
        case.check((received, mine[left]))

    def coalesced(case, **how):
        first, second = case.of(mine[rank]), case.of(mine[rank] + 1)
        finish(dist.all_reduce_coalesced([first, second], **how))
        case.check((first, total), (second, total + size))

    runs = [broadcast, all_reduce, reduce, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter]
    runs += [reduce_scatter_tensor, all_to_all_single, all_to_all_splits, all_to_all, send_recv, batch, coalesced]
    for run in runs:
        yield run.__name__, lambda async_op, run=run: run(make(), async_op=async_op)


def run_all(rank: int, size: int, seed: int, device="cpu") -> None:
    """Runs every operation with every pair of layouts: one on the last rank (the root), another on the rest."""
    for i, at_root in enumerate(LAYOUTS):
        for j, elsewhere in enumerate(LAYOUTS):
            layout = at_root if rank == size - 1 else elsewhere
            for name, run in cases(seed + 7 * i + j, rank, size, lambda layout=layout: Case(layout, device), device):
                for async_op in (False, True):
                    try:
                        run(async_op)
                    except AssertionError as error:
                        where = f"{at_root.__name__} on rank {size - 1}, {elsewhere.__name__} elsewhere"
                        raise AssertionError(f"{name}, async_op={async_op}, {where}: {error}") from None
