"""Tables of measured tiles: their format, their checks, and which of them this machine may use.

A table is one JSON file of one chip, one entry a line::

    {"arch": "sm90", "devices": ["NVIDIA H200"], "sms": 132, "triton": "3.6.0", "torch": "...", "driver": "...",
     "date": "2026-11-29", "copy_gbs": 4300, "margin": 0.02, "note": "...",
     "entries": [
      {"dtype": "bfloat16", "m": 1, "n": 4096, "k": 1024, "kernel": "rows", "bn": 4, "bk": 1024, "warps": 4,
       "us": 3.5, "original_us": 5.3, "limit_us": 2.0}],
     "mlps": [
      {"dtype": "bfloat16", "m": 1, "hidden": 1024, "inner": 3072, "first": {"kernel": "rows", ...}, "second": {...},
       "us": 7.4, "tiles_us": 9.0, "original_us": 13.0, "limit_us": 4.4}],
     "normed": [
      {"dtype": "bfloat16", "m": 1, "n": 4096, "k": 1024, "gated": false, "tile": {...}, "second": null,
       "us": 4.5, "apart_us": 6.1, "limit_us": 2.0}]}

``arch``, ``devices`` (the names under which the same part is sold or reported) and ``sms`` must all be this machine's,
and ``triton`` the release that runs: a tile is as fast as it was measured only there. There is no nearest entry: a
shape or a number of rows that was not measured is not in the table. Units: microseconds, GB/s (10^9 bytes).

Standard library only: the launcher reads tables too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "tables"
MAX_ROWS = 16  # rows of x that the kernels take
NORMED_ROWS = 2  # the same where the norm is part of the product
DTYPES = ("bfloat16", "float16")
KERNELS = ("rows", "lanes", "tiles")

Key = tuple[str, int, int, int]  # dtype, m, and n, k of a product or hidden, inner of an MLP


class TableError(ValueError):
    """A table that cannot be used, with the file and what is wrong."""


@dataclass(frozen=True)
class Tile:
    """How one product is computed; see ``kernels``.

    bn: rows of w a program. bk: elements of K a step (a slice). slices: slices of K over warps (``lanes``). split: parts
    of K over programs. stages: depth of the software pipeline (1: plain loads). pdl: programmatic dependent launch, behind a
    kernel that lets it. early: the first weights are loaded before that kernel has ended (``rows``). trigger: lets the kernel
    behind it start early. narrow: eight columns instead of sixteen in a tensor-core tile of ``tiles``.
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
    early: bool = False
    trigger: bool = False

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {f.name: getattr(self, f.name) for f in fields(Tile) if getattr(self, f.name) != f.default}

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
        if self.early and not (self.pdl and self.kernel == "rows"):
            return "early belongs to kernel 'rows' with pdl"
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
        return {
            "dtype": self.dtype, "m": self.m, "n": self.n, "k": self.k, **self.tile.to_dict(), "us": self.us,
            "original_us": self.original_us, "limit_us": self.limit_us, "error": self.error,
        }  # fmt: skip


@dataclass(frozen=True)
class Mlp:
    """A gated MLP, down(silu(gate(x)) * up(x)), in two launches that were measured one behind the other.

    x is [m, hidden], the merged gate and up weight [2 * inner, hidden], the down weight [hidden, inner]. first: the gated
    product. second: the down product; None leaves it to whatever a product of its size gets. tiles_us: the same MLP by
    the table's products with an activation of its own between. Other figures as in ``Entry``.
    """

    dtype: str
    m: int
    hidden: int
    inner: int
    first: Tile
    second: Tile | None
    us: float
    tiles_us: float
    original_us: float
    limit_us: float
    error: float = 0.0

    @property
    def key(self) -> Key:
        return (self.dtype, self.m, self.hidden, self.inner)

    def to_line(self) -> dict[str, Any]:
        line = {f.name: getattr(self, f.name) for f in fields(Mlp)}
        return line | {"first": self.first.to_dict(), "second": self.second.to_dict() if self.second else None}


