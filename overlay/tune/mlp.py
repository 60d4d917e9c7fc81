"""The search for the fastest two launches of a gated MLP, in a chain as a decode step has it.

Graph replay over the weights of several layers, from memory; before each MLP a small kernel writes its x, as the
normalisation does, and its time is taken off. Four forms: ``original`` (the platform's products, an activation kernel
between), ``tiles`` (the products that the table has), ``gated`` (the activation inside the first product) and ``chained``
(besides, the second product is launched while the first one ends, its first weights loaded before). The last two are
searched, one product after the other. Kept is the faster of them where it beats ``original`` by the margin and ``tiles``
by 1%.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import triton
import triton.language as tl

from overlay.tune import measure, search
from overlay.tune.candidates import candidates
from patches._lib.gemm import kernels
from patches._lib.gemm.table import Tile

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
OVER_TILES = 0.01  # the least gain over the table's own products


@triton.jit
def _act(source, target, INNER, BLOCK: tl.constexpr):
    """silu(gate) * up in fp32, rounded once, as torch.compile makes it: a block of a row a program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    gate = tl.load(source + row * 2 * INNER + at, mask=at < INNER, other=0.0).to(tl.float32)
    up = tl.load(source + row * 2 * INNER + INNER + at, mask=at < INNER, other=0.0).to(tl.float32)
    tl.store(target + row * INNER + at, (gate * tl.sigmoid(gate) * up).to(target.dtype.element_ty), mask=at < INNER)


