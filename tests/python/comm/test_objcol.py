"""Object collectives."""

from collections.abc import Callable

import pytest
import torch

from torch_overlap import Error, InvalidTypeError, InvalidValueError, TorchComm, UnsupportedError, objcol
from torch_overlap.testing import run_ranks


class Custom:
    """A class that weights_only refuses."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value

    def __hash__(self) -> int:
        return self.value


def obj(rank: int, seed: int) -> dict[str, object]:
    """Returns an object whose size differs by rank."""
    generator = torch.Generator().manual_seed(seed + rank)
    return {
        "rank": rank,
        "text": "x" * (rank * 300),
        "list": [1, 2.5, None, True],
        "t": torch.rand(rank + 1, generator=generator),
    }


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def run_all(comm: TorchComm, seed: int) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    everyone = [obj(r, seed) for r in range(size)]

    got: list[object] = [None] * size
    objcol.all_gather_object(comm, got, everyone[rank])
    assert same(dict(enumerate(got)), dict(enumerate(everyone)))

    for root in range(size):
        got = [None] * size if rank == root else []
        objcol.gather_object(comm, everyone[rank], root, got if rank == root else None)
        assert not got or same(dict(enumerate(got)), dict(enumerate(everyone)))

        got = [obj(root, seed), "second"] if rank == root else [None, None]
        objcol.broadcast_object_list(comm, got, root)
        assert same(got[0], everyone[root])
        assert got[1] == "second"

        out: list[object] = ["old"]
        objcol.scatter_object_list(comm, root, out, everyone if rank == root else None)
        assert same(out[0], everyone[rank])

    if size > 1:
        if rank == 0:
            objcol.send_object_list(comm, [everyone[0], [], "last"], size - 1)
        elif rank == size - 1:
            got = [None] * 3
            objcol.recv_object_list(comm, got, 0)
            assert same(got[0], everyone[0])
            assert got[1:] == [[], "last"]


@pytest.mark.parametrize("serialization", ["torch_save", "pickle"])
def test_objects_arrive(backend: str, size: int, device: str, seed: int, serialization: str) -> None:
    env = {"TORCHCOMMS_SERIALIZATION": serialization}
    run_ranks(run_all, size, seed, backend=backend, device=device, env=env)


def run_custom(comm: TorchComm, weights_only: bool) -> None:
    got: list[object] = [None] * comm.get_size()
    if weights_only:
        with pytest.raises(Exception, match=r"(?i)weights.only"):
            objcol.all_gather_object(comm, got, Custom(comm.get_rank()))
        assert got == [None] * comm.get_size()
    else:
        objcol.all_gather_object(comm, got, Custom(comm.get_rank()), weights_only=False)
        assert got == [Custom(rank) for rank in range(comm.get_size())]


@pytest.mark.parametrize("weights_only", [True, False])
def test_other_classes_need_weights_only_false(weights_only: bool) -> None:
    run_ranks(run_custom, 2, weights_only)


def run_pickled_custom(comm: TorchComm) -> None:
    got: list[object] = [None, None]
    objcol.all_gather_object(comm, got, Custom(comm.get_rank()))
    assert got == [Custom(0), Custom(1)]


def test_pickle_takes_any_class() -> None:
    run_ranks(run_pickled_custom, 2, env={"TORCHCOMMS_SERIALIZATION": "pickle"})


def run_mistakes(comm: TorchComm) -> None:
    rank = comm.get_rank()
    with pytest.raises(InvalidValueError, match="all_gather_object: expected 2 objects as object_list, got 1"):
        objcol.all_gather_object(comm, [None], 1)
    with pytest.raises(InvalidValueError, match=r"gather_object: expected a rank in \[0, 2\), got 2"):
        objcol.gather_object(comm, 1, 2)
    with pytest.raises(InvalidValueError, match="broadcast_object_list: expected 2 objects"):
        objcol.broadcast_object_list(comm, [1, 2] if rank == 0 else [None], 0)
    with pytest.raises(InvalidValueError, match="scatter_object_output_list"):
        objcol.scatter_object_list(comm, 0, [], [1, 2])
    for name, args in {
        "gather_object": (1, "a"), "send_object_list": ([1], None), "recv_object_list": ([1], 1.0),
        "broadcast_object_list": ([1], "0"),
    }.items():  # fmt: skip
        with pytest.raises(InvalidTypeError, match=f"{name}: expected a rank as an int, got"):
            getattr(objcol, name)(comm, *args)
    with pytest.raises(InvalidTypeError, match="scatter_object_list: expected a rank as an int, got"):
        objcol.scatter_object_list(comm, "0", [1], [1, 2])  # type: ignore[arg-type]
    comm.barrier(False).wait()


def test_mistakes_raise() -> None:
    run_ranks(run_mistakes, 2)


def run_without_peers(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    got: list[object] = [None] * size
    objcol.all_gather_object(comm, got, {"rank": rank})
    assert got == [{"rank": rank}] * size
    for root in range(size):
        mine: list[object] = [rank, "x"]
        calls: list[Callable[[], None]] = [
            lambda root=root, mine=mine: objcol.broadcast_object_list(comm, mine, root),
            lambda root=root, mine=mine: objcol.scatter_object_list(comm, root, mine, list(range(size))),
        ]
        for call in calls:
            if rank == root:
                call()
            else:
                with pytest.raises(UnsupportedError, match="objcol: expected the object of another rank"):
                    call()
        assert mine == [rank, "x"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_peers_there_are_no_objects_of_others(size: int) -> None:
    run_ranks(run_without_peers, size, backend="fake")


def run_unknown_serialization(comm: TorchComm) -> None:
    with pytest.raises(Error, match="TORCHCOMMS_SERIALIZATION: expected torch_save or pickle, got 'yaml'"):
        objcol.all_gather_object(comm, [None], 1)


def test_an_unknown_serialization_is_an_error() -> None:
    run_ranks(run_unknown_serialization, 1, env={"TORCHCOMMS_SERIALIZATION": "yaml"})
