"""The search for products that normalise their x on the way, against a kernel for the norm and the rest as the table has it.

Graph replay over the weights of several layers, from memory; x and the residual are the same in all of them. Cells:
("normed", dtype, rows, n, k) for a product behind a norm, ("normed_mlp", dtype, rows, hidden, inner) for an MLP behind one,
whose second product stays what the MLP's own search found. One or two rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch

from overlay.tune import measure, mlp, search
from patches._lib.gemm import kernels
from patches._lib.gemm.table import Mlp, Tile

EPS = 1e-6
MARGIN = 0.02  # the least gain over a norm of its own


def candidates(rows: int, n: int, k: int, gated: bool) -> list[Tile]:
    """Tiles of kernel ``rows``; gated: they let the second product start early."""
    found = []
    for warps in (1, 2, 4, 8):
        for wide in (1, 2):
            for bn in (1, 2, 4, 8, 16):
                bk = 256 * warps * wide
                if bk >= 2 * k or 8 * wide * bn * rows > 128 or (gated and bn < 2) or -(-n // bn) * warps < 264:
                    continue
                found += [Tile("rows", bn, bk, warps, stages, trigger=gated) for stages in (1, 3)]
    even = [tile for tile in found if k % tile.bk == 0]
    return even or found


def jobs(cells: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Kernels to compile before the search: (tile, dtype, rows, n, k, gated)."""
    found = []
    for kind, dtype, rows, a, b in cells:
        n, k, gated = (a, b, False) if kind == "normed" else (2 * b, a, True)
        found += [(tile, dtype, rows, n, k, gated) for tile in candidates(rows, n, k, gated)]
    return found


def compile_job(job: tuple[Any, ...]) -> None:
    tile, dtype, rows, n, k, gated = job
    try:
        kernels.warm_normed(tile, measure.DTYPES[dtype], rows, n, k, gated)
    except Exception as error:  # noqa: BLE001 - a tile that does not compile is measured as such later
        print(f"{tile}: {type(error).__name__}: {str(error)[:200]}", flush=True)


