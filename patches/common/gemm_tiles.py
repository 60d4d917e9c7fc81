"""Unquantised linear layers of decode steps by measured kernels, in place of the platform's own GEMM.

A decode step multiplies one to sixteen rows with every weight of the model. For those sizes the platform's library is
chosen for large products; a kernel picked per shape from a measured table is faster for most of them, on NVIDIA most
of all where N or K is small. One custom op takes the place of vLLM's function: it looks at the rows when it runs, so
that torch.compile sees one op and every captured graph holds the kernel of its own size.

The gate, at every call: the table of exactly this chip and Triton release has exactly this dtype, number of rows, N and
K; x and weight are plain two-dimensional matrices. Otherwise the original runs. Another summation order is another
rounding: exactness ``rounding``.

On ROCm, vLLM's fusion passes look for ``vllm::rocm_unquantized_gemm`` in the graph: with this patch they do not find it, and
what they would fuse stays apart (the same answers; measure it where AITER's fusions are on).

Counters: ``hit`` and ``hit MxNxK`` count eager calls and graph captures. A replayed graph runs none of this code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.facts import Facts
from overlay.runtime import Counters
from overlay.spec import REPLACE, Condition, Exactness, Kind, Option, Patch, Target

_UTILS = "vllm.model_executor.layers.utils"
_ROCM = {"0.18.1": "0b3c1f363072d908", "0.23.0": "0b3c1f363072d908", "0.26.0": "0b3c1f363072d908", "0.28.0": "0b3c1f363072d908",
         "0.32.0": "99c0211f571bf1af", "0.33.0": "99c0211f571bf1af"}  # fmt: skip

PATCH = Patch(
    id="gemm-tiles",
    kind=Kind.CODE,
    summary="decode's unquantised matrix products by kernels from a measured table",
    why=(
        "With 1 to 16 rows the platform's GEMM leaves bandwidth unused: on one NVIDIA H200 (bf16, one row, weights from "
        "memory, graph replay) cuBLAS took 12.3 us for 1024 x 2048 where 3.2 us do, 11.1 for 6144 x 2560 (9.4), 49.2 for "
        "5120 x 17408 (41.9). Linear layers are most of a decode step."
    ),
    remove_when="the platform's own GEMM is as fast for few rows (`python -m overlay tune MODEL` keeps no entry)",
    exactness=Exactness.ROUNDING,
    targets=(
        Target(
            at=f"{_UTILS}:default_unquantized_gemm",
            use="tiled_gemm",
            how=REPLACE,
            fingerprints={f"vllm {release}": "6dc52154293e283d" for release in _ROCM},
        ),
        Target(
            at=f"{_UTILS}:rocm_unquantized_gemm",
            use="tiled_rocm_gemm",
            how=REPLACE,
            fingerprints={f"vllm {release}": digest for release, digest in _ROCM.items()},
        ),
    ),
    condition=Condition(vllm=">=0.18.1,<0.34", platforms=("cuda", "rocm", "dcu"), also="unusable"),
    options={
        "tables": Option("", "a folder with tables of your own, used before the shipped ones"),
        "max_rows": Option(16, "use no kernel for more rows than this"),
    },
    advert="measured_gain",
    tests="tests/gemm",
    measured="ab_runs/results/gemm",
)

count = Counters(PATCH.id)


def unusable(facts: Facts) -> str | None:
    """A reason not to use the patch on these facts: no table for this device, or batch invariance."""
    from patches._lib.gemm import summary

    return summary.batch_invariant(facts) or summary.no_table(facts)


def measured_gain(facts: Facts) -> str | None:
    """One line on what this patch was measured to bring on this hardware and model, or None where nothing was."""
    from patches._lib.gemm import summary

    return summary.measured_gain(facts)


def tiled_gemm(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of ``default_unquantized_gemm(layer, x, weight, bias)`` on NVIDIA."""
    import torch

    return _replacement(original, "overlay_gemm", torch.nn.functional.linear)


def tiled_rocm_gemm(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of ``rocm_unquantized_gemm(layer, x, weight, bias)``, whose own op stays the fallback."""
    import torch

    def stock(x: Any, weight: Any, bias: Any) -> Any:
        return torch.ops.vllm.rocm_unquantized_gemm(x, weight, bias)

    return _replacement(original, "overlay_rocm_gemm", stock)


def _replacement(original: Callable[..., Any], name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    from patches._lib.gemm import dispatch

    dtypes = tuple(dispatch.DTYPES)
    op = dispatch.linear_op(name, dispatch.Chooser(PATCH.id, count), stock)

    def unquantized_gemm(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        if x.is_cuda and weight.dtype in dtypes and x.dtype == weight.dtype and weight.dim() == 2:
            return op(x, weight, bias)
        return original(layer, x, weight, bias)

    return unquantized_gemm
