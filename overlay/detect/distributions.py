"""Installed distributions, read off their metadata folders: only the few files that a question needs.

``importlib.metadata`` parses every distribution's metadata for questions like these, which takes a good part of the launcher's
time in an image with hundreds of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_FOLDER = re.compile(r"(?P<name>.+?)-(?P<version>\d[^-]*|[^-]+)\.dist-info")


def normal(name: str) -> str:
    """A distribution's name as it is compared: lower case, runs of ``-_.`` as one dash."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Distribution:
    """One ``*.dist-info`` or ``*.egg-info``. name and version are the folder's: see ``read_metadata`` for the file's own."""

    path: Path
    name: str
    version: str

    def text(self, file: str) -> str:
        """A file of the folder; "" where it is missing or unreadable."""
        try:
            return (self.path / file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def metadata(self) -> tuple[str, str]:
        """Name and version from METADATA or PKG-INFO, else those of the folder's name."""
        head = (self.text("METADATA") or self.text("PKG-INFO")).split("\n\n", 1)[0]
        found = dict(re.findall(r"^(Name|Version):[ \t]*(.+?)[ \t]*$", head, re.MULTILINE))
        return found.get("Name", self.name), found.get("Version", self.version)


def installed(path: Sequence[str]) -> list[Distribution]:
    """The distributions on ``path``, in its order; of two of one name, Python's metadata sees the first alone."""
    found = []
    for entry in dict.fromkeys(path):
        try:
            names = sorted(child.name for child in Path(entry or ".").iterdir() if child.name.endswith("-info"))
        except OSError:
            continue
        for name in names:
            folder = Path(entry or ".") / name
            if match := _FOLDER.fullmatch(name):
                found.append(Distribution(folder, match["name"], match["version"]))
            elif name.endswith(".egg-info") and folder.is_dir():
                base = name.removesuffix(".egg-info")
                dist, _, rest = base.partition("-")
                found.append(Distribution(folder, dist, rest.partition("-")[0]))
    return found


def versions(found: Iterable[Distribution], names: Iterable[str]) -> str | None:
    """The version of the first distribution that bears one of ``names``, in the order of ``names``."""
    by_name: dict[str, str] = {}
    for distribution in found:
        by_name.setdefault(normal(distribution.name), distribution.version)
    return next((by_name[normal(name)] for name in names if normal(name) in by_name), None)


def entry_points(found: Iterable[Distribution], prefix: str) -> Iterator[tuple[Distribution, str, str, str]]:
    """(distribution, group, name, object) of every entry point whose group starts with ``prefix``.

    A distribution that another of the same name shadows is left out, as Python's metadata leaves it out.
    """
    seen = set()
    for distribution in found:
        name = normal(distribution.name)
        if name in seen:
            continue
        seen.add(name)
        text = distribution.text("entry_points.txt")
        if prefix not in text:
            continue
        group = ""
        for line in text.splitlines():
            line = line.strip()
            if line.startswith("[") and line.endswith("]"):
                group = line[1:-1].strip()
            elif group.startswith(prefix) and "=" in line and not line.startswith(("#", ";")):
                entry, _, target = line.partition("=")
                yield distribution, group, entry.strip(), target.strip()


def records(distribution: Distribution, wanted: Iterable[str]) -> Mapping[str, str]:
    """file -> its hash field (``sha256=...``) in RECORD, for those of ``wanted`` that are listed."""
    text = distribution.text("RECORD")
    found = {}
    for file in wanted:
        if match := re.search(rf"^{re.escape(file)},([^,\n]*),", text, re.MULTILINE):
            found[file] = match[1]
    return found
