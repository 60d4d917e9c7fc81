"""Finds the patches and refuses a bad catalogue.

Shipped patches are the modules of ``patches.<platform>`` that hold a global ``PATCH``; users add folders of such
modules. A patch module's import must be light (see ``overlay.spec``).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from overlay.spec import REPLACE, WRAP, Condition, Exactness, Kind, Patch

SHIPPED = Path(__file__).resolve().parent.parent / "patches"
PLATFORMS = ("common", "cuda", "rocm", "ascend", "cpu")


class CatalogError(Exception):
    """The catalogue is bad: a patch module that does not load, duplicate ids, relations to nobody…"""


@dataclass(frozen=True)
class Entry:
    """A patch, where it comes from, and the digest of its module's source."""

    patch: Patch
    module: str
    file: Path
    source: str  # content digest of the module (and of a module patch's replacement file)
    shipped: bool


def import_patch(module: str, file: str | Path) -> ModuleType:
    """Import a patch's module: a shipped one by name, a user's from its file. Used in every process."""
    if module in sys.modules:
        return sys.modules[module]
    if module.startswith("patches."):
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(module, file)
    if spec is None or spec.loader is None:
        raise CatalogError(f"{file}: not a Python file")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise
    return loaded


def load_catalog(folders: Iterable[Path] = ()) -> dict[str, Entry]:
    """id -> entry of every shipped patch and of those in ``folders``. Raises CatalogError."""
    entries: dict[str, Entry] = {}
    for module, file, shipped in (*_shipped(), *_users(folders)):
        try:
            loaded = import_patch(module, file)
        except Exception as error:
            raise CatalogError(f"{file}: does not import: {type(error).__name__}: {error}") from error
        patch = getattr(loaded, "PATCH", None)
        if not isinstance(patch, Patch):
            raise CatalogError(f"{file}: has no global PATCH of type overlay.spec.Patch")
        if patch.id in entries:
            raise CatalogError(f"two patches have the id {patch.id!r}: {entries[patch.id].file} and {file}")
        _check(patch, loaded, file)
        entries[patch.id] = Entry(patch, module, file, _source_digest(patch, file), shipped)
    _check_relations(entries)
    return entries


def _shipped() -> Iterable[tuple[str, Path, bool]]:
    for platform in PLATFORMS:
        for file in sorted((SHIPPED / platform).glob("*.py")):
            if not file.name.startswith("_"):
                yield f"patches.{platform}.{file.stem}", file, True


def _users(folders: Iterable[Path]) -> Iterable[tuple[str, Path, bool]]:
    for folder in folders:
        folder = Path(folder).resolve()
        if not folder.is_dir():
            raise CatalogError(f"{folder}: not a folder of patches")
        # only a module that binds PATCH is a patch: the folder may hold replacement files of module patches, too
        found = [f for f in sorted(folder.glob("*.py")) if not f.name.startswith("_") and _binds_patch(f)]
        if not found:
            raise CatalogError(f"{folder}: no patch in it (a patch is a .py file with a global PATCH)")
        for file in found:
            yield f"overlay_user_patch_{re.sub(r'[^0-9a-zA-Z]', '_', str(file.with_suffix('')))}", file, False


def _binds_patch(file: Path) -> bool:
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except SyntaxError as error:
        raise CatalogError(f"{file}:{error.lineno}: {error.msg}") from error
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "PATCH" for target in targets):
            return True
    return False


def _source_digest(patch: Patch, file: Path) -> str:
    import hashlib

    digest = hashlib.sha256(file.read_bytes())
    if patch.kind is Kind.MODULE:
        for target in patch.targets:
            digest.update((file.parent / target.use).read_bytes())
    return digest.hexdigest()[:16]


def _check(patch: Patch, module: ModuleType, file: Path) -> None:
    """A patch's own consistency."""

    def bad(what: str) -> CatalogError:
        return CatalogError(f"{file}: patch {patch.id!r}: {what}")

    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", patch.id):
        raise bad("the id is not kebab-case")
    for name in ("summary", "why", "remove_when"):
        if not getattr(patch, name).strip():
            raise bad(f"{name} is empty")
    if not isinstance(patch.kind, Kind) or not isinstance(patch.exactness, Exactness):
        raise bad("kind and exactness must be of overlay.spec")
    if not isinstance(patch.condition, Condition):
        raise bad("condition must be an overlay.spec.Condition")
    functions = [patch.superseded, patch.config, patch.condition.also]
    if patch.kind is Kind.CODE:
        if not patch.targets:
            raise bad("a code patch needs a target")
        for target in patch.targets:
            if target.how not in (WRAP, REPLACE):
                raise bad(f"{target.at}: how must be {WRAP!r} or {REPLACE!r}")
            if not target.qualname:
                raise bad(f"{target.at}: a code target is module:qualname")
            functions.append(target.use)
    elif patch.kind is Kind.CONFIG:
        if not patch.config:
            raise bad("a config patch names its function in config=")
    else:
        for target in patch.targets:
            if target.qualname or not (file.parent / target.use).is_file():
                raise bad(f"{target.at}: a module patch names a module, and a file beside it in use=")
    for function in functions:
        if function and not callable(getattr(module, function, None)):
            raise bad(f"the module has no function {function!r}")
    owners: set[str] = set()
    for target in patch.targets:
        key = f"{target.at} {target.versions}"
        if key in owners:
            raise bad(f"{target.at} is listed twice")
        owners.add(key)


def _check_relations(entries: dict[str, Entry]) -> None:
    for entry in entries.values():
        patch = entry.patch
        for relation in ("after", "conflicts", "requires"):
            for other in getattr(patch, relation):
                if other not in entries:
                    raise CatalogError(f"{entry.file}: patch {patch.id!r}: {relation}={other!r} is no patch")
    _check_owners(entries)
    order(entries)


def _check_owners(entries: dict[str, Entry]) -> None:
    """Two patches on one target must say which stands on the other (``after``) or that they exclude each other."""
    owners: dict[str, list[Patch]] = {}
    for entry in entries.values():
        for at in {target.at for target in entry.patch.targets}:
            owners.setdefault(at, []).append(entry.patch)
    for at, patches in owners.items():
        for i, one in enumerate(patches):
            for two in patches[i + 1 :]:
                if not ({one.id} & {*two.after, *two.conflicts} or {two.id} & {*one.after, *one.conflicts}):
                    raise CatalogError(
                        f"two owners of one target: {one.id!r} ({entries[one.id].file}) and {two.id!r} "
                        f"({entries[two.id].file}) both patch {at}; one must name the other in after= or conflicts="
                    )


def order(entries: dict[str, Entry]) -> list[str]:
    """The ids so that each comes behind what it names in ``after`` and ``requires``. Raises CatalogError on a cycle."""
    from graphlib import CycleError, TopologicalSorter

    graph = {name: {*entry.patch.after, *entry.patch.requires} for name, entry in sorted(entries.items())}
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise CatalogError(f"patches wait for each other: {' -> '.join(error.args[1])}") from error