class Chain:
    """Weights of several layers behind norms, and the clock. shapes: (n, k) of each weight of a layer."""

    def __init__(self, dtype: str, rows: int, shapes: list[tuple[int, int]]) -> None:
        self.generator = torch.Generator(device="cuda").manual_seed(0)
        self.dtype = measure.DTYPES[dtype]
        size = 2 * sum(n * k for n, k in shapes)
        count = max(4, min(64, -(-4 * torch.cuda.get_device_properties(0).L2_cache_size // size)))
        self.layers = [tuple(self._new(n, k).mul_(0.03) for n, k in shapes) for _ in range(count)]
        width = shapes[0][1]
        self.x, self.residual = self._new(rows, width), self._new(rows, width)
        self.gamma = self._new(1, width).view(-1).mul_(0.1).add_(1)

    def _new(self, n: int, k: int) -> torch.Tensor:
        return torch.empty(n, k, device="cuda", dtype=self.dtype).normal_(generator=self.generator)

    def graph(self, step: Callable[..., Any]) -> torch.cuda.CUDAGraph:
        def once() -> None:
            for weights in self.layers:
                step(*weights)

        return measure.captured(once)

    def time(self, graph: torch.cuda.CUDAGraph, repeats: int = 3) -> list[float]:
        """Microseconds a layer, one figure a replay."""
        return [us / len(self.layers) for us in measure.replays(graph, repeats)]

    def reference(self) -> torch.Tensor:
        """rms_norm(x + residual) in float64."""
        both = self.x.double() + self.residual.double()
        return both * torch.rsqrt(both.pow(2).mean(-1, keepdim=True) + EPS) * self.gamma.double()


def measure_normed(cell: tuple[Any, ...], records: list[dict[str, Any]], copy_gbs: float) -> dict[str, Any]:
    """One cell measured, against the best that ``records`` have for what stands behind the norm."""
    kind, dtype, rows, a, b = cell
    gated = kind == "normed_mlp"
    if gated:
        known = next((entry for entry in search.mlps(records) if entry.key == (dtype, rows, a, b)), None)
        products = search.products_of(("mlp", dtype, rows, a, b), records)
        return _measure(cell, (2 * b, a), [(2 * b, a), (a, b)], known, products, copy_gbs)
    tiles = {entry.key: entry.tile for entry in search.entries(records)}
    return _measure(cell, (a, b), [(a, b)], None, (tiles.get((dtype, rows, a, b)), None), copy_gbs)


def _measure(
    cell: tuple[Any, ...],
    first: tuple[int, int],
    shapes: list[tuple[int, int]],
    known: Mlp | None,
    products: tuple[Tile | None, Tile | None],
    copy_gbs: float,
) -> dict[str, Any]:
    _, dtype, rows, *_ = cell
    gated = len(shapes) > 1
    chain, failed = Chain(dtype, rows, shapes), []
    second = (known.second if known else products[1]) if gated else None
    x, residual, gamma = chain.x, chain.residual, chain.gamma

    def rest(y: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        if not gated:
            return mlp.product(products[0], y, weights[0])
        return (mlp.gated(known.first, known.second) if known else mlp.apart(*products))(y, *weights)

    def apart(*weights: torch.Tensor) -> torch.Tensor:
        return rest(kernels.add_norm(x, residual, gamma, EPS)[0], *weights)

    def normed(tile: Tile) -> Callable[..., torch.Tensor]:
        def step(*weights: torch.Tensor) -> torch.Tensor:
            y, _ = kernels.run_normed(tile, x, residual, gamma, EPS, weights[0], gated)
            return mlp.product(second, y, weights[1]) if gated else y

        return step

    found = []
    for tile in candidates(rows, *first, gated):
        try:
            found.append((min(chain.time(chain.graph(normed(tile)))), tile))
        except Exception as error:  # noqa: BLE001 - a tile this chip cannot run is a result, too
            failed.append((str(tile), f"{type(error).__name__}: {str(error)[:120]}"))
    limit = search.limit_us(rows, sum(n * k for n, k in shapes) // first[1], first[1], copy_gbs)
    record: dict[str, Any] = {"cell": cell, "limit_us": limit, "failed": failed, "kept": False}
    if not found:
        return record | {"why": "no candidate ran"}
    found.sort(key=lambda item: item[0])
    steps = {"apart": apart, "normed": normed(found[0][1])}
    graphs = {name: chain.graph(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(6):
        for name in list(graphs) if turn % 2 == 0 else list(graphs)[::-1]:
            times[name] += chain.time(graphs[name], 2)
    us = {name: statistics.median(values) for name, values in times.items()}
    answer = chain.reference() @ chain.layers[-1][0].double().T
    if gated:
        gate, up = answer.chunk(2, -1)
        answer = (gate * torch.sigmoid(gate) * up) @ chain.layers[-1][1].double().T
    errors = {
        name: ((step(*chain.layers[-1]).double() - answer).norm() / answer.norm()).item() for name, step in steps.items()
    }
    ours = [kernels.run_normed(found[0][1], x, residual, gamma, EPS, chain.layers[-1][0], gated) for _ in "ab"]
    same = torch.equal(ours[0][0], ours[1][0]) and torch.equal(ours[0][1], kernels.add_norm(x, residual, gamma, EPS)[1])
    gain, why = 1 - us["normed"] / us["apart"], ""
    if not same:
        why = "two runs differ, or the sum does"
    elif not errors["normed"] <= min(search.ERROR_LIMIT, 2 * errors["apart"] + 1e-4):
        why = f"error {errors['normed']:.2e} against {errors['apart']:.2e} apart"
    elif gain < MARGIN or max(times["normed"]) >= min(times["apart"]):
        why = f"{gain:+.1%} is not beyond {MARGIN:.0%}"
    return record | {
        "tile": asdict(found[0][1]), "second": asdict(second) if second else None, "us": us["normed"], "apart_us": us["apart"],
        "error": errors["normed"], "apart_error": errors["apart"], "kept": not why, "why": why,
        "tried": [(round(time, 3), asdict(tile)) for time, tile in found[:6]],
    }  # fmt: skip
