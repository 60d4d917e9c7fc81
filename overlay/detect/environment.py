"""The environment check: it warns and changes nothing.

vLLM reads about 300 variables and says little when one is misspelt, gone, or someone else's. Known names come from the
installed release's own ``envs.py`` and the plugins'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from overlay.facts import Build, Hardware

# Variables that older releases read, and what does their work now. Those of 0.18 and later were taken from the releases'
# own deprecation messages; "" where nothing does.
REMOVED = {
    "VLLM_USE_V1": "",
    "VLLM_ATTENTION_BACKEND": "--attention-backend",
    "VLLM_ALL2ALL_BACKEND": "--all2all-backend",
    "VLLM_TORCH_PROFILER_DIR": "--profiler-config.torch_profiler_dir",
    "VLLM_FLASH_ATTN_VERSION": "--attention-config.flash_attn_version",
    "VLLM_USE_TRITON_FLASH_ATTN": "",
    "VLLM_ENABLE_MOE_DP_CHUNK": "",
    "VLLM_MOE_DP_CHUNK_SIZE": "",
    "VLLM_RPC_TIMEOUT": "",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "",
    "VLLM_ROCM_CUSTOM_PAGED_ATTN": "",
    "VLLM_ROCM_USE_AITER_PAGED_ATTN": "",
    "VLLM_MXFP4_USE_MARLIN": "--moe-backend marlin (mixtures of experts) or --linear-backend marlin",
    "VLLM_TEST_FORCE_FP8_MARLIN": "--linear-backend marlin",
    "VLLM_USE_FLASHINFER_MOE_FP16": "--moe-backend",
    "VLLM_USE_FLASHINFER_MOE_FP8": "--moe-backend",
    "VLLM_USE_FLASHINFER_MOE_FP4": "--moe-backend",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "--moe-backend",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": "--moe-backend",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "--moe-backend",
    "VLLM_FLASHINFER_MOE_BACKEND": "--moe-backend",
    "VLLM_NVFP4_GEMM_BACKEND": "--linear-backend",
    "VLLM_USE_NVFP4_CT_EMULATIONS": "--linear-backend emulation",
    "VLLM_USE_FBGEMM": "--linear-backend fbgemm",
    "VLLM_MM_HASHER_ALGORITHM": "--mm-hasher-algorithm",
    "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": "--prefix-cache-retention-interval",
    "VLLM_TRITON_ATTN_USE_TD": "VLLM_TRITON_USE_TD",
}
# Variables of forks and plugins: prefix -> (distribution, platform).
VENDORS = {
    "VLLM_ASCEND_": ("vllm-ascend", "ascend"),
    "VLLM_HCU_": ("vllm-hcu", "dcu"),
    "VLLM_MUSA_": ("vllm-musa", "musa"),
    "VLLM_METAX_": ("vllm-metax", "maca"),
    "VLLM_KUNLUN_": ("vllm-kunlun", "kunlun"),
    "VLLM_HPU_": ("vllm-gaudi", "gaudi"),
    "VLLM_SPYRE_": ("vllm-spyre", "spyre"),
    "VLLM_RBLN_": ("vllm-rbln", "rbln"),
}
# Variables of vLLM's own that act on one platform: prefix -> platforms.
PLATFORM_ONLY = {
    "VLLM_ROCM_": ("rocm", "dcu"),
    "VLLM_CPU_": ("cpu",),
    "VLLM_XPU_": ("xpu",),
    "VLLM_TPU_": ("tpu",),
}
DEVICE_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("ASCEND_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
)
_KUBERNETES = re.compile(r"([A-Z0-9_]+?)_(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP)(?:_(?:ADDR|PORT|PROTO))?)")
_SERVICE_URL = re.compile(r"(?:tcp|udp)://[\d.]+:\d+")
_PREFIX = re.compile(r"V{1,2}L{1,3}V?M_|VLLM__|VLM_|VLLN_")


@dataclass(frozen=True)
class EnvironmentWarning:
    """kind: ``typo``, ``removed``, ``vendor``, ``platform`` or ``kubernetes``. text: what, where, and what to do."""

    kind: str
    variable: str
    text: str


def known_variables(build: Build) -> frozenset[str]:
    """The names that the installed release and its plugins read, from their ``envs.py``."""
    names: set[str] = set()
    if build.root is None:
        return frozenset()
    places = [Path(build.root) / "envs.py"]
    for plugin in build.plugins:
        places.append(Path(build.root).parent / plugin.replace("-", "_").lower() / "envs.py")
    for place in places:
        try:
            text = place.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        names.update(re.findall(r'^    "([A-Z][A-Z0-9_]+)"\s*:', text, re.MULTILINE))
    return frozenset(names)


def warnings(environ: Mapping[str, str], build: Build, hardware: Hardware | None = None) -> list[str]:
    """The texts of ``check``, for the log."""
    return [entry.text for entry in check(environ, build, hardware or Hardware())]


def check(environ: Mapping[str, str], build: Build, hardware: Hardware) -> list[EnvironmentWarning]:
    """What looks wrong in ``environ`` for this build. Where the release's variables cannot be read, less is checked."""
    known = known_variables(build)
    services = _services(environ)
    found = list(_kubernetes(environ, known, services))
    colliding = {entry.variable for entry in found}
    plugins = {name.lower().replace("_", "-") for name in build.plugins}
    for name in sorted(environ):
        if name in colliding or _is_service(name, services) or name.startswith("OVERLAY_"):
            continue
        warning = (
            _vendor(name, plugins, build, hardware, known)
            or _removed(name, known)
            or _typo(name, known)
            or _platform(name, environ[name], known, hardware)
        )
        if warning:
            found.append(warning)
    return found


