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
- `torch.distributed.monitored_barrier` and `_set_pg_timeout` accept only torch's own backends. Call the group's methods
  instead: `group.monitored_barrier(timeout)`, `group.set_timeout(timeout)`.
"""

from __future__ import annotations

from typing import Any

BACKEND_NAME = "torch_overlap"


def _make_group(c10d_options: Any, pg_options: Any) -> Any:
    """Returns the backend of a new process group, one object for all its device types. Called by c10d.

    `pg_options` are BackendOptions, or the finished backend, over an existing communicator (see device_mesh).
    """
    from torch_overlap import _tuning
    from torch_overlap._C import BackendOptions, InvalidTypeError, _BackendWrapper
    from torch_overlap._methods.arguments import describe

    if isinstance(pg_options, _BackendWrapper):
        return pg_options
    if pg_options is not None and not isinstance(pg_options, BackendOptions):
        raise InvalidTypeError(
            f"init_process_group: expected a torch_overlap.BackendOptions for pg_options, got {describe(pg_options)}; "
            "leave it out or make one"
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


def register() -> None:
    """Registers the backend with torch.distributed. No-op in a torch without it, and on a second call."""
    import torch.distributed as dist

    if not dist.is_available() or BACKEND_NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND_NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])
