"""The CPU: its name, its widest instruction set and the machine's memory, from /proc."""

from __future__ import annotations

import os
import re
from pathlib import Path

from overlay.facts import Hardware

# The widest first: what vLLM's CPU kernels are built for.
_X86 = (("amx", "amx_tile"), ("avx512", "avx512f"), ("avx2", "avx2"), ("avx", "avx"), ("sse4", "sse4_2"))
_ARM = (("sve2", "sve2"), ("sve", "sve"), ("neon", "asimd"))
WORTH_NAMING = (
    *("amx_bf16", "amx_int8", "amx_tile", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "avx2"),
    *("bf16", "i8mm", "sve", "sve2", "asimd"),
)


def find(root: Path) -> tuple[Hardware, dict[str, str]]:
    unknown: dict[str, str] = {}
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        unknown["hardware.arch"] = unknown["hardware.name"] = f"/proc/cpuinfo: {error}"
        return Hardware(platform="cpu", count=1, memory=_memory(root), source="no /proc/cpuinfo"), unknown

    def field(*names: str) -> str:
        found = re.search(rf"^(?:{'|'.join(names)})\s*:\s*(.*)$", text, re.MULTILINE)
        return found[1].strip() if found else ""

    flags = set(field("flags", "Features", "isa").split())
    arch = next((name for name, flag in (*_X86, *_ARM) if flag in flags), None)
    if arch is None:
        arch = os.uname().machine or None
    name = field("model name", "Model Name", "cpu model", "cpu", "uarch") or None
    if name is None:
        unknown["hardware.name"] = "/proc/cpuinfo has no model name"
    features = tuple(flag for flag in WORTH_NAMING if flag in flags)
    return Hardware("cpu", arch, name, 1, _memory(root), source="/proc/cpuinfo", features=features), unknown


def _memory(root: Path) -> int | None:
    try:
        found = re.search(r"^MemTotal:\s*(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