def _services(environ: Mapping[str, str]) -> set[str]:
    """Prefixes of the Kubernetes services that the pod was told of (``VLLM`` for a service named ``vllm``)."""
    return {name.removesuffix("_SERVICE_HOST") for name in environ if name.endswith("_SERVICE_HOST")}


def _is_service(name: str, services: Iterable[str]) -> bool:
    found = _KUBERNETES.fullmatch(name)
    return (found is not None and found[1] in services) or (name.endswith("_PORT") and name[: -len("_PORT")] in services)


def _kubernetes(
    environ: Mapping[str, str], known: frozenset[str], services: set[str]
) -> Iterable[EnvironmentWarning]:
    """Service variables that take a name of vLLM's or of the overlay's own."""
    for name in sorted(environ):
        ours = name.startswith("OVERLAY_") and _is_service(name, services)
        if (name in known or name == "VLLM_PORT") and _SERVICE_URL.match(environ[name]):
            yield EnvironmentWarning(
                "kubernetes",
                name,
                f"{name}={environ[name]} comes from a Kubernetes service and vLLM reads it as a setting of its own: rename the "
                "service, or set `enableServiceLinks: false` in the pod",
            )
        elif ours and name.endswith("_SERVICE_HOST"):
            yield EnvironmentWarning(
                "kubernetes",
                name,
                f"{name} comes from a Kubernetes service named like the overlay's own variables: set `enableServiceLinks: "
                "false` in the pod",
            )


def _vendor(
    name: str, plugins: set[str], build: Build, hardware: Hardware, known: frozenset[str]
) -> EnvironmentWarning | None:
    for prefix, (distribution, platform) in VENDORS.items():
        if name.startswith(prefix) and name not in known:
            if distribution in plugins or (build.distribution or "").lower().replace("_", "-") == distribution:
                return _typo(name, known)
            if platform == "dcu" and build.vendor == "hygon":
                return None
            text = f"{name} is a variable of {distribution}, which is not installed: {_build(build)} does not read it"
            return EnvironmentWarning("vendor", name, text)
    return None


def _build(build: Build) -> str:
    return f"{build.distribution or 'this vLLM'} {build.version or ''}".strip()


def _removed(name: str, known: frozenset[str]) -> EnvironmentWarning | None:
    if name not in REMOVED or name in known or not known:
        return None
    instead = REMOVED[name]
    text = f"{name} is not read by this release any more; " + (f"use {instead}" if instead else "nothing takes its place")
    return EnvironmentWarning("removed", name, text)


def _typo(name: str, known: frozenset[str]) -> EnvironmentWarning | None:
    """A name that no one reads, close to one that is read."""
    if name in known or name in DEVICE_VARIABLES:
        return None
    candidates: Iterable[str] = ()
    cutoff = 0.9
    if name.startswith("VLLM_"):
        candidates = known
    elif _PREFIX.match(name.upper().replace("-", "_")) or (name != name.upper() and name.upper().startswith("VLLM_")):
        candidates = [entry for entry in known if entry.startswith("VLLM_")]
    elif name.endswith(("_DEVICE", "_DEVICES", "_DEVICE_ORDER")):
        candidates, cutoff = DEVICE_VARIABLES, 0.93
    if not candidates:
        return None
    from difflib import get_close_matches

    close = get_close_matches(name.upper().replace("-", "_"), list(candidates), 1, cutoff)
    if not close:
        return None
    return EnvironmentWarning("typo", name, f"{name} is read by nothing here; did you mean {close[0]}?")


def _platform(name: str, value: str, known: frozenset[str], hardware: Hardware) -> EnvironmentWarning | None:
    if hardware.platform is None or name not in known or value in ("", "0"):
        return None
    for prefix, platforms in PLATFORM_ONLY.items():
        if name.startswith(prefix) and hardware.platform not in platforms:
            text = f"{name} acts on {' and '.join(platforms)} only; this server runs on {hardware.platform}"
            return EnvironmentWarning("platform", name, text)
    return None
