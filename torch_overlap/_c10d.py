"""Registers the torch.distributed backend "torch_overlap" when torch_overlap is imported.

`init_process_group(backend="torch_overlap")`, per-device strings ("cpu:torch_overlap,cuda:nccl"), `new_group`,
`split_group` and `init_device_mesh` then work as with a built-in backend. BackendOptions documents the differences,
and:

- Ranks exchange elements in their logical order, whatever the strides of each rank's tensors. A tensor whose memory has
  another order is copied before the operation, after it, or both.
- A `send` or `recv` on GPUs outside of `batch_isend_irecv` uses a separate communicator for each direction between two
  ranks and each tag. The first message creates it, without waiting for the other rank. A rank has at most 64 with tags.
  Messages therefore match by tag, in any order of issue. A message of a batch matches a message of a batch on the other
  rank, and a single message matches a single message. `recv` from any source works on the CPU only.
- Written tensors keep their version counters, as with torch's own backends; operations of a TorchComm advance them.
- `torch.distributed.monitored_barrier` and `_set_pg_timeout` accept only torch's own backends. Call the group's methods
  instead: `group.monitored_barrier(timeout)`, `group.set_timeout(timeout)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist

from torch_overlap import _tuning
from torch_overlap._C import BackendOptions, InvalidTypeError, InvalidValueError, TorchComm, _BackendWrapper
from torch_overlap._methods.arguments import describe

if TYPE_CHECKING:  # a torch without torch.distributed has none
    from torch.distributed import ProcessGroup

BACKEND_NAME = "torch_overlap"


def _make_group(c10d_options: Any, pg_options: Any) -> Any:
    """Returns the backend of a new process group, one object for all its device types. Called by c10d.

    `pg_options` are BackendOptions, ProcessGroupNCCL.Options, or the finished backend, over an existing communicator
    (see device_mesh).
    """
    if isinstance(pg_options, _BackendWrapper):
        return pg_options
    if _is_nccl_options(pg_options):
        pg_options = _from_nccl_options(pg_options)
    if pg_options is not None and not isinstance(pg_options, BackendOptions):
        raise InvalidTypeError(
            "init_process_group: expected a torch_overlap.BackendOptions or ProcessGroupNCCL.Options for pg_options, "
            f"got {describe(pg_options)}; leave it out or make one"
        )
    _tuning.load_once()
    return _BackendWrapper._make_group(
        c10d_options.store,
        c10d_options.group_rank,
        c10d_options.group_size,
        c10d_options.group_id,
        c10d_options.timeout,
        pg_options,
    )


# Fields of NCCLConfig that are hints of the NCCL backend under the same names. `blocking` is not: NCCL's calls are
# always bounded by the timeout here.
_NCCL_HINTS = ("cga_cluster_size", "min_ctas", "max_ctas", "net_name", "split_share", "traffic_class", "collnet_enable",
               "cta_policy", "shrink_share", "nvls_ctas", "n_channels_per_net_peer", "nvlink_centric_sched",
               "comm_name")  # fmt: skip
_NCCL_UNDEFINED = (None, -(2**31))  # NCCL_CONFIG_UNDEF_PTR and NCCL_CONFIG_UNDEF_INT


def _is_nccl_options(pg_options: Any) -> bool:
    return dist.is_nccl_available() and isinstance(pg_options, dist.ProcessGroupNCCL.Options)


def _from_nccl_options(options: Any) -> BackendOptions:
    """Returns the same settings for this backend. Those of NCCL's config reach CUDA communicators only."""
    fields = {name: getattr(options.config, name, None) for name in _NCCL_HINTS}
    return BackendOptions(
        is_high_priority_stream=options.is_high_priority_stream,
        cuda_hints={name: str(value) for name, value in fields.items() if value not in _NCCL_UNDEFINED},
    )


def comm_from_group(group: ProcessGroup | None = None, device: torch.device | str | None = None) -> TorchComm:
    """Returns the communicator of a process group of the backend "torch_overlap".

    It is the one that the group itself uses: operations of both are ordered together, and the group finalizes it. The
    first call for a device makes it and is then collective over the group.

        dist.init_process_group("torch_overlap")
        comm = to.comm_from_group()
        layer = to.nn.ColumnParallelLinear(4096, 11008, comm)

    Args:
        group: the group, as from `new_group` or `mesh.get_group("tp")`. Default: the default group.
        device: the device of the tensors. Default: the current GPU if the group serves GPUs with this backend,
            otherwise the CPU.

    Raises:
        InvalidValueError: the group does not use this backend for the device.
        InvalidTypeError: group is not a ProcessGroup.
    """
    found: object = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        got = "none: torch.distributed is not initialized" if found is None else describe(found)
        raise InvalidTypeError(
            f"comm_from_group: expected a process group, got {got}; call init_process_group(backend='{BACKEND_NAME}'), "
            "or pass the group of a mesh, mesh.get_group('tp')"
        )
    kinds = [torch.device(device).type] if device is not None else ["cuda", "cpu"]
    for kind in kinds:
        if kind == "cuda" and not torch.cuda.is_available():
            continue
        try:
            backend = found._get_backend(torch.device(kind))
        except RuntimeError:  # the group serves no tensors of this device
            continue
        if isinstance(backend, _BackendWrapper):
            wanted = torch.device(kind if device is None else device)
            if str(wanted) == "cuda":
                wanted = torch.device("cuda", torch.cuda.current_device())
            return backend.get_comm(wanted)
    raise InvalidValueError(
        f"comm_from_group: expected a group of backend '{BACKEND_NAME}' for {' or '.join(kinds)}, got "
        f"'{dist.get_backend(found)}'; call init_process_group(backend='{BACKEND_NAME}') before init_device_mesh"
    )


class _Devices(Sequence[str]):
    """The types of devices that the backend serves: "cuda" only if the machine has a GPU.

    Callers of torch.distributed take a group's devices from this list, and then put tensors there. It is evaluated when
    a group is made: a search for GPUs at import would initialize CUDA before the process forks.
    """

    def __init__(self) -> None:
        self._is_registered = False

    def registered(self) -> None:
        """Called after the registration, which takes all types."""
        self._is_registered = True

    def _types(self) -> list[str]:
        return ["cpu", "cuda"] if not self._is_registered or torch.cuda.is_available() else ["cpu"]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._types()[index]

    def __len__(self) -> int:
        return len(self._types())

    def __repr__(self) -> str:
        return repr(self._types())


def register() -> None:
    """Registers the backend with torch.distributed. No-op in a torch without it, and on a second call."""
    if not dist.is_available() or BACKEND_NAME in dist.Backend.backend_list:
        return
    devices = _Devices()
    # torch declares a list, and only iterates over it.
    dist.Backend.register_backend(BACKEND_NAME, _make_group, extended_api=True, devices=devices)  # type: ignore[arg-type]
    devices.registered()
