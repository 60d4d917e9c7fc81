"""Huawei Ascend NPUs, through the PCI devices that the kernel lists and, for the exact name, npu-smi.

Names in use: ``Ascend910B4-1``, ``Ascend910_9362`` (sold as 910C, the A3 generation), ``910B2C``, ``Ascend310P3``, and a
bare ``Ascend910``, which the tools print for the first 910 and for the A3 alike. Live hardware decides; SOC_VERSION is a
variable of the build, set in an image long ago, and only worth a remark.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from overlay.detect.visible import ranges
from overlay.facts import Hardware

HUAWEI = "0x19e5"
PCI = {
    "0xd100": "ascend310",
    "0xd500": "ascend310p",
    "0xd801": "ascend910",
    "0xd802": "ascend910b",
    "0xd803": "ascend910_93",
}
NPU_SMI_SECONDS = 3


def arch_of(name: str) -> str | None:
    """The architecture that a chip's name stands for; None where the name leaves it open (a bare ``Ascend910``)."""
    text = re.sub(r"^ascend", "", name.strip().lower().replace(" ", "")).lstrip("-_")
    if re.fullmatch(r"910_?93\d*|910_93.*|910c.*|93\d\d", text):
        return "ascend910_93"
    if text.startswith("910b"):
        return "ascend910b"
    if re.match(r"910(a|pro|prem)", text):
        return "ascend910"
    if text.startswith("950") or text.startswith("910_95"):
        return "ascend950"
    if text.startswith("310p"):
        return "ascend310p"
    if text.startswith("310"):
        return "ascend310"
    return None


def _nodes(root: Path) -> list[int]:
    found = [re.fullmatch(r"davinci(\d+)", path.name) for path in (root / "dev").glob("davinci*")]
    return sorted(int(match[1]) for match in found if match)


def find(root: Path, environ: Mapping[str, str]) -> tuple[Hardware, dict[str, str]]:
    """The NPUs that a process under ``environ`` may see."""
    unknown: dict[str, str] = {}
    notes: list[str] = []
    by_pci = _pci(root)
    source = "PCI devices" if by_pci else "device nodes"
    name = None
    arch = by_pci[0] if len(by_pci) == 1 else None
    if arch is None and root == Path("/"):
        name, reason = _npu_smi()
        if name:
            source, arch = "npu-smi", arch_of(name)
        else:
            unknown["hardware.name"] = reason
    if arch is None:
        found = f"the name {name!r} leaves open which chip it is" if name else f"PCI lists {by_pci or 'no known NPU'}"
        unknown["hardware.arch"] = found
    nodes = _nodes(root)
    count: int | None = len(nodes) or None
    visible = environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is not None:
        source += ", ASCEND_RT_VISIBLE_DEVICES"
        try:
            wanted = ranges(visible)
            count = len([at for at in wanted if not nodes or at < len(nodes)])
        except ValueError:
            unknown["hardware.count"] = f"ASCEND_RT_VISIBLE_DEVICES={visible!r} is no list of numbers"
            count = None
    soc = environ.get("SOC_VERSION")
    if soc and arch and arch_of(soc) not in (None, arch):
        notes.append(f"SOC_VERSION={soc} is stale: the hardware is {arch} ({source})")
    if count is None and "hardware.count" not in unknown:
        unknown["hardware.count"] = "no /dev/davinci device is passed in"
    return Hardware(platform="ascend", arch=arch, name=name, count=count, source=source, notes=tuple(notes)), unknown


def _pci(root: Path) -> list[str]:
    """The kinds of NPU among the PCI devices."""
    kinds = set()
    for folder in (root / "sys/bus/pci/devices").glob("*"):
        try:
            if (folder / "vendor").read_text().strip().lower() == HUAWEI:
                kinds.add(PCI.get((folder / "device").read_text().strip().lower()))
        except OSError:
            continue
    return sorted(kind for kind in kinds if kind)


def _npu_smi() -> tuple[str | None, str]:
    program = shutil.which("npu-smi") or shutil.which("npu-smi", path="/usr/local/bin:/usr/local/sbin")
    if program is None:
        return None, "npu-smi is not installed"
    try:
        done = subprocess.run(
            [program, "info"], capture_output=True, text=True, timeout=NPU_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"npu-smi failed: {error}"
    name = parse_npu_smi(done.stdout)
    return name, "" if name else f"npu-smi info lists no chip (exit code {done.returncode})"


def parse_npu_smi(text: str) -> str | None:
    """The first chip's name in the table of ``npu-smi info``."""
    found = re.search(r"^\|\s*\d+\s+(?:\d+\s+)?((?:Ascend)?\d{3}\S*)\s*\|", text, re.MULTILINE | re.IGNORECASE)
    return found[1] if found else None
