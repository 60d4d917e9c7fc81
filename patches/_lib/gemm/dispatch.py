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
from collections.abc import Callable, Sequence
from typing import Any, Optional

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
    """What the tables of this process's device have for one patch, and its counts by reason and by shape.

    kind: which entries of the table: ``entries``, ``mlps``, ``normed``, ``normed_mlps``. settings: the patch whose options say
    where tables are and up to how many rows they are used.
    """

    def __init__(self, patch: str, count: Counters, kind: str = "entries", settings: str = "") -> None:
        self.patch, self.count, self.kind, self.settings = patch, count, kind, settings or patch
        self.entries: dict[table.Key, Any] | None = None
        self.by_shape: dict[tuple[str, int, int], list[int]] = {}
        self.prepared: set[tuple[str, int, int]] = set()

    def load(self, device: torch.device) -> None:
        """Read the tables once. A table that is not for this device is left out, with the reason in the log."""
        extra = str(options(self.settings).get("tables", "") or "")
        chosen = table.choose(device_of(device.index or 0), table.folders(extra))
        rows = int(options(self.settings).get("max_rows", table.MAX_ROWS))
        self.entries = {key: entry for key, entry in getattr(chosen, self.kind).items() if key[1] <= rows}
        for dtype, m, n, k in self.entries:
            self.by_shape.setdefault((dtype, n, k), []).append(m)
        for reason in chosen.rejected:
            log.info("%s: table left out: %s", self.patch, reason)
        log.info("%s: %d %s from %s", self.patch, len(self.entries), self.kind, ", ".join(chosen.used) or "no table")

    def find(self, x: torch.Tensor, weights: Sequence[torch.Tensor], prepare: Callable[[Any, int], object]) -> Any:
        """The entry for x [M, K] and its weights, or None for the original; counted either way.

        weights: the one of a product, [N, K]; or the gate and up, [2 * inner, hidden], and the down weight, [hidden, inner].
        prepare(entry, rows) launches an entry on throw-away input. Every number of rows of a shape is launched once where
        the shape is first seen outside a capture, so that no kernel is compiled or loaded while a graph is captured.
        """
        if self.entries is None:
            self.load(x.device)
        if x.dim() != 2 or any(weight.dim() != 2 for weight in weights):
            return self.refuse("not two-dimensional")
        dtype = DTYPES.get(x.dtype)
        if dtype is None or any(weight.dtype != x.dtype for weight in weights):
            return self.refuse("dtype")
        if x.shape[1] != weights[0].shape[1]:
            return self.refuse("width")  # the original says what is wrong
        rows, (n, k) = x.shape[0], weights[-1].shape
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
        layout = x.stride(1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
        if not layout or not all(weight.is_contiguous() for weight in weights):
            return self.refuse("layout")
        self.count.hit()
        self.count.add(f"hit {rows}x{n}x{k}")
        return found

    def refuse(self, reason: str) -> None:
        self.count.refuse(reason)

    def _prepare(self, shape: tuple[str, int, int], prepare: Callable[[Any, int], object]) -> None:
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
                entry = self.entries[dtype, rows, n, k]
                if self.kind == "entries":
                    kernels.warm(entry.tile, kind, rows, n, k)
                elif self.kind == "mlps":
                    kernels.warm_mlp(entry, kind)
                else:
                    kernels.warm_normed(entry.tile, kind, rows, n, k, entry.gated)
                    if entry.second is not None:
                        kernels.warm(entry.second, kind, rows, k, n // 2)

        here = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else (None, ())
        with concurrent.futures.ThreadPoolExecutor(8, initializer=here[0], initargs=here[1]) as pool:
            list(pool.map(compile_rows, self.by_shape[shape]))


def linear_op(name: str, chooser: Chooser, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Register op ``vllm::name`` (x, weight, bias) -> x @ weight.T + bias and return it.

    original: takes (x, weight, bias) wherever the table has no entry.
    """

    def product(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:  # noqa: UP045
        def prepare(entry: table.Entry, rows: int) -> object:
            return kernels.run(entry.tile, x.new_zeros((rows, x.shape[1])), weight, bias)

        entry = chooser.find(x, (weight,), prepare)
        if entry is None:
            return original(x, weight, bias)
        if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
            chooser.count.refuse("bias layout")
            return original(x, weight, bias)
        return kernels.run(entry.tile, x, weight, bias)

    def fake(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:  # noqa: UP045
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    return register(name, product, fake)


def mlp_op(
    name: str,
    chooser: Chooser,
    linear: Callable[..., torch.Tensor],
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Register op ``vllm::name`` (x, gate_up, down) -> down(silu(gate(x)) * up(x)) and return it.

    linear(x, weight, bias) and activation(x) make the MLP wherever the table has no entry.
    """

    def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        def prepare(entry: table.Mlp, rows: int) -> object:
            return launch(entry, x.new_zeros((rows, x.shape[1])))

        def launch(entry: table.Mlp, rows: torch.Tensor) -> torch.Tensor:
            inner = kernels.run(entry.first, rows, gate_up, gated=True)
            return linear(inner, down, None) if entry.second is None else kernels.run(entry.second, inner, down)

        entry = chooser.find(x, (gate_up, down), prepare) if gate_up.shape[0] == 2 * down.shape[1] else None
        if entry is None:
            return linear(activation(linear(x, gate_up, None)), down, None)
        return launch(entry, x)

    def fake(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], down.shape[0]))

    return register(name, mlp, fake)


def normed_op(name: str, chooser: Chooser, linear: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Register op ``vllm::name`` (x, residual, gamma, eps, weight) -> (rms_norm(x + residual) @ weight.T, x + residual).

    linear(x, weight, bias) makes the product wherever the table has no entry.
    """

    def normed(
        x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, eps: float, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def prepare(entry: table.Normed, rows: int) -> object:
            empty = x.new_zeros((rows, x.shape[1]))
            return kernels.run_normed(entry.tile, empty, empty, gamma, eps, weight)

        entry = chooser.find(x, (weight,), prepare)
        if entry is None or not _contiguous(x, residual, gamma):
            y, kept = kernels.add_norm(x.contiguous(), residual.contiguous(), gamma.contiguous(), eps)
            return linear(y, weight, None), kept
        return kernels.run_normed(entry.tile, x, residual, gamma, eps, weight)

    def fake(
        x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, eps: float, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty((*x.shape[:-1], weight.shape[0])), torch.empty_like(residual)

    return register(name, normed, fake)


def normed_mlp_op(
    name: str, chooser: Chooser, linear: Callable[..., torch.Tensor], mlp: Callable[..., torch.Tensor]
) -> Callable[..., Any]:
    """Register op ``vllm::name`` (x, residual, gamma, eps, gate_up, down) -> (MLP of rms_norm(x + residual), x + residual).

    mlp(x, gate_up, down) makes the MLP wherever the table has no entry, linear(x, weight, bias) its second product where the
    entry leaves it.
    """

    def normed_mlp(
        x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, eps: float, gate_up: torch.Tensor, down: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def launch(entry: table.Normed, rows: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            inner, kept = kernels.run_normed(entry.tile, rows, other, gamma, eps, gate_up, gated=True)
            second = linear(inner, down, None) if entry.second is None else kernels.run(entry.second, inner, down)
            return second, kept

        def prepare(entry: table.Normed, rows: int) -> object:
            empty = x.new_zeros((rows, x.shape[1]))
            return launch(entry, empty, empty)

        entry = chooser.find(x, (gate_up,), prepare) if gate_up.shape[0] == 2 * down.shape[1] else None
        if entry is None or not _contiguous(x, residual, gamma, down):
            y, kept = kernels.add_norm(x.contiguous(), residual.contiguous(), gamma.contiguous(), eps)
            return mlp(y, gate_up, down), kept
        return launch(entry, x, residual)

    def fake(
        x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, eps: float, gate_up: torch.Tensor, down: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty((*x.shape[:-1], down.shape[0])), torch.empty_like(residual)

    return register(name, normed_mlp, fake)


def _contiguous(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def register(name: str, function: Callable[..., object], fake: Callable[..., object]) -> Callable[..., object]:
    """The op ``vllm::name``, registered once a process for the platform's dispatch key."""
    if not hasattr(torch.ops.vllm, name):
        from vllm.utils.torch_utils import direct_register_custom_op

        direct_register_custom_op(op_name=name, op_func=function, fake_impl=fake)
    return getattr(torch.ops.vllm, name)
