"""Rows per block of ROCm's one-row product ``LLMM1`` from a table, where the build's dispatch reaches that op.

``LLMM1(weight, x, rows_per_block)`` computes one row of x; how many rows of the weight a block takes is its last
argument, and vLLM always passes 4. The best number depends on the chip and the shape. The arithmetic of a row does not
depend on it: the published measurement saw equal bits, and exactness is ``bitwise``.

gfx936, (out, in) of Qwen3.5-27B's attention qkv, GDN qkvz and gate/up projections, bf16, measured standalone (10 warm-up,
40 measured runs): 4 -> 2 rows per block took 0.1142 -> 0.1065 ms, 0.1310 -> 0.1210 ms and 0.2725 -> 0.2504 ms; served at
concurrency 1 it gave 2.4 to 4.0% more output tokens. Every other shape keeps what the caller passed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from overlay.facts import Facts
from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target

# architecture -> (rows of the weight, columns) -> rows per block
TABLE = {"gfx936": {(14336, 5120): 2, (16384, 5120): 2, (34816, 5120): 2}}

_UTILS = "vllm.model_executor.layers.utils"
# rocm_unquantized_gemm_impl of upstream: more than 8 rows of weight go to wvSplitK before LLMM1 is asked
_UPSTREAM = {
    "45d1524f47421c69": "0.18.1", "aa911e65ae20398e": "0.23.0", "42d733d9c8df8a9c": "0.28.0", "998b98a5e35bd31a": "0.32.0",
    "a78a2c8f508c9ec9": "0.33.0",
}  # fmt: skip

PATCH = Patch(
    id="llmm1-rows-per-block",
    kind=Kind.CODE,
    summary="ROCm: rows per block of the one-row product from a measured table",
    why=(
        "On gfx936 the fixed 4 rows per block cost 7 to 9% of the kernel's time for three of Qwen3.5-27B's shapes "
        "(published standalone and served measurements, bf16, one row)."
    ),
    remove_when="vLLM chooses rows per block by shape",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm._custom_ops:LLMM1",
            use="llmm1",
            fingerprints={
                f"vllm {v}": "9403d84917fe6b03" for v in ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")
            },
        ),
    ),
    condition=Condition(vllm=">=0.18.1,<0.34", platforms=("rocm", "dcu"), archs=tuple(TABLE), also="never_reached"),
    verified="simulated",
    tests="tests/gemm/test_llmm1.py",
)

count = Counters(PATCH.id)


def never_reached(facts: Facts) -> str | None:
    """Why this build never calls LLMM1 with a shape of the table, or None: read from its files, nothing is imported."""
    from overlay.fingerprint import MissingTarget, from_source

    if not facts.build.root:
        return "the folder of the package vllm is unknown, so that its GEMM dispatch cannot be read"
    package = Path(facts.build.root)
    way_out = "gemm-tiles with a table of this chip is the way here: python -m overlay tune MODEL"
    extensions = [path for path in package.glob("_rocm_C*.so") if b"LLMM1" in path.read_bytes()]
    if not extensions:
        return f"this wheel lacks the op: there is no vllm._rocm_C with LLMM1 in {package}. {way_out}"
    try:
        digest = from_source(package.parent, _UTILS, "rocm_unquantized_gemm_impl")
    except MissingTarget as error:
        return f"this build has no ROCm dispatch of unquantised products: {error}"
    if digest in _UPSTREAM:
        return (
            f"this build's dispatch is upstream's ({_UPSTREAM[digest]}): products with more than 8 rows of weight go to "
            f"wvSplitK, or past both on {facts.hardware.arch}, and LLMM1 is never asked for the table's shapes. {way_out}"
        )
    if "LLMM1" not in (package / "model_executor" / "layers" / "utils.py").read_text(encoding="utf-8"):
        return f"this build's dispatch never calls LLMM1. {way_out}"
    return None


def architecture() -> str:
    """The architecture of this process's device, such as ``gfx936``."""
    import torch

    return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]


_here: dict[tuple[int, int], int] | None = None


def llmm1(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place of ``LLMM1(a, b, rows_per_block)``. a: the weight [out, in]; b: x [1, in]."""
    global _here
    if _here is None:
        _here = TABLE.get(architecture(), {})
    if kwargs or len(args) != 3:
        count.refuse("called by keyword")
        return wrapped(*args, **kwargs)
    weight, x, rows = args
    found = _here.get((weight.shape[0], weight.shape[1]))
    if found is None:
        count.refuse("shape not in the table")
        return wrapped(weight, x, rows)
    count.hit()
    return wrapped(weight, x, found)
