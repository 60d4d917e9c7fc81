"""Tables of measured tiles: their format, their checks, and which of them this machine may use.

A table is one JSON file of one chip, one entry a line::

    {"arch": "sm90", "devices": ["NVIDIA H200"], "sms": 132, "triton": "3.6.0", "torch": "...", "driver": "...",
     "date": "2026-11-29", "copy_gbs": 4300, "margin": 0.02, "note": "...",
     "entries": [
      {"dtype": "bfloat16", "m": 1, "n": 4096, "k": 1024, "kernel": "rows", "bn": 4, "bk": 1024, "warps": 4,
       "us": 3.5, "original_us": 5.3, "limit_us": 2.0}]}

``arch``, ``devices`` (the names under which the same part is sold or reported) and ``sms`` must all be this machine's,
and ``triton`` the release that runs: a tile is as fast as it was measured only there. There is no nearest entry: a
shape or a number of rows that was not measured is not in the table. Units: microseconds, GB/s (10^9 bytes).

Standard library only: the launcher reads tables too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "tables"
MAX_ROWS = 16  # rows of x that the kernels take
DTYPES = ("bfloat16", "float16")
KERNELS = ("rows", "lanes", "tiles")

Key = tuple[str, int, int, int]  # dtype, m, n, k


class TableError(ValueError):
    """A table that cannot be used, with the file and what is wrong."""


@dataclass(frozen=True)
class Tile:
    """How one product is computed; see ``kernels``.

    bn: rows of w a program. bk: elements of K a step (a slice). slices: slices of K over warps (``lanes``). split: parts
    of K over programs. stages: depth of the software pipeline (1: plain loads). pdl: programmatic dependent launch.
    narrow: eight columns instead of sixteen in a tensor-core tile of ``tiles``.
    """

    kernel: str
    bn: int
    bk: int
    warps: int = 4
    stages: int = 1
    split: int = 1
    slices: int = 1
    pdl: bool = False
    narrow: bool = False

    @property
    def span(self) -> int:
        """Elements of K that one step of all splits and slices covers."""
        return self.bk * self.split * self.slices

    def problem(self, rows: int) -> str | None:
        """Why this tile cannot compute a product of ``rows`` rows, or None."""
        if self.kernel not in KERNELS:
            return f"kernel {self.kernel!r} is none of {', '.join(KERNELS)}"
        for name in ("bn", "bk", "warps", "slices"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                return f"{name} is {value}, expected a power of two"
        if not 1 <= rows <= (4 if self.kernel == "rows" else MAX_ROWS):
            return f"kernel {self.kernel!r} takes no {rows} rows"
        if not 1 <= self.split <= 32 or not 1 <= self.stages <= 8 or self.warps > 32:
            return "split must be 1 to 32, stages 1 to 8, warps 1 to 32"
        if self.slices > 1 and self.kernel != "lanes":
            return f"slices belong to kernel 'lanes', not to {self.kernel!r}"
        return None


@dataclass(frozen=True)
class Entry:
    """One measured winner: x is [m, k], w is [n, k].

    us: a launch of the tile, original_us: of the platform's own call, both in graph replay with weights from memory.
    limit_us: the bytes moved once over the measured copy bandwidth. error: largest relative error against float64.
    """

    dtype: str
    m: int
    n: int
    k: int
    tile: Tile
    us: float
    original_us: float
    limit_us: float
    error: float = 0.0

    @property
    def key(self) -> Key:
        return (self.dtype, self.m, self.n, self.k)

    def to_line(self) -> dict[str, Any]:
        tile = {f.name: getattr(self.tile, f.name) for f in fields(Tile) if getattr(self.tile, f.name) != f.default}
        return {
            "dtype": self.dtype, "m": self.m, "n": self.n, "k": self.k, **tile, "us": self.us,
            "original_us": self.original_us, "limit_us": self.limit_us, "error": self.error,
        }  # fmt: skip


@dataclass(frozen=True)
class Device:
    """The machine that asks: architecture, the name it reports, its multiprocessors, the Triton release."""

    arch: str | None
    name: str | None
    sms: int | None
    triton: str | None


@dataclass(frozen=True)
class Table:
    """A checked table of one chip. ``entries`` by key."""

    path: str
    arch: str
    devices: tuple[str, ...]
    sms: int
    triton: str
    torch: str
    driver: str
    date: str
    copy_gbs: float
    margin: float
    note: str
    entries: Mapping[Key, Entry]

    def mismatch(self, device: Device) -> str | None:
        """Why this table is not for ``device``, or None. What a device does not know of itself does not match."""
        if device.arch != self.arch:
            return f"it was measured on {self.arch}, this is {device.arch or 'unknown'}"
        if device.name not in self.devices:
            return f"it was measured on {' / '.join(self.devices)}, this is {device.name or 'unknown'}"
        if device.sms != self.sms:
            return f"it was measured with {self.sms} multiprocessors, here are {device.sms or 'an unknown number'}"
        if public(device.triton) != public(self.triton):
            return f"it was measured with Triton {self.triton}, this is {device.triton or 'unknown'}"
        return None


def public(version: str | None) -> str | None:
    """A version without its vendor tag: ``3.6.0`` of ``3.6.0+git1234``."""
    return version.partition("+")[0] if version else None


_HEAD = {
    "arch": str, "devices": list, "sms": int, "triton": str, "torch": str, "driver": str, "date": str,
    "copy_gbs": (int, float), "margin": (int, float), "note": str, "entries": list,
}  # fmt: skip
_NUMBERS = ("us", "original_us", "limit_us")


def load(path: str | Path) -> Table:
    """The table in a file. Raises TableError for anything that is not exactly a table."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise TableError(f"{path}: expected an object, found {type(content).__name__}")
    for name, kind in _HEAD.items():
        if name not in content:
            raise TableError(f"{path}: {name} is missing")
        if not isinstance(content[name], kind) or isinstance(content[name], bool):
            raise TableError(f"{path}: {name} is {content[name]!r}, of the wrong type")
    if unknown := set(content) - set(_HEAD):
        raise TableError(f"{path}: unknown key {sorted(unknown)[0]!r}; expected {', '.join(_HEAD)}")
    entries: dict[Key, Entry] = {}
    for number, line in enumerate(content["entries"], 1):
        entry = _entry(line, f"{path}: entry {number}")
        if entry.key in entries:
            raise TableError(f"{path}: entry {number}: {entry.key} is there twice")
        entries[entry.key] = entry
    head = {name: content[name] for name in _HEAD if name not in ("entries", "devices")}
    return Table(path=str(path), entries=entries, devices=tuple(content["devices"]), **head)


