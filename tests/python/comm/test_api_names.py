"""The names of torchcomms, on its API page and in its code: each one exists here, or docs/migrate/torchcomms.md has
the reason."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

import torch_overlap

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE, VARIABLE_PAGE = DOCS / "reference" / "communicator.md", DOCS / "reference" / "environment.md"
ENV = DOCS.parent / "csrc" / "torch_overlap" / "base" / "env.cpp"
VARIABLES = """TORCHCOMM_ABORT_ON_ERROR TORCHCOMM_TIMEOUT_SECONDS TORCHCOMM_RANK TORCHCOMM_SIZE
    TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD TORCHCOMM_NCCL_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD
    TORCHCOMM_GLOO_HOSTNAME TORCHCOMM_GLOO_INTERFACE TORCHCOMM_NCCLX_GRAPH_TIMEOUT_MONITORING
    TORCHCOMM_FR_DUMP_TEMP_FILE TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME TORCHCOMM_FR_BUFFER_SIZE TORCHCOMM_FR_CPP_STACK
    TORCHCOMM_HEALTH_CHECK_WAIT_MS TORCHCOMMS_SERIALIZATION TORCHCOMMS_PATCH_FOR_COMPILE
    TORCHCOMMS_COMPILE_IGNORE_PYTORCH_VERSION_REQUIREMENT TORCHCOMMS_BACKEND_LIB_PATH_"""
OPERATIONS = """send recv broadcast all_reduce reduce all_gather all_gather_v all_gather_single reduce_scatter
    reduce_scatter_v reduce_scatter_single all_to_all all_to_all_single all_to_all_v_single barrier scatter gather
    gather_single"""
# By owner; "" is the package itself.
NAMES = {
    "": """new_comm TorchComm ReduceOp RedOpType TorchWork WorkStatus Timeout OpName RemovableHandle
        BatchSendRecv P2POp P2POpType TorchCommWindow TorchCommWindowAttr TorchCommWinAccessType
        register_backend TorchCommBackend is_backend_built built_backends get_mem_allocator _is_backend_registered
        CommOptions BatchP2POptions SendOptions RecvOptions BroadcastOptions AllReduceOptions ReduceOptions
        AllGatherOptions AllGatherSingleOptions ReduceScatterOptions ReduceScatterSingleOptions AllToAllOptions
        AllToAllSingleOptions AllToAllvSingleOptions BarrierOptions ScatterOptions GatherOptions
        ReconfigureOptions AllGatherPInitOptions AllGatherPExecOptions
        objcol device_mesh hooks functional distwrap _BackendWrapper""",
    "TorchComm": OPERATIONS
    + """ finalize get_rank get_size get_name get_device get_options get_backend get_backend_version
        get_backend_impl unsafe_get_backend split batch_op_create new_window get_mem_allocator mem_allocator
        tensor_register tensor_deregister get_device_transport all_gather_p_init all_gather_p_exec all_gather_p_free
        get_init_handle reconfigure abort is_abort_supported is_aborted set_timeout set_hints register_pre_hook
        register_post_hook register_abort_hook __copy__ __deepcopy__ get_nccl_comm_ptr""",
    "TorchWork": "is_completed wait wait_blocking _set_status",
    "TorchCommWindow": """tensor_register tensor_deregister put signal wait_signal map_remote_tensor get_attr get_size
        get_tensor dtype shape device get_device_window register_local_buffer deregister_local_buffer __copy__
        __deepcopy__""",
    "TorchCommWindowAttr": "access_type",
    "TorchCommWinAccessType": "WIN_ACCESS_TYPE_UNIFIED WIN_ACCESS_TYPE_SEPARATE",
    "ReduceOp": "SUM PRODUCT MIN MAX BAND BOR BXOR PREMUL_SUM AVG type",
    "WorkStatus": "NOT_STARTED INPROGRESS COMPLETED TIMEDOUT ERROR",
    "OpName": OPERATIONS + " split new_window finalize",
    "BatchSendRecv": "send recv issue ops",
    "P2POp": "type tensor peer",
    "P2POpType": "SEND RECV",
    "CommOptions": "abort_process_on_timeout_or_error timeout store name hints enable_reconfigure",
    "BatchP2POptions": "hints timeout",
    "RemovableHandle": "remove",
    "_BackendWrapper": """get_comm get_mem_allocator name options _verify_work_timeout _set_default_timeout""",
    "objcol": """all_gather_object gather_object send_object_list recv_object_list broadcast_object_list
        scatter_object_list""",
    "device_mesh": "init_device_mesh _flatten_with_comm _create_torchcomm_process_group",
    "hooks": """FlightRecorderHook clog NanCheckHook SendPreHookArgs RecvPreHookArgs BroadcastPreHookArgs
        AllReducePreHookArgs ReducePreHookArgs AllGatherPreHookArgs AllGatherVPreHookArgs AllGatherSinglePreHookArgs
        ReduceScatterPreHookArgs ReduceScatterVPreHookArgs ReduceScatterSinglePreHookArgs AllToAllPreHookArgs
        AllToAllSinglePreHookArgs AllToAllVSinglePreHookArgs BarrierPreHookArgs ScatterPreHookArgs GatherPreHookArgs
        GatherSinglePreHookArgs SplitPreHookArgs NewWindowPreHookArgs BatchOpIssuePreHookArgs FinalizePreHookArgs
        CollectivePostHookArgs SplitPostHookArgs NewWindowPostHookArgs BatchOpIssuePostHookArgs
        FinalizePostHookArgs""",
    "hooks.FlightRecorderHook": "register_with_comm dump_json dump_file reset is_enabled size",
}


def all_names() -> list[str]:
    return [f"{owner}.{name}".lstrip(".") for owner, names in NAMES.items() for name in names.split()]


def not_here() -> set[str]:
    """Returns the names of the page's table, without the parentheses of a call."""
    section = (DOCS / "migrate" / "torchcomms.md").read_text().split("## Not here, and why")[1]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w.]+)(?:\(\))?`", row)}


def test_every_variable_is_read_or_accounted_for() -> None:
    read, listed = ENV.read_text(), VARIABLE_PAGE.read_text()
    for name in VARIABLES.split():
        assert (f'"{name}"' in read) != (name in not_here()), name
        assert (f"`{name}" in listed) or name in not_here(), name


