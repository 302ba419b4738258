"""Types of the compiled module. The docstrings are in the module itself: help(torch_overlap.TorchComm)."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import timedelta
from enum import Enum, IntEnum
from types import ModuleType, TracebackType
from typing import Any, ClassVar, TypedDict, overload

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, Store

from torch_overlap.hooks import PostHookArgs, PreHookArgs
from torch_overlap.mesh._core import AxisRef, CostModel, Layout, Mesh, Plan

class Error(RuntimeError): ...
class InvalidValueError(Error, ValueError): ...
class InvalidTypeError(Error, TypeError): ...
class OperationTimeoutError(Error, TimeoutError): ...
class UnsupportedError(Error, NotImplementedError): ...
class StateError(Error): ...

build_config: dict[str, str]
_mesh: ModuleType  # torch_overlap/mesh/_core.pyi

class _Env(TypedDict):
    abort_on_error: bool
    timeout: timedelta
    rank: int | None
    size: int | None
    local_rank: int | None
    launcher: str
    master_addr: str | None
    master_port: int
    serialization: str
    tune_cache: str | None

def _read_env() -> _Env: ...
def _streams_made() -> int: ...

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
    @property
    def type(self) -> RedOpType: ...
    @property
    def factor(self) -> float | Tensor | None: ...
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

class SendOptions(_OpOptions): ...
class RecvOptions(_OpOptions): ...
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
    def wait(self, timeout: timedelta | None = None) -> None: ...
    def wait_blocking(self, timeout: timedelta | None = None) -> None: ...
    def is_completed(self) -> bool: ...
    @property
    def stream(self) -> torch.Stream | None: ...
    def status(self) -> WorkStatus: ...
    def exception(self) -> BaseException | None: ...
    def _on_completion(self, callback: Callable[[BaseException | None], object]) -> None: ...

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
    def __init__(self, type: P2POpType, tensor: Tensor, peer: int) -> None: ...
    @property
    def type(self) -> P2POpType: ...
    @property
    def tensor(self) -> Tensor: ...
    @property
    def peer(self) -> int: ...

class BatchSendRecv:
    def send(self, tensor: Tensor, dst: int) -> None: ...
    def recv(self, tensor: Tensor, src: int) -> None: ...
    def issue(
        self,
        async_op: bool,
        options: BatchP2POptions | None = None,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork: ...
    @property
    def ops(self) -> list[P2POp]: ...

class TorchCommWinAccessType(Enum):
    WIN_ACCESS_TYPE_UNIFIED = 0
    WIN_ACCESS_TYPE_SEPARATE = 1

class TorchCommWindowAttr:
    @property
    def access_type(self) -> TorchCommWinAccessType: ...

class TorchCommWindow:
    def tensor_register(self, tensor: Tensor, owning: bool = True) -> None: ...
    def tensor_deregister(self) -> None: ...
    def put(
        self,
        tensor: Tensor,
        dst_rank: int | None = None,
        offset: int | None = None,
        async_op: bool = False,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        *,
        peer_rank: int | None = None,
        target_offset_nelems: int | None = None,
        signal: bool = False,
    ) -> TorchWork: ...
    def signal(
        self,
        dst_rank: int | None = None,
        async_op: bool = False,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        *,
        peer_rank: int | None = None,
    ) -> TorchWork: ...
    def wait_signal(
        self,
        peer_rank: int,
        async_op: bool = False,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork: ...
    def map_remote_tensor(self, rank: int) -> Tensor: ...
    def get_attr(self, peer_rank: int) -> TorchCommWindowAttr: ...
    def get_size(self) -> int: ...
    def get_tensor(self) -> Tensor: ...
    def get_name(self) -> str: ...
    def get_comm(self) -> TorchComm: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def device(self) -> torch.device: ...
    def __hash__(self) -> int: ...
    def __copy__(self) -> TorchCommWindow: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> TorchCommWindow: ...

class RemovableHandle:
    def remove(self) -> None: ...

class TorchComm:
    def get_rank(self) -> int: ...
    def get_size(self) -> int: ...
    def get_name(self) -> str: ...
    def get_device(self) -> torch.device: ...
    def get_backend(self) -> str: ...
    def get_backend_version(self) -> str: ...
    def get_options(self) -> CommOptions: ...
    def get_ranks_in_world(self) -> list[int]: ...
    def get_native_handle(self) -> int: ...
    def split(
        self,
        ranks: Sequence[int],
        name: str | None = None,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
    ) -> TorchComm | None: ...
    def finalize(self) -> None: ...
    def abort(self) -> None: ...
    def is_aborted(self) -> bool: ...
    def is_abort_supported(self) -> bool: ...
    def is_finalized(self) -> bool: ...
    def get_init_handle(self) -> str: ...
    def get_generation(self) -> int: ...
    def reconfigure(
        self,
        uuid: int,
        init_handles: list[str] | tuple[str, ...] | Set[str],
        timeout: timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> TorchWork: ...
    def set_timeout(self, timeout: timedelta) -> None: ...
    def set_hints(self, hints: Mapping[str, str]) -> None: ...
    def batch_op_create(self) -> BatchSendRecv: ...
    def new_window(self, tensor: Tensor | None = None) -> TorchCommWindow: ...
    def get_mem_allocator(self) -> Any: ...
    @property
    def mem_allocator(self) -> Any: ...
    def tensor_register(self, tensor: Tensor) -> None: ...
    def tensor_deregister(self, tensor: Tensor) -> None: ...
    def register_pre_hook(self, callback: Callable[[OpName, int, PreHookArgs], object]) -> RemovableHandle: ...
    def register_post_hook(self, callback: Callable[[int, PostHookArgs], object]) -> RemovableHandle: ...
    def register_abort_hook(self, callback: Callable[[], object]) -> RemovableHandle: ...
    def __copy__(self) -> TorchComm: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> TorchComm: ...
    def __enter__(self) -> TorchComm: ...
    def __exit__(
        self, type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def send(
        self,
        tensor: Tensor,
        dst: int,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: SendOptions | None = None,
    ) -> TorchWork: ...
    def recv(
        self,
        tensor: Tensor,
        src: int,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: RecvOptions | None = None,
    ) -> TorchWork: ...
    def broadcast(
        self,
        tensor: Tensor,
        root: int,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: BroadcastOptions | None = None,
    ) -> TorchWork: ...
    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: AllReduceOptions | None = None,
    ) -> TorchWork: ...
    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: ReduceOp,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: ReduceOptions | None = None,
    ) -> TorchWork: ...
    def barrier(
        self,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: BarrierOptions | None = None,
    ) -> TorchWork: ...
    def all_gather(
        self,
        tensor_list: Sequence[Tensor],
        tensor: Tensor,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: AllGatherOptions | None = None,
    ) -> TorchWork: ...
    def all_gather_v(
        self,
        tensor_list: Sequence[Tensor],
        tensor: Tensor,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: AllGatherOptions | None = None,
    ) -> TorchWork: ...
    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: AllGatherSingleOptions | None = None,
    ) -> TorchWork: ...
    def gather(
        self,
        output_tensor_list: Sequence[Tensor] | None,
        input_tensor: Tensor,
        root: int,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: GatherOptions | None = None,
    ) -> TorchWork: ...
    def gather_single(
        self,
        output: Tensor | None,
        input: Tensor,
        root: int,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: GatherSingleOptions | None = None,
    ) -> TorchWork: ...
    def reduce_scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: ReduceOp,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: ReduceScatterOptions | None = None,
    ) -> TorchWork: ...
    def reduce_scatter_v(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: ReduceOp,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: ReduceScatterOptions | None = None,
    ) -> TorchWork: ...
    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: ReduceScatterSingleOptions | None = None,
    ) -> TorchWork: ...
    def scatter(
        self,
        output_tensor: Tensor,
        input_tensor_list: Sequence[Tensor] | None,
        root: int,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: ScatterOptions | None = None,
    ) -> TorchWork: ...
    def all_to_all(
        self,
        output_tensor_list: Sequence[Tensor],
        input_tensor_list: Sequence[Tensor],
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: AllToAllOptions | None = None,
    ) -> TorchWork: ...
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: AllToAllSingleOptions | None = None,
    ) -> TorchWork: ...
    def all_to_all_v_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        options: AllToAllvSingleOptions | None = None,
    ) -> TorchWork: ...

class _FlightRecorder:
    def __init__(self, capacity: int) -> None: ...
    @staticmethod
    def of_process() -> _FlightRecorder: ...
    @property
    def capacity(self) -> int: ...
    def size(self) -> int: ...
    def reset(self) -> None: ...
    def attach(self, comm: TorchComm) -> RemovableHandle: ...
    def json(self, include_completed: bool) -> str: ...
    def dump_rank(self, rank: int, include_completed: bool) -> str: ...

class _CallLog:
    def __init__(self, path: str, events: Sequence[str], verbose: Sequence[str]) -> None: ...
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
def get_comm(name: str) -> TorchComm: ...
def comm_names() -> list[str]: ...
def get_window(name: str) -> TorchCommWindow: ...
def window_names() -> list[str]: ...
def _symmetric_empty(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor: ...
def built_backends() -> list[str]: ...
def _register_backend(name: str, backend_class: type) -> None: ...

class BackendOptions(Backend.Options):
    backends: dict[str, str]
    hints: dict[str, str]
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
    def get_comm(self, device: torch.device | None = None) -> TorchComm: ...
    @property
    def options(self) -> BackendOptions: ...
    @property
    def _store(self) -> Store | None: ...
    def split(self, store: Store, ranks: Sequence[int], options: BackendOptions) -> _BackendWrapper | None: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...

def _set_gloo_factory(factory: Callable[[Any, int, int, timedelta, str | None, str | None], Any]) -> None: ...

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
    @property
    def config(self) -> CommOverlapConfig: ...
    def get_tp_size(self) -> int: ...
    def is_atomic_gemm(self) -> bool: ...
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
    def atomic_gemm_overlap_ag(
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
    def split_overlap_rs(
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
    def atomic_gemm_overlap_rs(
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
def _explain_algorithm(
    op: str,
    algorithm: str,
    comm: TorchComm,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    chunk_rows: int,
    gather_bytes: int = 0,
    scatter_bytes: int = 0,
    local_shape: tuple[int, int, int] = (0, 0, 0),
    prefers_channels: bool = True,
    scaled: tuple[torch.dtype, torch.dtype, int, bool] | None = None,
    direct_bytes: int | None = None,
    reduces: bool = False,
) -> tuple[str, str, str]: ...
def _summed_product_problem(
    op: str,
    comm: TorchComm,
    rows: int,
    features: int,
    local_k: int,
    dtype: torch.dtype,
    scaling_mode: int | None = None,
) -> dict[str, Any]: ...

_ROW_PIECES: int

def _column_exchange_bytes(bytes: Sequence[int]) -> int: ...
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
    traced_name: str
    @property
    def mesh(self) -> Mesh: ...
    @property
    def name(self) -> str: ...
    @property
    def cost(self) -> CostModel: ...
    @property
    def comm(self) -> TorchComm: ...
    @property
    def rank(self) -> int: ...
    @property
    def index(self) -> int: ...
    def coordinate(self, axis: str | AxisRef) -> int: ...
    def group_comm(self, axes: str | Iterable[str]) -> TorchComm | None: ...
    def prepare(self, *sets: str | Iterable[str]) -> None: ...
    def plan(self, from_layout: Layout, to_layout: Layout, shape: Sequence[int], element_size: int) -> Plan: ...
    def close(self) -> None: ...

def _connect(mesh: Mesh, comm: TorchComm, name: str, cost: CostModel, sets: Iterable[str] | None) -> MeshComms: ...

class _PretendUnreachable: ...
