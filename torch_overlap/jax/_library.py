"""Loads libtorch_overlap_jax.so through ctypes, and registers its handlers with XLA. Nothing here imports torch."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import re
import runpy
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jaxlib

PACKAGE = Path(__file__).resolve().parent.parent
LIBRARY = PACKAGE / "libtorch_overlap_jax.so"
HANDLERS = (
    "GemmHandler",
    "AllReduceHandler",
    "AllGatherHandler",
    "ReduceScatterHandler",
    "AllToAllHandler",
    "BroadcastHandler",
    "PermuteHandler",
    "AllGatherMatmulHandler",
    "MatmulReduceScatterHandler",
    "MatmulAllReduceHandler",
)
_registered: list[bool] = []  # once the handlers are: may XLA capture them in command buffers, which are CUDA graphs?
# By ErrorKind of csrc/torch_overlap/base/errors.h.
_ERROR_CLASSES = (RuntimeError, ValueError, TypeError, TimeoutError, NotImplementedError, RuntimeError, RuntimeError)


def target_name(handler: str) -> str:
    """Returns the name under which XLA knows a handler."""
    return f"torch_overlap.{handler}"


def call(function: str, *arguments: Any) -> int:
    """Calls a function of the library. Raises its error."""
    loaded = library()
    result = int(getattr(loaded, f"torch_overlap_jax_{function}")(*arguments))
    if result < 0:
        kind = int(loaded.torch_overlap_jax_error_kind())
        raise _ERROR_CLASSES[kind](loaded.torch_overlap_jax_error().decode())
    return result


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library. The first call loads it.

    Raises:
        ImportError: it is not built, or was built for another torch or for another version of XLA's FFI.
    """
    if not LIBRARY.exists():
        raise ImportError(
            f"torch_overlap.jax: expected {LIBRARY}, got a build without the JAX front end; install jax "
            "(pip install 'torch_overlap[jax]'), then build torch_overlap again in this environment"
        )
    _check_torch()
    _load_torch()
    loaded = ctypes.CDLL(str(LIBRARY))
    _declare(loaded)
    check_ffi_version(loaded.torch_overlap_jax_ffi_version(), running_ffi_version(), jaxlib.__version__)
    atexit.register(_end)
    return loaded


def _end() -> None:
    """Ends the axes at exit, after the programs that use them."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a program whose results nobody read
        jax.effects_barrier()
    library().torch_overlap_jax_exit()


def check_ffi_version(built: int, running: int | None, jaxlib_version: str) -> None:
    """Raises ImportError unless jaxlib accepts handlers that were compiled for version `built` of XLA's FFI.

    Versions are 1000 * major + minor. XLA accepts its own major version, and minor versions up to its own.
    """
    if running is None or (built // 1000 == running // 1000 and built <= running):
        return
    raise ImportError(
        f"torch_overlap.jax: expected a jaxlib with XLA FFI {_text(built)}, for which it was built, got "
        f"{_text(running)} in jaxlib {jaxlib_version}; build torch_overlap again in this environment"
    )


def running_ffi_version() -> int | None:
    """Returns the version of XLA's FFI in the headers of the installed jaxlib; None if they are not there."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.is_file():
        return None
    text = header.read_text(errors="replace")
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if found[0] is None or found[1] is None:
        return None
    return 1000 * int(found[0][1]) + int(found[1][1])


@functools.cache
def _build_info() -> dict[str, Any]:
    return runpy.run_path(str(PACKAGE / "_build_info.py"))


def _check_torch() -> None:
    built = str(_build_info()["TORCH_VERSION"]).partition("+")[0]
    try:
        installed = metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"torch_overlap.jax: expected the libraries of torch {built}, got no torch; pip install torch=={built}"
        ) from None
    if built != installed:
        raise ImportError(
            f"torch_overlap.jax: expected torch {built}, for which it was built, got torch {installed}; "
            f"build torch_overlap again in this environment, or pip install torch=={built}"
        )