def test_the_page_has_every_variable_that_is_read() -> None:
    read = set(re.findall(r'"([A-Z][A-Z0-9_]+)"', ENV.read_text())) - {"SIGUSR1", "SIGUSR2"}
    assert {"RANK", "TORCHCOMM_RANK", "TORCH_OVERLAP_TUNE_CACHE"} <= read
    listed = VARIABLE_PAGE.read_text()
    assert [name for name in sorted(read) if f"`{name}" not in listed] == []


def test_nothing_else_reads_a_variable() -> None:
    package, programs = Path(torch_overlap.__file__).parent, ("tools/bench/", "testing/", "_gpus.py", "jax/axis.py")
    python = [p for p in package.rglob("*.py") if not p.relative_to(package).as_posix().startswith(programs)]
    native = [path for path in ENV.parents[1].rglob("*.*") if path.suffix in (".cpp", ".cu", ".h") and path != ENV]
    reads = re.compile(r"\benviron\b|\bgetenv\b")
    assert len(python) > 50
    assert len(native) > 200
    assert [path.name for path in (*python, *native) if reads.search(path.read_text())] == []


def test_the_page_has_what_a_communicator_has() -> None:
    page = PAGE.read_text()
    owners = (torch_overlap.TorchComm, torch_overlap.TorchWork, torch_overlap.BatchSendRecv)
    names = [name for owner in owners for name in dir(owner) if not name.startswith("_")]
    names += [name for name in torch_overlap.__all__ if name.endswith("Options")]
    assert [name for name in names if f"`{name}" not in page] == []


def is_here(name: str) -> bool:
    missing = object()
    return functools.reduce(lambda o, part: getattr(o, part, missing), name.split("."), torch_overlap) is not missing


@pytest.mark.parametrize("owner", NAMES)
def test_every_name_is_here_or_accounted_for(owner: str) -> None:
    mine = [f"{owner}.{name}".lstrip(".") for name in NAMES[owner].split()]
    assert [name for name in mine if not is_here(name) and name not in not_here()] == []


def test_what_is_accounted_for_is_of_upstream_and_not_here() -> None:
    assert not_here() <= {*all_names(), *VARIABLES.split()}
    assert [name for name in not_here() if is_here(name)] == []
