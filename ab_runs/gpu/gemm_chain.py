"""A decode step in miniature: the products of a model's layers with stand-ins for the kernels between them.

    python ab_runs/gpu/gemm_chain.py --sweep DIR/sweep.jsonl --out DIR/chain.json --seconds 60

Tells, before any server runs, what the tiles and programmatic launch bring where the weights come from memory and small
kernels run between the products. The stand-ins read and write about what a normalisation, rotary embedding, attention
over 1,000 tokens and an activation do; none of them triggers the next kernel early. Figures: microseconds a layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
import triton.language as tl

from patches._lib.gemm import kernels
from patches._lib.gemm.table import Tile

# (layers, hidden, [(n, k, what runs before the product)])
CHAINS = {
    "0.6B": (20, [(4096, 1024, "norm"), (1024, 2048, "attention"), (6144, 1024, "norm"), (1024, 3072, "act")]),
    "4B": (10, [(6144, 2560, "norm"), (2560, 4096, "attention"), (19456, 2560, "norm"), (2560, 9728, "act")]),
    "27B": (5, [(16384, 5120, "norm"), (96, 5120, ""), (5120, 6144, "attention"), (34816, 5120, "norm"), (5120, 17408, "act")]),
}


@triton.jit
def _norm(source, target, K, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    value = tl.load(source + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(target + k, (value * tl.rsqrt(tl.sum(value * value, 0) / K + 1e-6)).to(target.dtype.element_ty), mask=k < K)


@triton.jit
def _map(source, target, K, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(target + k, (value * tl.sigmoid(value)).to(target.dtype.element_ty), mask=k < K)


@triton.jit
def _attend(cache, target, K, LOOPS, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in range(LOOPS):
        total += tl.load(cache + (tl.program_id(0) * LOOPS + turn) * BLOCK + k).to(tl.float32)
    at = tl.program_id(0) * BLOCK + k
    tl.store(target + at, total.to(target.dtype.element_ty), mask=at < K)


class Chain:
    def __init__(self, name: str, winners: dict) -> None:
        layers, self.products = CHAINS[name]
        self.weights = [
            [torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(0.05) for n, k, _ in self.products]
            for _ in range(layers)
        ]
        self.tiles = [winners.get((n, k), Tile("rows", 4, 512, 2)) for n, k, _ in self.products]
        self.cache = torch.randn(layers, 4096 * 16 * 32, device="cuda", dtype=torch.bfloat16)
        self.buffers = {k: torch.randn(1, k, device="cuda", dtype=torch.bfloat16) for k in {k for _, k, _ in self.products}}
        self.wide = torch.randn(1, 65536, device="cuda", dtype=torch.bfloat16)

    def between(self, what: str, layer: int, k: int) -> None:
        """The kernels before a product, the last of which writes its x."""
        x = self.buffers[k]
        if what == "norm":
            _norm[(1,)](self.wide, x, k, BLOCK=triton.next_power_of_2(k), num_warps=8)
        elif what == "act":
            _map[(triton.cdiv(k, 1024),)](self.wide, x, k, BLOCK=1024)
        elif what == "attention":
            _map[(triton.cdiv(4096, 128),)](self.wide, self.wide, 4096, BLOCK=128, num_warps=1)  # rotary embedding
            _map[(8,)](self.wide, self.wide, 2048, BLOCK=256, num_warps=1)  # cache write
            _attend[(32,)](self.cache[layer], self.wide, 4096, 16, BLOCK=4096)
            _map[(8,)](self.wide, x, k, BLOCK=1024)  # combine

    def step(self, arm: dict) -> None:
        flat = [(layer, at) for layer in range(len(self.weights)) for at in range(len(self.products))]
        for layer, at in flat:
            n, k, what = self.products[at]
            w, x = self.weights[layer][at], self.buffers[k]
            self.between(what, layer, k)
            if arm["how"] == "original":
                torch.nn.functional.linear(x, w)
                continue
            tile = self.tiles[at]
            tile = replace(tile, pdl=arm["pdl"])
            kernels.run(tile, x, w)

    def graph(self, arm: dict) -> torch.cuda.CUDAGraph:
        self.step(arm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(arm)
        return graph

    def compare(self, arms: dict[str, dict], rounds: int = 7) -> dict[str, list[float]]:
        graphs = {name: self.graph(arm) for name, arm in arms.items()}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(rounds + 1):
            for name, graph in graphs.items():
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                graph.replay()
                stop.record()
                stop.synchronize()
                if turn:
                    times[name].append(start.elapsed_time(stop) * 500 / len(self.weights))
        return times


def winners(path: Path) -> dict:
    """(n, k) -> the best tile for one row, from a sweep's records."""
    found = {}
    if path and path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["cell"][1] == 1 and "winner" in record:
                found[tuple(record["cell"][2:])] = Tile(**record["winner"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chains", default="0.6B,4B,27B")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    start = time.monotonic()
    best, results = winners(args.sweep), {}
    for name in args.chains.split(","):
        if time.monotonic() - start > args.seconds:
            break
        chain = Chain(name, best)
        arms = {"original": {"how": "original"}, "tiles": {"how": "tiles", "pdl": False}, "pdl": {"how": "tiles", "pdl": True}}
        times = chain.compare(arms)
        results[name] = {"tiles": [str(tile) for tile in chain.tiles], "us_per_layer": times}
        for arm, values in times.items():
            print(
                f"{name:5} {arm:24} {statistics.median(values):8.2f} us a layer  ({min(values):.2f} to {max(values):.2f})",
                flush=True,
            )
        args.out.write_text(json.dumps(results, indent=1))
        del chain
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