def _entry(line: Any, where: str) -> Entry:
    if not isinstance(line, dict):
        raise TableError(f"{where}: expected an object")
    own = {"dtype", "m", "n", "k", "error", *_NUMBERS}
    known = own | {f.name for f in fields(Tile)}
    needed = (own - {"error"}) | {f.name for f in fields(Tile) if f.default is MISSING}
    if missing := sorted(needed - set(line)):
        raise TableError(f"{where}: {missing[0]} is missing")
    if unknown := sorted(set(line) - known):
        raise TableError(f"{where}: unknown key {unknown[0]!r}")
    for name, value in line.items():
        kinds = {"dtype": str, "kernel": str, "pdl": bool, "narrow": bool}
        kind = kinds.get(name, (int, float) if name in (*_NUMBERS, "error") else int)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TableError(f"{where}: {name} is {value!r}, of the wrong type")
    if line["dtype"] not in DTYPES:
        raise TableError(f"{where}: dtype is {line['dtype']!r}, expected {' or '.join(DTYPES)}")
    if min(line["m"], line["n"], line["k"]) < 1 or min(line[name] for name in _NUMBERS) <= 0:
        raise TableError(f"{where}: sizes and times must be positive")
    tile = Tile(**{name: value for name, value in line.items() if name not in own})
    if problem := tile.problem(line["m"]):
        raise TableError(f"{where}: {problem}")
    if line["us"] >= line["original_us"]:
        raise TableError(f"{where}: {line['us']} us is no gain over the original's {line['original_us']} us")
    return Entry(tile=tile, **{name: line[name] for name in own if name in line})


def save(table: Table, path: str | Path) -> None:
    """Write a table, entries sorted by shape and one a line. The file is replaced as a whole."""
    path = Path(path)
    head = {name: getattr(table, name) for name in _HEAD if name != "entries"}
    head["devices"] = list(table.devices)
    order = sorted(table.entries.values(), key=lambda entry: (entry.dtype, entry.n, entry.k, entry.m))
    lines = ",\n  ".join(json.dumps(entry.to_line()) for entry in order)
    text = json.dumps(head, indent=1)[:-2] + ',\n "entries": [\n  ' + lines + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def folders(extra: str = "") -> tuple[Path, ...]:
    """Where tables are looked for, the most trusted last: those shipped, then the user's own folder."""
    return (SHIPPED, Path(extra).expanduser()) if extra else (SHIPPED,)


def choose(device: Device, places: Iterable[Path]) -> tuple[dict[Key, Entry], list[str], list[str]]:
    """What this machine may use: entries by key, the tables used, and for each table left out why.

    A later folder's entry takes the place of an earlier one's. A table that cannot be read counts as left out.
    """
    entries: dict[Key, Entry] = {}
    used, rejected = [], []
    for folder in places:
        if not folder.is_dir():
            rejected.append(f"{folder}: no such folder")
            continue
        for path in sorted(folder.glob("*.json")):
            try:
                table = load(path)
            except TableError as error:
                rejected.append(str(error))
                continue
            if reason := table.mismatch(device):
                rejected.append(f"{path.name}: {reason}")
                continue
            entries.update(table.entries)
            used.append(path.name)
    return entries, used, rejected