def _load_torch() -> None:
    """Loads torch's libraries as its own wheel's, for a process without `import torch`."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent / "lib"
    names = ["libc10.so", "libtorch_cpu.so"]
    if _build_info().get("CUDA_VERSION"):
        names += ["libc10_cuda.so", "libtorch_cuda.so"]
    for name in names:
        ctypes.CDLL(str(folder / name))


def _declare(loaded: ctypes.CDLL) -> None:
    text, number, wide = ctypes.c_char_p, ctypes.c_int, ctypes.c_int64
    numbers = ctypes.POINTER(ctypes.c_int32)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "error": (text, []),
        "error_kind": (number, []),
        "ffi_version": (number, []),
        "tcp_store": (wide, [text, number, wide]),
        "file_store": (wide, [text, number, wide]),
        "store_port": (wide, [wide]),
        "add_axis": (wide, [text, text, number, number, number, numbers, numbers, numbers, wide, wide]),
        "remove_axis": (wide, [wide]),
        "exit": (None, []),
        "create_buffer": (wide, [wide] * 5 + [number] * 14),
        "destroy_buffer": (wide, [wide]),
        "destroy_all_buffers": (wide, []),
        "instance_id": (ctypes.c_void_p, []),
        "instance_info": (ctypes.c_void_p, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, f"torch_overlap_jax_{name}")
        function.restype = result
        function.argtypes = arguments


def register_handlers(command_buffers: bool | None = None) -> None:
    """Registers the handlers with XLA, once; for code that traces or compiles a program.

    Raises:
        ValueError: they are registered with another value.
    """
    if not _registered:
        _register(bool(command_buffers))
        _registered.append(bool(command_buffers))
    if command_buffers not in (None, _registered[0]):
        raise ValueError(
            f"bootstrap: expected command_buffers={_registered[0]}, as in the first call of this process, got "
            f"{command_buffers}. XLA keeps the handlers that it has."
        )


def _register(command_buffers: bool) -> None:
    """Registers the handlers.

    Initializes jax's backends first: they register what came before them in an order that puts handlers before the
    types of their states, which XLA rejects.
    """
    loaded = library()
    jax.local_devices()
    platforms = ("cpu", "CUDA") if _build_info().get("CUDA_VERSION") else ("cpu",)
    capsule = jax.ffi.pycapsule
    instance: Any = {
        "type_id": capsule(loaded.torch_overlap_jax_instance_id()),
        "type_info": capsule(loaded.torch_overlap_jax_instance_info()),
    }
    try:
        for platform in platforms:
            jax.ffi.register_ffi_type("torch_overlap.Instance", instance, platform=platform)
            for handler in HANDLERS:
                symbols = {"instantiate": "InstantiateHandler", "execute": handler}
                if platform == "CUDA" and command_buffers:
                    symbols |= _captured_symbols(handler)
                stages = {stage: capsule(_address(getattr(loaded, symbol))) for stage, symbol in symbols.items()}
                jax.ffi.register_ffi_target(target_name(handler), stages, platform=platform)
    except Exception as error:
        version = running_ffi_version()
        raise ImportError(
            f"torch_overlap.jax: expected jaxlib {jaxlib.__version__} (XLA FFI {_text(version)}) to accept handlers "
            f"for XLA FFI {_text(loaded.torch_overlap_jax_ffi_version())}, got: {error}; "
            "build torch_overlap again in this environment"
        ) from error


def _captured_symbols(handler: str) -> dict[str, str]:
    """Returns the functions of a handler that XLA may capture. Products make their memory before."""
    if handler == "GemmHandler":
        return {}
    name = handler.removesuffix("Handler")
    return {"execute": f"{name}CapturedHandler"} | ({"initialize": f"{name}Initializer"} if "Matmul" in name else {})


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _text(version: int | None) -> str:
    return "unknown" if version is None else f"{version // 1000}.{version % 1000}"
