"""Runs pieces of a release's own source on made-up configurations, so that our reading of them can be held against them.

The functions are taken out of the files by name and compiled as they stand; only what they import is stood in for.
"""

from __future__ import annotations

import ast
import enum
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from tests.support import CACHE

RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")


def root(release: str) -> Path:
    return CACHE / "src" / f"vllm-{release}" / "vllm"


@cache
def tree(release: str, file: str) -> ast.Module:
    return ast.parse((root(release) / file).read_text())


class CompilationMode(enum.IntEnum):
    NONE, STOCK_TORCH_COMPILE, DYNAMO_TRACE_ONCE, VLLM_COMPILE = range(4)


class CUDAGraphMode(enum.Enum):
    NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE = range(5)


class _Log:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def names(**more: Any) -> dict[str, Any]:
    return {
        "logger": _Log(), "CompilationMode": CompilationMode, "CUDAGraphMode": CUDAGraphMode, "get_args": get_args,
        "lru_cache": lru_cache, "cast": lambda kind, value: value, "GiB_bytes": 1 << 30, **more,
    }  # fmt: skip


def methods(release: str, file: str, owner: str, wanted: tuple[str, ...], scope: dict[str, Any]) -> type:
    """A class with the methods ``wanted`` of ``owner``, properties included, as the release wrote them."""
    source = next(n for n in tree(release, file).body if isinstance(n, ast.ClassDef) and n.name == owner)
    body = [n for n in source.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    assert body, f"{owner} of {release} has none of {wanted}"
    for function in body:
        kept = ("property", "classmethod", "staticmethod")
        function.decorator_list = [d for d in function.decorator_list if ast.unparse(d) in kept]
        for node in ast.walk(function):  # annotations name what is not imported here
            if isinstance(node, ast.arg):
                node.annotation = None
        function.returns = None
        for at, node in enumerate(function.body):
            if isinstance(node, ast.AnnAssign):
                function.body[at] = ast.copy_location(ast.Assign([node.target], node.value), node) if node.value else ast.Pass()
    made = ast.Module([ast.ClassDef("Made", [], [], body, [], **({"type_params": []}))], [])
    ast.fix_missing_locations(made)
    exec(compile(made, f"{release}/{file}", "exec"), scope)
    return scope["Made"]


def top_level(release: str, file: str, wanted: tuple[str, ...], scope: dict[str, Any]) -> None:
    """Run the top-level assignments and functions ``wanted`` of a file in ``scope``."""
    for node in tree(release, file).body:
        targets = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        if getattr(node, "name", None) in wanted or any(name in wanted for name in targets):
            exec(compile(ast.Module([node], []), f"{release}/{file}", "exec"), scope)


def everything_else(**known: Any) -> SimpleNamespace:
    """A namespace that has what was set, and nothing more: reading another attribute is an error that the test shows."""
    return SimpleNamespace(**known)
