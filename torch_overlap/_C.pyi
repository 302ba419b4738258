"""Types of the compiled module. The methods that torch_overlap/_methods adds to its classes have theirs there."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from enum import Enum, IntEnum
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Final, overload

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, Store

from torch_overlap._methods import c10d, collectives, communicator, window, works
from torch_overlap.compat.hooks import PostHookArgs, PreHookArgs
from torch_overlap.mesh._core import AxisRef, CostModel, Layout, Mesh, Plan

class Error(RuntimeError): ...
class InvalidValueError(Error, ValueError): ...
class InvalidTypeError(Error, TypeError): ...
class OperationTimeoutError(Error, TimeoutError): ...
class UnsupportedError(Error, NotImplementedError): ...
class StateError(Error): ...

build_config: dict[str, str]
_mesh: ModuleType  # torch_overlap/mesh/_core.pyi

_env: ModuleType  # argument-less functions, each reads a variable of base/env.h at the time of the call

def _streams_made() -> int: ...
def _joined_memory(parts: Sequence[Tensor]) -> Tensor | None: ...

class RedOpType(Enum):
    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    PREMUL_SUM = 7
    AVG = 8

class ReduceOp:
    SUM: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    def __init__(self, opType: RedOpType) -> None: ...
    @staticmethod
    def PREMUL_SUM(factor: float | Tensor) -> ReduceOp: ...
    @staticmethod
    def _premul_sum(factor: float | Tensor) -> ReduceOp: ...
    type: Final[RedOpType]
    factor: Final[float | Tensor | None]
    def __hash__(self) -> int: ...
    def __copy__(self) -> ReduceOp: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> ReduceOp: ...

class _OpOptions:
    def __init__(self, hints: Mapping[str, str] | None = None, timeout: timedelta | None = None) -> None: ...
    @property
    def hints(self) -> Mapping[str, str]: ...
    @hints.setter
    def hints(self, hints: Mapping[str, str] | None) -> None: ...
    @property
    def timeout(self) -> timedelta: ...
    @timeout.setter
    def timeout(self, timeout: timedelta | None) -> None: ...

class SendOptions(_OpOptions):
    tag: int
    def __init__(
        self, hints: Mapping[str, str] | None = None, timeout: timedelta | None = None, tag: int = 0
    ) -> None: ...

class RecvOptions(_OpOptions):
    tag: int
    def __init__(
        self, hints: Mapping[str, str] | None = None, timeout: timedelta | None = None, tag: int = 0
    ) -> None: ...

class BroadcastOptions(_OpOptions): ...
class AllReduceOptions(_OpOptions): ...
class ReduceOptions(_OpOptions): ...
class AllGatherOptions(_OpOptions): ...
class AllGatherSingleOptions(_OpOptions): ...
class ReduceScatterOptions(_OpOptions): ...
class ReduceScatterSingleOptions(_OpOptions): ...
class AllToAllOptions(_OpOptions): ...
class AllToAllSingleOptions(_OpOptions): ...
class AllToAllvSingleOptions(_OpOptions): ...
class BarrierOptions(_OpOptions): ...
class ScatterOptions(_OpOptions): ...
class GatherOptions(_OpOptions): ...
class GatherSingleOptions(_OpOptions): ...
class BatchP2POptions(_OpOptions): ...

class CommOptions:
    name: str | None
    store: Store | None
    def __init__(self) -> None: ...
    def __copy__(self) -> CommOptions: ...
    @property
    def abort_process_on_timeout_or_error(self) -> bool: ...
    @abort_process_on_timeout_or_error.setter
    def abort_process_on_timeout_or_error(self, value: bool | None) -> None: ...
    @property
    def timeout(self) -> timedelta: ...
    @timeout.setter
    def timeout(self, value: timedelta | None) -> None: ...
    @property
    def is_high_priority_stream(self) -> bool: ...
    @is_high_priority_stream.setter
    def is_high_priority_stream(self, value: bool | None) -> None: ...
    @property
    def enable_reconfigure(self) -> bool: ...
    @enable_reconfigure.setter
    def enable_reconfigure(self, value: bool | None) -> None: ...
    @property
    def hints(self) -> Mapping[str, str]: ...
    @hints.setter
    def hints(self, value: Mapping[str, str] | None) -> None: ...

class WorkStatus(Enum):
    NOT_STARTED = 0
    INPROGRESS = 1
    COMPLETED = 2
    TIMEDOUT = 3
    ERROR = 4

class TorchWork:
    wait = works.wait
    wait_blocking = works.wait_blocking
    is_completed = works.is_completed
    stream: Final[torch.Stream | None]
    status = works.status
    exception = works.exception
    def _on_completion(self, callback: Callable[[BaseException | None], object]) -> None: ...
    # Called by torch_overlap/_methods, which passes all arguments by position.
    def _wait(self, *arguments: Any) -> None: ...
    def _wait_blocking(self, *arguments: Any) -> None: ...

class OpName(Enum):
    send = 0
    recv = 1
    broadcast = 2
    all_reduce = 3
    all_reduce_rms_norm = 4
    reduce = 5
    all_gather = 6
    all_gather_v = 7
    all_gather_single = 8
    reduce_scatter = 9
    reduce_scatter_v = 10
    reduce_scatter_single = 11
    all_to_all = 12
    all_to_all_single = 13
    all_to_all_v_single = 14
    barrier = 15
    scatter = 16
    gather = 17
    gather_single = 18
    batch_op_issue = 19
    split = 20
    new_window = 21
    finalize = 22
    put = 23
    signal = 24
    wait_signal = 25

class P2POpType(Enum):
    SEND = 0
    RECV = 1

class P2POp:
    def __init__(self, type: P2POpType, tensor: Tensor, peer: int, tag: int = 0) -> None: ...
    type: Final[P2POpType]
    tensor: Final[Tensor]
    peer: Final[int]
    tag: Final[int]

class BatchSendRecv:
    send = works.send
    recv = works.recv
    issue = works.issue
    ops: Final[list[P2POp]]
    # Called by torch_overlap/_methods, which passes all arguments by position.
    def _send(self, *arguments: Any) -> None: ...
    def _recv(self, *arguments: Any) -> None: ...
    def _issue(self, *arguments: Any) -> TorchWork: ...

class TorchCommWinAccessType(Enum):
    WIN_ACCESS_TYPE_UNIFIED = 0
    WIN_ACCESS_TYPE_SEPARATE = 1

class TorchCommWindowAttr:
    access_type: Final[TorchCommWinAccessType]

class TorchCommWindow:
    tensor_register = window.tensor_register
    tensor_deregister = window.tensor_deregister
    put = window.put
    signal = window.signal
    wait_signal = window.wait_signal
    map_remote_tensor = window.map_remote_tensor
    get_attr = window.get_attr
    get_size = window.get_size
    get_tensor = window.get_tensor
    get_name = window.get_name
    get_comm = window.get_comm
    dtype: Final[torch.dtype]
    shape: Final[torch.Size]
    device: Final[torch.device]
    def __hash__(self) -> int: ...
    def __copy__(self) -> TorchCommWindow: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> TorchCommWindow: ...
    # Called by torch_overlap/_methods, which passes all arguments by position.
    def _tensor_register(self, *arguments: Any) -> None: ...
    def _put(self, *arguments: Any) -> TorchWork: ...
    def _signal(self, *arguments: Any) -> TorchWork: ...
    def _wait_signal(self, *arguments: Any) -> TorchWork: ...
    def _map_remote_tensor(self, *arguments: Any) -> Tensor: ...
    def _get_attr(self, *arguments: Any) -> TorchCommWindowAttr: ...

class RemovableHandle:
    remove = works.remove

class TorchComm:
    get_rank = communicator.get_rank
    get_size = communicator.get_size
    get_name = communicator.get_name
    get_device = communicator.get_device
    get_backend = communicator.get_backend
    get_backend_version = communicator.get_backend_version
    get_options = communicator.get_options
    get_ranks_in_world = communicator.get_ranks_in_world
    get_native_handle = communicator.get_native_handle
    split = communicator.split
    finalize = communicator.finalize
    abort = communicator.abort
    is_aborted = communicator.is_aborted
    is_abort_supported = communicator.is_abort_supported
    is_finalized = communicator.is_finalized
    get_init_handle = communicator.get_init_handle
    get_generation = communicator.get_generation
    reconfigure = communicator.reconfigure
    set_timeout = communicator.set_timeout
    set_hints = communicator.set_hints
    batch_op_create = communicator.batch_op_create
    new_window = communicator.new_window
    get_mem_allocator = communicator.get_mem_allocator
    mem_allocator: Final[Any]
    tensor_register = communicator.tensor_register
    tensor_deregister = communicator.tensor_deregister
    def register_pre_hook(self, callback: Callable[[OpName, int, PreHookArgs], object]) -> RemovableHandle: ...
    def register_post_hook(self, callback: Callable[[int, PostHookArgs], object]) -> RemovableHandle: ...
    register_abort_hook = communicator.register_abort_hook
    def __copy__(self) -> TorchComm: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> TorchComm: ...
    def __enter__(self) -> TorchComm: ...
    def __exit__(
        self, type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    send = collectives.send
    recv = collectives.recv
    broadcast = collectives.broadcast
    all_reduce = collectives.all_reduce
    reduce = collectives.reduce
    barrier = collectives.barrier
    all_gather = collectives.all_gather
    all_gather_v = collectives.all_gather_v
    all_gather_single = collectives.all_gather_single
    gather = collectives.gather
    gather_single = collectives.gather_single
    reduce_scatter = collectives.reduce_scatter
    reduce_scatter_v = collectives.reduce_scatter_v
    reduce_scatter_single = collectives.reduce_scatter_single
    scatter = collectives.scatter
    all_to_all = collectives.all_to_all
    all_to_all_single = collectives.all_to_all_single
    all_to_all_v_single = collectives.all_to_all_v_single
    # Called by torch_overlap/_methods, which passes all arguments by position.
    def _split(self, *arguments: Any) -> TorchComm | None: ...
    def _reconfigure(self, *arguments: Any) -> TorchWork: ...
    def _set_timeout(self, *arguments: Any) -> None: ...
    def _set_hints(self, *arguments: Any) -> None: ...
    def _new_window(self, *arguments: Any) -> TorchCommWindow: ...
    def _tensor_register(self, *arguments: Any) -> None: ...
    def _tensor_deregister(self, *arguments: Any) -> None: ...
    def _register_pre_hook(self, *arguments: Any) -> RemovableHandle: ...
    def _register_post_hook(self, *arguments: Any) -> RemovableHandle: ...
    def _register_abort_hook(self, *arguments: Any) -> RemovableHandle: ...
    def _send(self, *arguments: Any) -> TorchWork: ...
    def _recv(self, *arguments: Any) -> TorchWork: ...
    def _broadcast(self, *arguments: Any) -> TorchWork: ...
    def _all_reduce(self, *arguments: Any) -> TorchWork: ...
    def _reduce(self, *arguments: Any) -> TorchWork: ...
    def _barrier(self, *arguments: Any) -> TorchWork: ...
    def _all_gather(self, *arguments: Any) -> TorchWork: ...
    def _all_gather_v(self, *arguments: Any) -> TorchWork: ...
    def _all_gather_single(self, *arguments: Any) -> TorchWork: ...
    def _gather(self, *arguments: Any) -> TorchWork: ...
    def _gather_single(self, *arguments: Any) -> TorchWork: ...
    def _reduce_scatter(self, *arguments: Any) -> TorchWork: ...
    def _reduce_scatter_v(self, *arguments: Any) -> TorchWork: ...
    def _reduce_scatter_single(self, *arguments: Any) -> TorchWork: ...
    def _scatter(self, *arguments: Any) -> TorchWork: ...
    def _all_to_all(self, *arguments: Any) -> TorchWork: ...
    def _all_to_all_single(self, *arguments: Any) -> TorchWork: ...
    def _all_to_all_v_single(self, *arguments: Any) -> TorchWork: ...

class _FlightRecorder:
    def __init__(self, capacity: int) -> None: ...
    @staticmethod
    def of_process() -> _FlightRecorder: ...
    capacity: Final[int]
    def size(self) -> int: ...
    def reset(self) -> None: ...
    def attach(self, comm: TorchComm) -> RemovableHandle: ...
    def json(self, include_completed: bool) -> str: ...
    def dump_rank(self, rank: int, include_completed: bool) -> str: ...

class _CallLog:
    def __init__(self, path: str, events: Sequence[str], verbose: Sequence[str], is_text: bool) -> None: ...
    def attach(self, comm: TorchComm) -> RemovableHandle: ...
    def flush(self) -> None: ...

def _dump_trace(path: str | None, reason: str) -> list[str]: ...
def _dump_trace_on_signal(signal: int) -> None: ...
def _health_json() -> str: ...
def _refuse_capture(op: str, comm: TorchComm) -> None: ...
def _name_and_size(op: str, comm: TorchComm) -> tuple[str, int]: ...
def _new_comm(
    backend: str,
    device: torch.device,
    name: str | None,
    options: CommOptions,
    rank: int | None,
    size: int | None,
) -> TorchComm: ...
def _abort_all() -> list[str]: ...
def _get_comm(name: str) -> TorchComm: ...
def comm_names() -> list[str]: ...
def _get_window(name: str) -> TorchCommWindow: ...
def window_names() -> list[str]: ...
def _symmetric_empty(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor: ...
def built_backends() -> list[str]: ...
def _register_backend(name: str, backend_class: type) -> None: ...

class BackendOptions(Backend.Options):
    backends: dict[str, str]
    hints: dict[str, str]
    cuda_hints: dict[str, str]
    is_high_priority_stream: bool | None
    abort_process_on_timeout_or_error: bool | None
    def __init__(
        self,
        *,
        backends: Mapping[str, str] | None = None,
        hints: Mapping[str, str] | None = None,
        is_high_priority_stream: bool | None = None,
        abort_process_on_timeout_or_error: bool | None = None,
        timeout: timedelta | None = None,
        cuda_hints: Mapping[str, str] | None = None,
    ) -> None: ...
    def __copy__(self) -> BackendOptions: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> BackendOptions: ...

class _BackendWrapper(Backend):
    def __init__(self, comm: TorchComm) -> None: ...
    @staticmethod
    def _make_group(
        store: Store,
        rank: int,
        size: int,
        group_name: str,
        timeout: timedelta,
        options: BackendOptions | None = None,
    ) -> _BackendWrapper: ...
    get_comm = c10d.get_comm
    new_window = c10d.new_window
    supports_window: Final[bool]
    def _get_comm(self, device: torch.device | None) -> TorchComm: ...
    options: Final[BackendOptions]
    _store: Final[Store | None]
    def split(self, store: Store, ranks: Sequence[int], options: BackendOptions) -> _BackendWrapper | None: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...

def _set_gloo_factory(factory: Callable[[Any, int, int, timedelta, str | None, str | None, bool], Any]) -> None: ...

_gemm: ModuleType  # torch_overlap/_gemm.pyi

class ScalingMode(IntEnum):
    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3
    BLOCK_1D_SCALING = 4
    BLOCK_2D_SCALING = 5
    ROW_SCALING = 6

# --- Overlap ---------------------------------------------------------------------------------------

class CommOverlapType(IntEnum):
    NONE = 0
    RS = 1
    AG = 2

class CommOverlapMethod(IntEnum):
    NONE = 0
    BULK = 1
    PIPELINE = 2
    RING_EXCHANGE = 3

class CommOverlapAlgo(IntEnum):
    NO_OVERLAP = 0
    BULK_OVERLAP_AG = 1
    BULK_OVERLAP_RS = 2
    SPLIT_PIPELINED_AG_P2P = 3
    SPLIT_PIPELINED_RS = 4
    SPLIT_PIPELINED_RS_P2P = 5
    ATOMIC_GEMM_RS = 6
    ATOMIC_GEMM_AG_P2P = 7
    ATOMIC_GEMM_RS_P2P = 8
    EXTERNAL_BULK_OVERLAP_AG = 9

class CommOverlapConfig:
    comm_type: CommOverlapType
    method: CommOverlapMethod
    buffer_shape: list[int]
    buffer_dtype: torch.dtype
    tp_size: int
    num_splits: int
    num_max_streams: int
    comm_cga_size: int
    gemm_priority: int
    comm_priority: int
    num_comm_sm: int
    set_sm_margin: bool
    use_ce: bool
    atomic_gemm: bool
    rs_overlap_first_gemm: bool
    aggregate_ag: bool
    relay_ag: bool
    def __init__(
        self,
        comm_type: CommOverlapType,
        method: CommOverlapMethod,
        buffer_shape: Sequence[int],
        buffer_dtype: torch.dtype,
        tp_size: int,
        *,
        num_splits: int | None = None,
        num_max_streams: int | None = None,
        comm_cga_size: int | None = None,
        gemm_priority: int = 0,
        comm_priority: int = 0,
        num_comm_sm: int | None = None,
        set_sm_margin: bool | None = None,
        use_ce: bool | None = None,
        atomic_gemm: bool = False,
        rs_overlap_first_gemm: bool = False,
        aggregate_ag: bool = False,
        relay_ag: bool = False,
    ) -> None: ...
    algos: Final[list[CommOverlapAlgo]]
    @staticmethod
    def of_algo(
        algo: CommOverlapAlgo, buffer_shape: Sequence[int], buffer_dtype: torch.dtype, tp_size: int
    ) -> CommOverlapConfig: ...

class OverlapGroup:
    def __init__(
        self,
        all_gather: Callable[[bytes], Sequence[bytes]],
        barrier: Callable[[], object],
        rank: int,
        size: int,
        device: torch.device,
        name: str = "outside",
        timeout: timedelta | None = None,
    ) -> None: ...
    def get_rank(self) -> int: ...
    def get_size(self) -> int: ...

class CommOverlapCore:
    config: Final[CommOverlapConfig]
    def get_tp_size(self) -> int: ...
    def is_atomic_gemm(self) -> bool: ...
    algos: Final[list[CommOverlapAlgo]]
    def is_p2p_overlap(self) -> bool: ...
    def is_fp8_ubuf(self) -> bool: ...
    def get_ubuf_dptr(self) -> int: ...
    def last_path(self) -> str: ...
    def check(self) -> None: ...
    def set_active_tokens(self, tokens: int) -> None: ...
    def active_tokens(self) -> int: ...
    def copy_into_buffer(self, input: Tensor, local_chunk: bool = False) -> None: ...
    def get_buffer(self, local_chunk: bool = False) -> Tensor: ...
    def get_buffer_chunk_by_id(self, chunk_id: int) -> Tensor: ...
    def set_ubuf_scale_inv(self, scale_inv: Tensor) -> None: ...
    def bulk_overlap_external_ag(self, lender: CommOverlapCore) -> None: ...
    def bulk_overlap(
        self,
        A: Tensor,
        transa: bool,
        B: Tensor | None,
        transb: bool,
        D: Tensor | None,
        bias: Tensor | None = None,
        pre_gelu_out: Tensor | None = None,
        workspace: Tensor | None = None,
        grad: bool = False,
        accumulate: bool = False,
        use_split_accumulator: bool = False,
        rs_output: Tensor | None = None,
        *,
        scaling_mode: int = 0,
        A_scale_inv: Tensor | None = None,
        B_scale_inv: Tensor | None = None,
        A_columnwise_data: Tensor | None = None,
        A_columnwise_scale_inv: Tensor | None = None,
        B_columnwise_data: Tensor | None = None,
        B_columnwise_scale_inv: Tensor | None = None,
        A_scales_swizzled: bool = False,
        B_scales_swizzled: bool = False,
        D_scale: Tensor | None = None,
        D_amax: Tensor | None = None,
        comm_type: CommOverlapType = ...,
    ) -> None: ...
    def split_overlap_ag(
        self,
        A: Tensor,
        transa: bool,
        B: Tensor | None,
        transb: bool,
        D: Tensor | None,
        bias: Tensor | None = None,
        pre_gelu_out: Tensor | None = None,
        workspace: Tensor | None = None,
        grad: bool = False,
        accumulate: bool = False,
        use_split_accumulator: bool = False,
        B_copy: Tensor | None = None,
        *,
        scaling_mode: int = 0,
        A_scale_inv: Tensor | None = None,
        B_scale_inv: Tensor | None = None,
        A_columnwise_data: Tensor | None = None,
        A_columnwise_scale_inv: Tensor | None = None,
        B_columnwise_data: Tensor | None = None,
        B_columnwise_scale_inv: Tensor | None = None,
        A_scales_swizzled: bool = False,
        B_scales_swizzled: bool = False,
        D_scale: Tensor | None = None,
        D_amax: Tensor | None = None,
        comm_type: CommOverlapType = ...,
    ) -> None: ...
    atomic_gemm_overlap_ag = split_overlap_ag
    # These take what bulk_overlap takes.
    split_overlap_rs = bulk_overlap
    atomic_gemm_overlap_rs = bulk_overlap

class CommOverlapBase(CommOverlapCore):
    @overload
    def __init__(self, comm: TorchComm, config: CommOverlapConfig) -> None: ...
    @overload
    def __init__(self, group: OverlapGroup, config: CommOverlapConfig) -> None: ...

class CommOverlapP2PBase(CommOverlapCore):
    @overload
    def __init__(self, comm: TorchComm, config: CommOverlapConfig) -> None: ...
    @overload
    def __init__(self, group: OverlapGroup, config: CommOverlapConfig) -> None: ...

def _create_comm_overlap_buffer(comm: TorchComm, config: CommOverlapConfig) -> int: ...
def _destroy_comm_overlap_buffer(id: int) -> None: ...
def _destroy_all_comm_overlap_buffers() -> None: ...
def _find_comm_overlap_buffer(id: int) -> CommOverlapCore: ...
def _comm_overlap_buffers() -> dict[int, tuple[str, CommOverlapConfig, int]]: ...
def _explain(call: Callable[[], Any]) -> tuple[str, str, str]: ...
def _algorithms() -> list[str]: ...
def _tuning_key(
    op: str, m: int, n: int, k: int, dtype: torch.dtype, group_size: int, device: str, in_graph: bool
) -> str: ...
def _set_tuning(source: str, entries: dict[str, str]) -> None: ...
def _set_interleaving(seed: int) -> None: ...

class MeshComms:
    _specs: dict[Any, Any]
    _recipes: dict[Any, Any]
    _parts: dict[Any, MeshComms]
    constant_name: str
    mesh: Final[Mesh]
    name: Final[str]
    cost: Final[CostModel]
    comm: Final[TorchComm]
    rank: Final[int]
    index: Final[int]
    def coordinate(self, axis: str | AxisRef) -> int: ...
    def group_comm(self, axes: str | Iterable[str]) -> TorchComm | None: ...
    def prepare(self, *sets: str | Iterable[str]) -> None: ...
    def plan(self, from_layout: Layout, to_layout: Layout, shape: Sequence[int], element_size: int) -> Plan: ...
    def _add_part(self, part: MeshComms) -> None: ...
    def close(self) -> None: ...

def _connect(mesh: Mesh, comm: TorchComm, name: str, cost: CostModel, sets: Iterable[str] | None) -> MeshComms: ...

class _PretendUnreachable: ...
