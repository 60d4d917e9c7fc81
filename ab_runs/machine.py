"""What machine a sample ran on: whatever is readable without loading a device library in this process."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

# Tools of the device vendors: name -> arguments. Their text is kept as it is; none of them is needed.
_DEVICE_TOOLS = {
    "nvidia-smi": [
        "--query-gpu=index,name,uuid,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,"
        "memory.used,utilization.gpu",
        "--format=csv",
    ],
    "npu-smi": ["info"],
    "hy-smi": [],
    "rocm-smi": [],
}


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _run(command: list[str], timeout: float = 20) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu() -> dict[str, Any]:
    """Model, cores, governor and limits of the CPU. Vendors' boards differ in these by integer factors of speed."""
    info = _read("/proc/cpuinfo") or ""
    names = [
        line.partition(":")[2].strip() for line in info.splitlines() if line.startswith(("model name", "Hardware"))
    ]
    return {
        "model": names[0] if names else platform.processor() or None,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "quota": _read("/sys/fs/cgroup/cpu.max"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "memory_kib": next((int(x.split()[1]) for x in (_read("/proc/meminfo") or "").splitlines()), None),
    }


def state() -> dict[str, Any]:
    """What changes while a run goes on: load, clocks, temperatures."""
    zones = {
        (zone / "type").read_text().strip(): int((zone / "temp").read_text()) / 1000
        for zone in Path("/sys/class/thermal").glob("thermal_zone*")
        if _read(str(zone / "type")) and (_read(str(zone / "temp")) or "").lstrip("-").isdigit()
    }
    found: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load": os.getloadavg(),
        "cpu_khz": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"),
        "temperatures": zones,
        "devices": {},
    }
    for tool, arguments in _DEVICE_TOOLS.items():
        if shutil.which(tool):
            found["devices"][tool] = _run([tool, *arguments])
    return found


# Run in the interpreter of the server, which may be another one than ours.
_LIBRARIES = """
import importlib.metadata as m, json, platform, sys
print(json.dumps({"python": platform.python_version(),
                  "libraries": {d.metadata["Name"]: d.version for d in m.distributions() if d.metadata["Name"]}}))
"""


def libraries(python: str) -> dict[str, Any]:
    """Python and every installed distribution of an interpreter."""
    said = _run([python, "-c", _LIBRARIES], timeout=120)
    try:
        return json.loads(said or "")
    except ValueError:
        return {"python": None, "libraries": {}}


def record(python: str) -> dict[str, Any]:
    """The machine of a run. It holds no host name and no path."""
    return {"cpu": cpu(), "system": f"{platform.system()} {platform.release()}", **libraries(python), "state": state()}
