"""Modules made in memory, and names that exist but refuse to be called."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable


def make_module(name: str, **content: object) -> types.ModuleType:
    """A package of that name in ``sys.modules`` with the given attributes."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module
    return module


class Missing:
    """Something without a CPU meaning: importing it works, calling it raises."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(f"the CPU testbed has no {self.__name__}")

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


def missing_getattr(owner: str) -> Callable[[str], Missing]:
    """A module ``__getattr__`` that hands out ``Missing`` for every public name."""

    def lookup(name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{owner}.{name}")

    return lookup
