"""AMD GPUs and Hygon DCUs, through the kernel's KFD topology, with rocminfo as the second source.

A DCU runs ROCm software and is no AMD hardware: it is told apart, by its PCI vendor and its own architecture numbers, before
any rule about gfx9 can match.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from overlay.detect.visible import chosen
from overlay.facts import Build, Hardware

HYGON_VENDOR = 0x1D94
# Architectures that only Hygon makes. (gfx906 is AMD's MI50 and Hygon's first DCU: the PCI vendor decides.)
DCU_ARCHS = ("gfx926", "gfx928", "gfx936", "gfx938")
ROCMINFO_SECONDS = 3


def gfx(name: str) -> tuple[str, tuple[str, ...]]:
    """``gfx90a:sramecc+:xnack-`` as (``gfx90a``, (``sramecc+``, ``xnack-``))."""
    base, *features = name.strip().split(":")
    return base, tuple(features)


def platform_of(arch: str | None, vendor: int | None = None, build: Build | None = None) -> str:
    """``dcu`` or ``rocm`` for a device of this architecture and PCI vendor."""
    if vendor == HYGON_VENDOR or arch in DCU_ARCHS:
        return "dcu"
    if vendor is None and build is not None and build.vendor == "hygon":
        return "dcu"
    return "rocm"


def find(root: Path, environ: Mapping[str, str], build: Build | None = None) -> tuple[Hardware, dict[str, str]]:
    """The devices that a process under ``environ`` may see. Where they differ, what differs is unknown."""
    devices, source, problem = _topology(root), "KFD topology", ""
    if not devices and root == Path("/"):
        devices, problem = _rocminfo()
        source = "rocminfo"
    if not devices:
        reason = problem or "no GPU in the KFD topology"
        return Hardware(platform=platform_of(None, None, build), source="device nodes"), {"hardware": reason}
    names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    seen = list(range(len(devices)))
    for group in (names[:1], names[1:]):  # HIP's variable counts among what ROCR's has left
        ids = [(str(at), devices[index].get("uuid", f"no uuid {index}")) for at, index in enumerate(seen)]
        picked, variable = chosen(environ, group, ids)
        seen = [seen[at] for at in picked]
        source += f", {variable}" if variable else ""
    unknown: dict[str, str] = {}
    if not seen:
        unknown["hardware.arch"] = f"{source} show no device"
        return Hardware(platform=platform_of(None, None, build), count=0, source=source), unknown
    kinds = [devices[at] for at in seen]
    known = {}
    for fact in ("arch", "name", "memory", "sms", "features"):
        values = {kind.get(fact) for kind in kinds}
        if len(values) > 1:
            unknown[f"hardware.{fact}"] = "the visible devices differ: " + ", ".join(sorted(map(str, values)))
        elif (value := values.pop()) is not None:
            known[fact] = value
    vendor = kinds[0].get("vendor")
    platform = platform_of(known.get("arch"), vendor, build)
    return Hardware(platform=platform, count=len(seen), driver=_driver(root), source=source, **known), unknown


def _topology(root: Path) -> list[dict]:
    """One table a GPU, from ``/sys/class/kfd/kfd/topology/nodes``; those whose render node is not passed in are left out."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    try:
        folders = sorted(nodes.iterdir(), key=lambda folder: int(folder.name) if folder.name.isdigit() else 1 << 30)
    except OSError:
        return []
    passed = {path.name for path in (root / "dev/dri").glob("renderD*")} if (root / "dev/dri").is_dir() else None
    devices = []
    for folder in folders:
        values = _properties(folder / "properties")
        target = values.get("gfx_target_version", 0)
        if not target or not values.get("simd_count"):
            continue
        if passed and f"renderD{values.get('drm_render_minor', -1)}" not in passed:
            continue
        per_cu = values.get("simd_per_cu", 0)
        device = {
            "arch": f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}",
            "vendor": values.get("vendor_id"),
            "sms": values["simd_count"] // per_cu if per_cu else None,
            "memory": _memory(folder) or None,
            "name": _product(root, values.get("drm_render_minor")),
        }
        if values.get("unique_id"):
            device["uuid"] = f"GPU-{values['unique_id']:016x}"
        devices.append(device)
    return devices


def _properties(file: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in file.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].lstrip("-").isdigit()}
    except (OSError, ValueError):
        return {}


def _memory(folder: Path) -> int:
    """Bytes of device memory: the node's memory banks (all of a discrete device's are its own)."""
    banks = (_properties(bank / "properties") for bank in folder.glob("mem_banks/*"))
    return max((bank.get("size_in_bytes", 0) for bank in banks), default=0)


def _product(root: Path, minor: int | None) -> str | None:
    if minor is None:
        return None
    try:
        return (root / f"sys/class/drm/renderD{minor}/device/product_name").read_text().strip() or None
    except OSError:
        return None


def _driver(root: Path) -> str | None:
    for module in ("amdgpu", "hycu", "hydcu"):
        try:
            return (root / f"sys/module/{module}/version").read_text().strip()
        except OSError:
            continue
    return None


def _rocminfo() -> tuple[list[dict], str]:
    program = shutil.which("rocminfo") or shutil.which("rocminfo", path="/opt/rocm/bin:/opt/dtk/bin")
    if program is None:
        return [], "no GPU in the KFD topology, and rocminfo is not installed"
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=ROCMINFO_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"rocminfo failed: {error}"
    devices = parse_rocminfo(done.stdout)
    return devices, "" if devices else f"rocminfo lists no GPU (exit code {done.returncode})"


def parse_rocminfo(text: str) -> list[dict]:
    """One table a GPU agent of rocminfo's output: arch, features, name, sms, vendor."""
    devices = []
    for part in re.split(r"^Agent \d+\s*$", text, flags=re.MULTILINE)[1:]:

        def field(name: str, part: str = part) -> str:
            found = re.search(rf"^\s*{name}:[ \t]*(.+?)\s*$", part, re.MULTILINE)
            return found[1] if found else ""

        if field("Device Type") != "GPU":
            continue
        target = re.search(r"Name:\s+\S*?--(gfx[0-9a-f]+(?::\S+)?)", part)
        arch, features = gfx(target[1] if target else field("Name"))
        units = field("Compute Unit")
        device = {"arch": arch, "name": field("Marketing Name") or None, "features": features or None}
        device["sms"] = int(units) if units.isdigit() else None
        if "HYGON" in field("Vendor Name").upper():
            device["vendor"] = HYGON_VENDOR
        if (uuid := field("Uuid")).startswith("GPU-"):
            device["uuid"] = uuid
        devices.append(device)
    return devices
