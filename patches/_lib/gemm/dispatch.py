"""The choice at run time: which kernel a product gets, and the custom ops that make it.

A custom op is opaque to torch.compile and looks at the number of rows when it runs. A graph that is captured for a size
therefore holds the kernel of that size, and replays it without any of this code: what is counted here is eager calls and
captures, not replays.

No ``from __future__ import annotations`` here: the op's schema is read from live annotations.
"""

import concurrent.futures
import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Optional

import torch
import triton

from overlay.ledger import Counters
from overlay.runtime import options
from patches._lib.gemm import kernels, table

log = logging.getLogger("overlay.gemm")
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@functools.cache
def device_of(index: int) -> table.Device:
    """What the device of this process says of itself, as tables name it."""
    properties = torch.cuda.get_device_properties(index)
    if getattr(torch.version, "hip", None):
        arch = properties.gcnArchName.partition(":")[0]
    else:
        arch = f"sm{properties.major}{properties.minor}"
    return table.Device(arch, properties.name, properties.multi_processor_count, triton.__version__)


class Chooser:
    """The tables of this process's device for one patch, and its counts by reason and by shape."""

    def __init__(self, patch: str, count: Counters) -> None:
        self.patch, self.count = patch, count
        self.entries: dict[table.Key, table.Tile] | None = None
        self.by_shape: dict[tuple[str, int, int], list[int]] = {}
        self.prepared: set[tuple[str, int, int]] = set()

    def load(self, device: torch.device) -> None:
        """Read the tables once. A table that is not for this device is left out, with the reason in the log."""
        extra = str(options(self.patch).get("tables", "") or "")
        found, used, rejected = table.choose(device_of(device.index or 0), table.folders(extra))
        rows = int(options(self.patch).get("max_rows", table.MAX_ROWS))
        self.entries = {key: entry.tile for key, entry in found.items() if key[1] <= rows}
        for dtype, m, n, k in self.entries:
            self.by_shape.setdefault((dtype, n, k), []).append(m)
        for reason in rejected:
            log.info("%s: table left out: %s", self.patch, reason)
        log.info("%s: %d products from %s", self.patch, len(self.entries), ", ".join(used) or "no table")

    def tile(self, x: torch.Tensor, weight: torch.Tensor, prepare: Callable[[table.Tile, int], object]) -> table.Tile | None:
        """The tile for x [M, K] and weight [N, K], or None for the original; counted either way.

        prepare(tile, rows) launches a tile on throw-away input. Every number of rows of a shape is launched once where
        the shape is first seen outside a capture, so that no kernel is compiled or loaded while a graph is captured.
        """
        if self.entries is None:
            self.load(x.device)
        if x.dim() != 2 or weight.dim() != 2:
            return self.refuse("not two-dimensional")
        dtype = DTYPES.get(x.dtype)
        if dtype is None or weight.dtype != x.dtype:
            return self.refuse("dtype")
        (rows, k), n = x.shape, weight.shape[0]
        shape = (dtype, n, k)
        if shape not in self.by_shape:
            return self.refuse("shape not in the table")
        if shape not in self.prepared:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return self.refuse("first seen in a capture")
            self._prepare(shape, prepare)
        if rows > table.MAX_ROWS:
            return self.refuse("more rows than the kernels take")
        found = self.entries.get((dtype, rows, n, k))
        if found is None:
            return self.refuse("rows not in the table")
        if x.stride(1) != 1 or not weight.is_contiguous() or x.data_ptr() % 16 or x.stride(0) % 8:
            return self.refuse("layout")
        self.count.hit()
        self.count.add(f"hit {rows}x{n}x{k}")
        return found

    def refuse(self, reason: str) -> None:
        self.count.refuse(reason)

    def _prepare(self, shape: tuple[str, int, int], prepare: Callable[[table.Tile, int], object]) -> None:
        dtype, n, k = shape
        self.prepared.add(shape)
        self._compile(shape)
        for rows in self.by_shape[shape]:
            key = (dtype, rows, n, k)
            try:
                prepare(self.entries[key], rows)
            except Exception as error:  # noqa: BLE001 - whatever the compiler or driver says, the original still works
                del self.entries[key]
                self.count.add("kernel failed here")
                log.warning("%s: %d x %d x %d stays with the original: %s: %s", self.patch, rows, n, k,
                            type(error).__name__, error)  # fmt: skip

    def _compile(self, shape: tuple[str, int, int]) -> None:
        """Compile a shape's kernels side by side; what fails here fails again, and is seen, when it is launched."""
        dtype, n, k = shape
        kind = next(torch_dtype for torch_dtype, name in DTYPES.items() if name == dtype)

        def compile_rows(rows: int) -> None:
            with contextlib.suppress(Exception):
                kernels.warm(self.entries[dtype, rows, n, k], kind, rows, n, k)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(compile_rows, self.by_shape[shape]))


def linear_op(name: str, chooser: Chooser, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Register op ``vllm::name`` (x, weight, bias) -> x @ weight.T + bias and return it.

    original: takes (x, weight, bias) wherever the table has no entry.
    """

    def product(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:  # noqa: UP045
        def prepare(tile: table.Tile, rows: int) -> object:
            return kernels.run(tile, x.new_zeros((rows, x.shape[1])), weight, bias)

        tile = chooser.tile(x, weight, prepare)
        if tile is None:
            return original(x, weight, bias)
        if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
            chooser.count.refuse("bias layout")
            return original(x, weight, bias)
        return kernels.run(tile, x, weight, bias)

    def fake(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:  # noqa: UP045
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    return register(name, product, fake)


def register(name: str, function: Callable[..., object], fake: Callable[..., object]) -> Callable[..., object]:
    """The op ``vllm::name``, registered once a process for the platform's dispatch key."""
    if not hasattr(torch.ops.vllm, name):
        from vllm.utils.torch_utils import direct_register_custom_op

        direct_register_custom_op(op_name=name, op_func=function, fake_impl=fake)
    return getattr(torch.ops.vllm, name)