def activate(wide: torch.Tensor) -> torch.Tensor:
    """[rows, 2 * inner] -> [rows, inner]."""
    rows, both = wide.shape
    out = torch.empty((rows, both // 2), dtype=wide.dtype, device=wide.device)
    _act[(triton.cdiv(both // 2, 1024), rows)](wide, out, both // 2, BLOCK=1024, num_warps=4)
    return out


def apart(first: Tile | None, second: Tile | None) -> Step:
    """Three launches; None: the platform's product."""
    return lambda x, up, down: product(second, activate(product(first, x, up)), down)


def gated(first: Tile, second: Tile | None) -> Step:
    """Two launches."""
    return lambda x, up, down: product(second, kernels.run(first, x, up, gated=True), down)


def product(tile: Tile | None, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return measure.original(x, w) if tile is None else kernels.run(tile, x, w)


def first_candidates(rows: int, hidden: int, inner: int, processors: int = 132) -> list[Tile]:
    """Tiles of the gated product: a program needs a row of each half."""
    return [tile for tile in candidates(rows, 2 * inner, hidden, processors) if tile.bn > 1]


def second_candidates(rows: int, hidden: int, inner: int, processors: int = 132) -> list[Tile]:
    """Tiles of a product that is launched while the one before it ends."""
    found = []
    for tile in (tile for tile in candidates(rows, hidden, inner, processors) if tile.split == 1):
        found += [replace(tile, pdl=True, early=True)] if tile.kernel == "rows" else []
        found.append(replace(tile, pdl=True))
    for bn, warps, wide in ((1, 1, 4), (1, 2, 4), (1, 4, 2), (2, 1, 4), (2, 2, 2), (1, 1, 2), (2, 4, 2)):
        tile = Tile("rows", bn, 256 * warps * wide, warps, pdl=True, early=True)
        if rows <= 2 and inner % tile.bk == 0:
            found.append(tile)
    return list(dict.fromkeys(found))


def jobs(cells: list[tuple[str, str, int, int, int]], processors: int = 132) -> list[tuple[Any, ...]]:
    """Kernels to compile before the search: (tile, dtype, rows, n, k, gated), each once."""
    found: dict[Any, tuple[Any, ...]] = {}
    for _, dtype, rows, hidden, inner in cells:
        for tile in first_candidates(rows, hidden, inner, processors):
            for each in (tile, replace(tile, trigger=True)):
                key = (each, rows if each.kernel == "rows" else 0, 2 * inner % tile.bn, hidden % tile.span == 0, True)
                found[key] = (each, dtype, rows, 2 * inner, hidden, True)
        for tile in second_candidates(rows, hidden, inner, processors):
            key = (tile, rows if tile.kernel == "rows" else 0, hidden % tile.bn, inner % tile.span == 0, False)
            found[key] = (tile, dtype, rows, hidden, inner, False)
    return list(found.values())


class Layers:
    """Weights of as many layers as are several times the L2, inputs, and the clock."""

    def __init__(self, dtype: str, rows: int, hidden: int, inner: int) -> None:
        properties = torch.cuda.get_device_properties(0)
        self.rows, self.hidden, self.inner, self.processors = rows, hidden, inner, properties.multi_processor_count
        self.dtype = measure.DTYPES[dtype]
        count = max(3, -(-4 * properties.L2_cache_size // (6 * hidden * inner)))
        self.generator = torch.Generator(device="cuda").manual_seed(0)
        self.layers = [(self._weight(2 * inner, hidden), self._weight(hidden, inner)) for _ in range(count)]
        self.source = torch.randn(rows, hidden, generator=self.generator, device="cuda").to(self.dtype)
        self.x = torch.empty_like(self.source)

    def _weight(self, n: int, k: int) -> torch.Tensor:
        return torch.empty(n, k, device="cuda", dtype=self.dtype).normal_(generator=self.generator).mul_(0.05)

    def small(self) -> None:
        block = triton.next_power_of_2(self.hidden)
        measure._small[(self.rows,)](self.source, self.x, self.hidden, BLOCK=block, num_warps=8)

    def graph(self, step: Step | None) -> torch.cuda.CUDAGraph:
        """Two passes through the layers; ``step`` None: the small kernels alone."""

        def once() -> None:
            for up, down in self.layers * 2:
                self.small()
                if step is not None:
                    step(self.x, up, down)

        return measure.captured(once)

    def time(self, graph: torch.cuda.CUDAGraph, repeats: int = 5) -> list[float]:
        """Microseconds a layer, one figure a replay."""
        return [us / (2 * len(self.layers)) for us in measure.replays(graph, repeats)]

    def best(self, tiles: list[Tile], step: Callable[[Tile], Step], failed: list[Any]) -> list[tuple[float, Tile]]:
        """The tiles that ran, the fastest first, with their times in the chain."""
        found = []
        for tile in tiles:
            try:
                found.append((min(self.time(self.graph(step(tile)), 3)), tile))
            except Exception as error:  # noqa: BLE001 - a tile this chip cannot run is a result, too
                failed.append((str(tile), f"{type(error).__name__}: {str(error)[:120]}"))
        return sorted(found, key=lambda item: item[0])

    def check(self, step: Step) -> tuple[float, bool]:
        """(error relative to float64, equal bits in two runs)."""
        self.small()
        up, down = self.layers[-1]
        gate, other = (self.x.double() @ up.double().T).chunk(2, -1)
        reference = (gate * torch.sigmoid(gate) * other) @ down.double().T
        ys = [step(self.x, up, down) for _ in "ab"]
        return ((ys[0].double() - reference).norm() / reference.norm()).item(), torch.equal(*ys)


def verdict(times: dict[str, list[float]], checks: dict[str, tuple[float, bool]], margin: float) -> tuple[str, str]:
    """(the faster fused form, why it is not kept or ""). times: us by form, checks: see ``Layers.check``."""
    us = {name: statistics.median(values) for name, values in times.items()}
    winner = min((name for name in us if name in ("gated", "chained")), key=us.__getitem__)
    error, same = checks[winner]
    if not same:
        return winner, "two runs differ"
    if not error <= min(search.ERROR_LIMIT, 2 * checks["original"][0] + 1e-4):
        return winner, f"error {error:.2e} against the original's {checks['original'][0]:.2e}"
    for other, least in (("original", margin), ("tiles", OVER_TILES)):
        gain = 1 - us[winner] / us[other]
        if gain < least or max(times[winner]) >= min(times[other]):
            return winner, f"{gain:+.1%} against {other} is not beyond {least:.0%}"
    return winner, ""


def measure_mlp(
    cell: tuple[str, str, int, int, int],
    products: tuple[Tile | None, Tile | None],
    margin: float,
    copy_gbs: float,
) -> dict[str, Any]:
    """One MLP measured: cell is ("mlp", dtype, rows, hidden, inner), products what the table has for it apart."""
    _, dtype, rows, hidden, inner = cell
    layers, failed = Layers(dtype, rows, hidden, inner), []
    small = min(layers.time(layers.graph(None)))
    firsts = layers.best(
        first_candidates(rows, hidden, inner, layers.processors), lambda tile: gated(tile, products[1]), failed
    )
    limit = search.limit_us(rows, 3 * inner, hidden, copy_gbs)
    record: dict[str, Any] = {"cell": cell, "limit_us": limit, "small_us": small, "failed": failed, "kept": False}
    if not firsts:
        return record | {"why": "no candidate ran", "original_us": min(layers.time(layers.graph(apart(None, None)))) - small}
    first = firsts[0][1]
    starting = replace(first, trigger=True)
    seconds = layers.best(second_candidates(rows, hidden, inner, layers.processors), lambda tile: gated(starting, tile), failed)
    forms: dict[str, tuple[Tile | None, Tile | None]] = {"original": (None, None), "tiles": products}
    forms["gated"] = (first, products[1])
    if seconds:
        again = [replace(tile, trigger=True) for _, tile in firsts[:6]]
        forms["chained"] = (layers.best(again, lambda tile: gated(tile, seconds[0][1]), failed)[0][1], seconds[0][1])
    builders: dict[str, Callable[..., Step]] = {"original": apart, "tiles": apart, "gated": gated, "chained": gated}
    steps = {name: builders[name](*tiles) for name, tiles in forms.items()}
    graphs = {name: layers.graph(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(4):
        for name in list(graphs) if turn % 2 == 0 else list(graphs)[::-1]:
            times[name] += layers.time(graphs[name], 3)
    times = {name: [us - small for us in values] for name, values in times.items()}
    us = {name: statistics.median(values) for name, values in times.items()}
    checks = {name: layers.check(step) for name, step in steps.items()}
    winner, why = verdict(times, checks, margin)
    tiles = [asdict(tile) if tile else None for tile in forms[winner]]
    return record | {
        "winner": winner, "first": tiles[0], "second": tiles[1], "us": us[winner], "tiles_us": us["tiles"],
        "original_us": us["original"], "forms_us": us, "error": checks[winner][0], "original_error": checks["original"][0],
        "kept": not why, "why": why,
        "tried": {
            "first": [(round(time - small, 3), asdict(tile)) for time, tile in firsts[:6]],
            "second": [(round(time - small, 3), asdict(tile)) for time, tile in seconds[:6]],
        },
    }  # fmt: skip
