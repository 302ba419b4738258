from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily


class InductorPass(CustomGraphPass):
    def uuid(self) -> str:
        return self.hash_source(self)

    @staticmethod
    def hash_source(*srcs: str | Any) -> str:
        sources = [src if isinstance(src, str | type | FunctionType) else type(src) for src in srcs]
        texts = [src if isinstance(src, str) else inspect.getsource(src) for src in sources]
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        return True


def enable_fake_mode(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch._guards.tracing(None), unset_fake_temporarily(), FakeTensorMode():
            return fn(*args, **kwargs)

    return wrapped
