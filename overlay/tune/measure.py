"""Timing and checking products on the device: graph replay, weights from memory, float64 as the reference.

Two regimes. ``raw``: the product again and again, each time with other weights, so that they come from memory and not
from L2. ``spaced``: before each product runs a small kernel that writes its x, as a normalisation does in a decode step;
the figure is what the product adds to a chain of those small kernels. Both arms of a comparison run in the same regime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from patches._lib.gemm import kernels
from patches._lib.gemm.table import Tile

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@triton.jit
def _small(source, target, K, BLOCK: tl.constexpr):
    """One row a program, read, scaled by its own size and written: what a normalisation does."""
    k = tl.arange(0, BLOCK)
    row = tl.program_id(0) * K
    value = tl.load(source + row + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / K + 1e-6)
    tl.store(target + row + k, (value * scale).to(target.dtype.element_ty), mask=k < K)


def original(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The platform's own product, as an unpatched server calls it."""
    return torch.nn.functional.linear(x, w)


def with_tile(tile: Tile) -> Product:
    return lambda x, w: kernels.run(tile, x, w)


class Bench:
    """Weights, inputs and the clock of one device and dtype.

    One buffer of random numbers, from which every shape takes its weights.
    """

    def __init__(self, dtype: str, largest: int, device: str = "cuda", seed: int = 0) -> None:
        """largest: the most elements that one weight has."""
        self.dtype = DTYPES[dtype]
        self.device = torch.device(device)
        properties = torch.cuda.get_device_properties(self.device)
        self.l2 = properties.L2_cache_size
        self.processors = properties.multi_processor_count
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        room = max(largest, 5 * self.l2 // 2)
        self.flat = torch.empty(room, dtype=self.dtype, device=self.device)
        self.flat.normal_(generator=self.generator).mul_(0.05)
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}

    def weights(self, n: int, k: int) -> list[torch.Tensor]:
        """Weights [n, k] that together are several times the L2, or all that fit."""
        count = max(1, min(self.flat.numel() // (n * k), -(-4 * self.l2 // (2 * n * k)), 160))
        return [self.flat[i * n * k : (i + 1) * n * k].view(n, k) for i in range(count)]

    def x(self, m: int, k: int) -> torch.Tensor:
        if (m, k) not in self.inputs:
            self.inputs[m, k] = torch.randn(m, k, generator=self.generator, device=self.device).to(self.dtype)
        return self.inputs[m, k]

    def graph(self, product: Product | None, m: int, n: int, k: int, spaced: bool) -> tuple[torch.cuda.CUDAGraph, int]:
        """A graph of launches over all weights (``product`` None: the small kernels alone) and their number."""
        weights, x = self.weights(n, k), self.x(m, k)
        launches = max(len(weights), 20 if n * k < 2**26 else 4)
        block = triton.next_power_of_2(k)
        inputs = [torch.empty_like(x) for _ in range(2)] if spaced else []
        graph = torch.cuda.CUDAGraph()
        if product is not None:
            product(x, weights[0])  # compiles, outside the capture
        if spaced:
            _small[(m,)](x, inputs[0], k, BLOCK=block, num_warps=8)
        with torch.cuda.graph(graph):
            for turn in range(launches):
                source = x
                if spaced:
                    source = inputs[turn % 2]
                    _small[(m,)](x, source, k, BLOCK=block, num_warps=8)
                if product is not None:
                    product(source, weights[turn % len(weights)])
        self._keep = inputs
        return graph, launches

    def time(self, product: Product | None, m: int, n: int, k: int, spaced: bool = False, repeats: int = 3) -> list[float]:
        """Microseconds a launch, one figure a repeat (a repeat replays the whole graph once)."""
        graph, launches = self.graph(product, m, n, k, spaced)
        return [us / launches for us in replays(graph, repeats)]

    def check(self, tile: Tile, m: int, n: int, k: int) -> tuple[float, float, bool]:
        """(error of the tile, error of the original, equal bits in two runs), errors as |y - ref| / |ref| in float64.

        The output is poisoned first: an element that was not written is NaN and fails every comparison.
        """
        w = self.weights(n, k)[-1]
        x = torch.randn(m, k, generator=self.generator, device=self.device).to(self.dtype)
        ys = [kernels.run(tile, x, w, out=torch.full((m, n), float("nan"), dtype=self.dtype, device=self.device)) for _ in "ab"]
        reference = torch.empty(m, n, dtype=torch.float64, device=self.device)
        step = max(1, 2**27 // k)
        wide = x.double()
        for start in range(0, n, step):
            reference[:, start : start + step] = wide @ w[start : start + step].double().T
        size = reference.norm()
        errors = [((y.double() - reference).norm() / size).item() for y in (ys[0], original(x, w))]
        return errors[0], errors[1], torch.equal(ys[0], ys[1])


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """What ``run`` launches, as a graph; it runs once before, which compiles."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replays(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    """Microseconds of each of ``repeats`` replays, behind one that is not counted."""
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) * 1000 for a, b in zip(events, events[1:], strict=False)]


def copy_bandwidth(device: str = "cuda", nbytes: int = 2**32) -> float:
    """Bytes read and written a second by a device-to-device copy, in GB/s: the limit that products are held against."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return 2 * nbytes / (sorted(times[1:])[len(times) // 2 - 1] * 1e-3) / 1e9


def precompile(jobs: list[tuple[Any, ...]], processes: int) -> None:
    """Compile kernels for (tile, dtype, m, n, k[, gated]) in several processes; they share Triton's cache on disk."""
    in_processes(_compile_one, jobs, processes)


def in_processes(work: Callable[[Any], None], jobs: list[Any], processes: int) -> None:
    """``work`` on every job, in fresh processes."""
    import concurrent.futures
    import multiprocessing

    if not jobs:
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        list(pool.map(work, jobs, chunksize=max(1, len(jobs) // (processes * 4))))


def _compile_one(job: tuple[Any, ...]) -> None:
    tile, dtype, m, n, k, *gated = job
    try:
        kernels.warm(tile, DTYPES[dtype], m, n, k, *gated)
    except Exception as error:  # noqa: BLE001 - a tile that does not compile is measured as such later
        print(f"{tile}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def versions(device: str = "cuda") -> dict[str, str | int]:
    """What a table says of the machine it was measured on."""
    properties = torch.cuda.get_device_properties(device)
    rocm = getattr(torch.version, "hip", None)
    arch = properties.gcnArchName.partition(":")[0] if rocm else f"sm{properties.major}{properties.minor}"
    return {
        "arch": arch,
        "name": properties.name,
        "sms": properties.multi_processor_count,
        "triton": triton.__version__,
        "torch": torch.__version__,
        "driver": driver(),
    }


def driver() -> str:
    """The driver's version, from the places that name it; ``unknown`` otherwise."""
    from pathlib import Path

    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/hydcu/version"):
        try:
            text = Path(path).read_text()
        except OSError:
            continue
        words = [word for word in text.split() if word[:1].isdigit() and "." in word]
        return words[0] if words else text.strip()
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # noqa: BLE001 - not an NVIDIA machine, or no binding: the version is a note, not a key
        return "unknown"