@dataclass(frozen=True)
class Normed:
    """A product whose x is normalised on the way: rms_norm(x + residual) @ w.T, x is [m, k], w is [n, k].

    gated: w is an MLP's merged gate and up weight, silu(first half) * second half is what comes out, and the figures are
    of the whole MLP with ``second`` for its down product (None: whatever such a product gets). apart_us: a kernel for the
    norm, then the fastest that the table has for the rest.
    """

    dtype: str
    m: int
    n: int
    k: int
    gated: bool
    tile: Tile
    second: Tile | None
    us: float
    apart_us: float
    limit_us: float
    error: float = 0.0

    @property
    def key(self) -> Key:
        return (self.dtype, self.m, self.n, self.k)

    def to_line(self) -> dict[str, Any]:
        line = {f.name: getattr(self, f.name) for f in fields(Normed)}
        return line | {"tile": self.tile.to_dict(), "second": self.second.to_dict() if self.second else None}


@dataclass(frozen=True)
class Device:
    """The machine that asks: architecture, the name it reports, its multiprocessors, the Triton release."""

    arch: str | None
    name: str | None
    sms: int | None
    triton: str | None


@dataclass(frozen=True)
class Table:
    """A checked table of one chip: products, gated MLPs, and products with their norm, gated ones apart; by key."""

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
    mlps: Mapping[Key, Mlp] = field(default_factory=dict)
    normed: Mapping[Key, Normed] = field(default_factory=dict)
    normed_mlps: Mapping[Key, Normed] = field(default_factory=dict)

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
    if unknown := set(content) - set(_HEAD) - {"mlps", "normed"}:
        raise TableError(f"{path}: unknown key {sorted(unknown)[0]!r}; expected {', '.join(_HEAD)}, mlps, normed")
    for name in ("mlps", "normed"):
        if not isinstance(content.get(name, []), list):
            raise TableError(f"{path}: {name} is no list")
    both = [_normed(line, f"{path}: normed {number}") for number, line in enumerate(content.get("normed", []), 1)]
    head = {name: content[name] for name in _HEAD if name not in ("entries", "devices")}
    return Table(
        path=str(path),
        devices=tuple(content["devices"]),
        entries=_by_key([_entry(line, f"{path}: entry {i}") for i, line in enumerate(content["entries"], 1)], f"{path}: entry"),
        mlps=_by_key([_mlp(line, f"{path}: mlp {i}") for i, line in enumerate(content.get("mlps", []), 1)], f"{path}: mlp"),
        normed=_by_key([entry for entry in both if not entry.gated], f"{path}: normed"),
        normed_mlps=_by_key([entry for entry in both if entry.gated], f"{path}: normed"),
        **head,
    )


def _by_key(entries: list[Any], where: str) -> dict[Key, Any]:
    found: dict[Key, Any] = {}
    for number, entry in enumerate(entries, 1):
        if entry.key in found:
            raise TableError(f"{where} {number}: {entry.key} is there twice")
        found[entry.key] = entry
    return found


def _entry(line: Any, where: str) -> Entry:
    own = ("dtype", "m", "n", "k", "error", *_NUMBERS)
    _check_line(line, where, own, tuple(f.name for f in fields(Tile)))
    tile = _tile({name: value for name, value in line.items() if name not in own}, line["m"], where)
    return Entry(tile=tile, **{name: line[name] for name in own if name in line})


def _mlp(line: Any, where: str) -> Mlp:
    own = ("dtype", "m", "hidden", "inner", "error", "tiles_us", *_NUMBERS)
    _check_line(line, where, own, ("first", "second"))
    for name in ("first", "second"):
        if name not in line:
            raise TableError(f"{where}: {name} is missing")
    first = _tile(line["first"], line["m"], f"{where}: first")
    if first.bn < 2:
        raise TableError(f"{where}: first: a program needs a row of the gate and one of the up projection, bn is {first.bn}")
    second = None if line["second"] is None else _tile(line["second"], line["m"], f"{where}: second")
    return Mlp(first=first, second=second, **{name: line[name] for name in own if name in line})


def _normed(line: Any, where: str) -> Normed:
    own = ("dtype", "m", "n", "k", "gated", "error", "apart_us", "us", "limit_us")
    _check_line(line, where, own, ("tile", "second"), than="apart_us")
    for name in ("tile", "second"):
        if name not in line:
            raise TableError(f"{where}: {name} is missing")
    tile = _tile(line["tile"], line["m"], f"{where}: tile")
    if tile.kernel != "rows" or tile.split > 1 or tile.pdl or line["m"] > NORMED_ROWS or (line["gated"] and tile.bn < 2):
        raise TableError(f"{where}: tile: the norm is part of kernel 'rows' alone, unsplit, for one or two rows")
    second = None if line["second"] is None else _tile(line["second"], line["m"], f"{where}: second")
    return Normed(tile=tile, second=second, **{name: line[name] for name in own if name in line})


