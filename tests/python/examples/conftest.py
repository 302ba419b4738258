import importlib
from collections.abc import Callable
from types import ModuleType

import pytest
from launcher import EXAMPLES


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of examples/gpt by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: importlib.import_module(f"gpt.{name}")
