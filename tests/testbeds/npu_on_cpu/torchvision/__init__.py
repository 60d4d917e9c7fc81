"""Import-only stand-in: transformers names things from torchvision, whose wheels belong to another torch.

Any submodule and any public name exists; a class of it that is called raises.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Unusable:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the CPU testbed has no torchvision")

    def __class_getitem__(cls, item: Any) -> type:
        return cls


def _lookup(module: str) -> Callable[[str], Any]:
    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return InterpolationMode if name == "InterpolationMode" else type(name, (_Unusable,), {})

    return lookup


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        module.__path__ = []
        module.__getattr__ = _lookup(module.__name__)


sys.meta_path.insert(0, _Submodules())
__getattr__ = _lookup("torchvision")
