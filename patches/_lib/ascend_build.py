"""What files of an Ascend image say about it, read without importing anything of it.

A plan made for another machine from a facts file finds nothing here: its folders are not on this one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUPER_KERNEL = "super_kernel_optimize"


def folder(facts: Any, package: str) -> Path | None:
    """The folder of an installed top-level package of the build in ``facts``; None where it is not here."""
    root = facts.build.root
    if root is None or not Path(root).is_dir():
        return None
    beside = Path(root).parent / package
    if beside.is_dir():
        return beside
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def compiler_knows(facts: Any, option: str) -> bool:
    """Whether the installed npugraph_ex has a compiler option of that name: named in its configuration's source."""
    for base, inner in (("npugraph_ex", "configs"), ("torch_npu", "dynamo/npugraph_ex/configs")):
        place = folder(facts, base)
        for file in sorted((place / inner).glob("*.py")) if place else ():
            if option in file.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def operator_schemas(facts: Any, name: str) -> Iterator[str]:
    """Every schema string of the custom operator ``name`` in vllm-ascend's extension."""
    place = folder(facts, "vllm_ascend")
    for file in sorted(place.glob("vllm_ascend_C*.so")) if place else ():
        content = file.read_bytes()
        start = content.find(f"{name}(".encode())
        while start >= 0:
            end = content.find(b"\0", start)
            yield content[start:end].decode(errors="replace")
            start = content.find(f"{name}(".encode(), end)


def kernel_built_for(facts: Any, name: str, soc: str) -> bool:
    """Whether vllm-ascend's operator package holds a compiled kernel ``name`` for the chip ``soc``."""
    place = folder(facts, "vllm_ascend")
    if place is None:
        return False
    return any(place.glob(f"_cann_ops_custom/vendors/*/op_impl/ai_core/tbe/kernel/config/{soc}/{name}*.json"))