def _check_line(
    line: Any, where: str, own: tuple[str, ...], others: tuple[str, ...], than: str = "original_us"
) -> None:
    """The keys and the plain values of an entry; what is in ``others`` is checked by who reads it."""
    if not isinstance(line, dict):
        raise TableError(f"{where}: expected an object")
    if missing := sorted({*own} - {"error"} - set(line)):
        raise TableError(f"{where}: {missing[0]} is missing")
    if unknown := sorted(set(line) - {*own, *others}):
        raise TableError(f"{where}: unknown key {unknown[0]!r}")
    for name in (name for name in own if name in line):
        kinds = {"dtype": str, "gated": bool}
        kind = kinds.get(name, (int, float) if name.endswith("us") or name == "error" else int)
        _check_type(line[name], kind, f"{where}: {name}")
    if line["dtype"] not in DTYPES:
        raise TableError(f"{where}: dtype is {line['dtype']!r}, expected {' or '.join(DTYPES)}")
    if min(line[name] for name in own if name in line and name not in ("dtype", "gated", "error")) <= 0:
        raise TableError(f"{where}: sizes and times must be positive")
    if line["us"] >= line[than]:
        raise TableError(f"{where}: {line['us']} us is no gain over {than.removesuffix('_us')}'s {line[than]} us")


def _tile(line: Any, rows: int, where: str) -> Tile:
    if not isinstance(line, dict):
        raise TableError(f"{where}: expected an object")
    if missing := [f.name for f in fields(Tile) if f.default is MISSING and f.name not in line]:
        raise TableError(f"{where}: {missing[0]} is missing")
    if unknown := sorted(set(line) - {f.name for f in fields(Tile)}):
        raise TableError(f"{where}: unknown key {unknown[0]!r}")
    for f in fields(Tile):
        kind = str if f.name == "kernel" else bool if isinstance(f.default, bool) else int
        if f.name in line:
            _check_type(line[f.name], kind, f"{where}: {f.name}")
    tile = Tile(**line)
    if problem := tile.problem(rows):
        raise TableError(f"{where}: {problem}")
    return tile


def _check_type(value: Any, kind: Any, where: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TableError(f"{where} is {value!r}, of the wrong type")


def save(table: Table, path: str | Path) -> None:
    """Write a table, entries sorted by shape and one a line. The file is replaced as a whole."""
    path = Path(path)
    head = {name: getattr(table, name) for name in _HEAD if name != "entries"}
    head["devices"] = list(table.devices)
    products = sorted(table.entries.values(), key=lambda entry: (entry.dtype, entry.n, entry.k, entry.m))
    mlps = sorted(table.mlps.values(), key=lambda mlp: (mlp.dtype, mlp.hidden, mlp.inner, mlp.m))
    text = json.dumps(head, indent=1)[:-2]
    normed = sorted((*table.normed.values(), *table.normed_mlps.values()), key=lambda e: (e.gated, e.dtype, e.n, e.k, e.m))
    for name, entries in (("entries", products), ("mlps", mlps), ("normed", normed)):
        text += f',\n "{name}": [\n  ' + ",\n  ".join(json.dumps(entry.to_line()) for entry in entries) + "\n ]"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text + "\n}\n", encoding="utf-8")
    temporary.replace(path)


def folders(extra: str = "") -> tuple[Path, ...]:
    """Where tables are looked for, the most trusted last: those shipped, then the user's own folder."""
    return (SHIPPED, Path(extra).expanduser()) if extra else (SHIPPED,)


@dataclass(frozen=True)
class Chosen:
    """What a machine may use, by key; the tables it comes from; for each table left out why."""

    entries: Mapping[Key, Entry]
    mlps: Mapping[Key, Mlp]
    normed: Mapping[Key, Normed]
    normed_mlps: Mapping[Key, Normed]
    used: list[str]
    rejected: list[str]


def choose(device: Device, places: Iterable[Path]) -> Chosen:
    """What this machine may use. A later folder's entry takes the place of an earlier one's. A table that cannot be read
    counts as left out.
    """
    found: dict[str, dict[Key, Any]] = {name: {} for name in ("entries", "mlps", "normed", "normed_mlps")}
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
            for name, entries in found.items():
                entries.update(getattr(table, name))
            used.append(path.name)
    return Chosen(**found, used=used, rejected=rejected)
