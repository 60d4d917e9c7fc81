"""NVIDIA GPUs through NVML, which needs the driver's library and makes no CUDA context."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlay.detect.visible import chosen
from overlay.facts import Hardware

# CUDA cores of one streaming multiprocessor by compute capability: NVML counts cores, not multiprocessors.
_CORES = {70: 64, 72: 64, 75: 64, 80: 64, 86: 128, 87: 128, 89: 128, 90: 128, 100: 128, 103: 128, 110: 128, 120: 128, 121: 128}


class NvmlError(Exception):
    pass


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Attributes(ctypes.Structure):
    """nvmlDeviceAttributes_t: of one MIG instance."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("multiprocessors", "copy", "decoders", "encoders", "jpeg", "ofa")),
        *((name, ctypes.c_uint) for name in ("gpu_slices", "compute_slices")),
        ("memory_mb", ctypes.c_ulonglong),
    ]


class _Nvml:
    """The few NVML calls that are needed. Each raises NvmlError with NVML's code."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self.library, name, None)
        if function is None:
            raise NvmlError(f"{name} is not in this driver's NVML")
        code = function(*arguments)
        if code != 0:
            raise NvmlError(f"{name} returned {code}")

    def number(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(value))
        return value.value

    def text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        self.call(name, *arguments, buffer, ctypes.c_uint(96))
        return buffer.value.decode(errors="replace")

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        value = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(value))
        return value


def find(root: Path, environ: Mapping[str, str], library: Any = None) -> tuple[Hardware, dict[str, str]]:
    """The GPUs that a process under ``environ`` may see. Where they differ, what differs is unknown."""
    try:
        if library is None:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        nvml = _Nvml(library)
    except (OSError, NvmlError) as error:
        return Hardware(platform="cuda", source="device nodes"), {"hardware": f"NVML cannot be used: {error}"}
    try:
        return _devices(nvml, environ)
    except NvmlError as error:
        return Hardware(platform="cuda", source="NVML"), {"hardware": f"NVML failed: {error}"}
    finally:
        try:
            nvml.call("nvmlShutdown")
        except NvmlError:
            pass


def _devices(nvml: _Nvml, environ: Mapping[str, str]) -> tuple[Hardware, dict[str, str]]:
    unknown: dict[str, str] = {}
    handles, ids = [], []
    for at in range(nvml.number("nvmlDeviceGetCount_v2")):
        handles.append(nvml.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(at)))
        ids.append((str(at), _or(None, nvml.text, "nvmlDeviceGetUUID", handles[-1]) or f"no uuid {at}"))
    driver = _or(None, nvml.text, "nvmlSystemGetDriverVersion")
    instances = [_instances(nvml, handle) for handle in handles]
    slices = [(handle, uuid) for group in instances for handle, uuid in group]
    first = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if slices and (first.startswith("MIG-") or all(instances)):
        return _slice(nvml, handles, slices, environ, driver, unknown)
    seen, variable = chosen(environ, ("CUDA_VISIBLE_DEVICES",), ids)
    source = "NVML" + (f", {variable}" if variable else "")
    if not seen:
        reason = f"{variable}={environ[variable]!r} shows no GPU" if variable else "NVML lists no GPU"
        unknown["hardware.arch"] = unknown["hardware.name"] = reason
        return Hardware(platform="cuda", count=0, driver=driver, source=source), unknown
    kinds = [_kind(nvml, handles[at]) for at in seen]
    arch, name, memory, sms = kinds[0]
    for fact, at in (("arch", 0), ("name", 1), ("memory", 2), ("sms", 3)):
        values = {kind[at] for kind in kinds}
        if len(values) > 1:
            unknown[f"hardware.{fact}"] = "the visible GPUs differ: " + ", ".join(sorted(map(str, values)))
    known = {"arch": arch, "name": name, "memory": memory, "sms": sms}
    known = {fact: value for fact, value in known.items() if f"hardware.{fact}" not in unknown}
    mig = any(bool(instances[at]) or _mig_on(nvml, handles[at]) for at in seen)
    return Hardware(platform="cuda", count=len(seen), driver=driver, mig=mig, source=source, **known), unknown


def _or(default: Any, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except NvmlError:
        return default


def _kind(nvml: _Nvml, handle: Any) -> tuple[str | None, str | None, int | None, int | None]:
    """(architecture ``sm90``, name, bytes of memory, streaming multiprocessors) of one GPU."""
    name = _or(None, nvml.text, "nvmlDeviceGetName", handle)
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        nvml.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        capability: int | None = major.value * 10 + minor.value
    except NvmlError:
        capability = None
    memory = _Memory()
    try:
        nvml.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        total: int | None = memory.total
    except NvmlError:
        total = None
    cores = _or(None, nvml.number, "nvmlDeviceGetNumGpuCores", handle)
    per_sm = _CORES.get(capability or 0)
    sms = cores // per_sm if cores and per_sm and cores % per_sm == 0 else None
    return (f"sm{capability}" if capability else None), name, total, sms


def _mig_on(nvml: _Nvml, handle: Any) -> bool:
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        nvml.call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
    except NvmlError:
        return False
    return current.value == 1


def _instances(nvml: _Nvml, handle: Any) -> list[tuple[Any, str]]:
    """(handle, UUID) of the MIG instances of a GPU; none where MIG is off."""
    if not _mig_on(nvml, handle):
        return []
    found = []
    for at in range(_or(0, nvml.number, "nvmlDeviceGetMaxMigDeviceCount", handle)):
        try:
            instance = nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(at))
            found.append((instance, nvml.text("nvmlDeviceGetUUID", instance)))
        except NvmlError:
            continue
    return found


def _slice(
    nvml: _Nvml, handles: list[Any], slices: list[tuple[Any, str]], environ: Mapping[str, str], driver: str | None, unknown: Any
) -> tuple[Hardware, dict[str, str]]:
    """One MIG instance: the first that is visible. A CUDA process sees one unless the variable lists several."""
    seen, variable = chosen(environ, ("CUDA_VISIBLE_DEVICES",), [(uuid,) for _, uuid in slices])
    if variable and not seen:
        seen = [0] if environ[variable].strip().isdigit() else []
    count = len(seen) if variable else 1
    if not seen:
        unknown["hardware.arch"] = f"CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES')!r} shows no MIG instance"
        return Hardware(platform="cuda", count=0, driver=driver, mig=True, source="NVML"), unknown
    instance = slices[seen[0]][0]
    parent = _or(None, nvml.handle, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", instance) or handles[0]
    arch, name, _, _ = _kind(nvml, parent)
    attributes = _Attributes()
    memory = sms = None
    try:
        nvml.call("nvmlDeviceGetAttributes_v2", instance, ctypes.byref(attributes))
        memory, sms = attributes.memory_mb * 1024 * 1024, attributes.multiprocessors
    except NvmlError as error:
        unknown["hardware.memory"] = unknown["hardware.sms"] = f"of a MIG instance: {error}"
    own = _or(None, nvml.text, "nvmlDeviceGetName", instance) or name
    source = "NVML, CUDA_VISIBLE_DEVICES" if variable else "NVML"
    return Hardware("cuda", arch, own, count, memory, sms, driver, True, source), unknown
