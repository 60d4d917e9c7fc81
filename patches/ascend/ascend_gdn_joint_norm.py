"""Normalise q and k of a GDN layer in one launch.

``_forward_core`` calls ``l2norm_fwd`` on q and then on k. The kernel works row by row, and k's rows lie directly behind
q's in memory (both are parts of one buffer), so that one call over the rows of both gives the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.runtime import Counters
from overlay.spec import REPLACE, Condition, Exactness, Kind, Patch, Target

_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"

PATCH = Patch(
    id="ascend-gdn-joint-norm",
    kind=Kind.CODE,
    summary="One l2norm launch for q and k of a GDN layer in place of two",
    why=(
        "Two launches per GDN layer and step of a kernel over a few rows. Folding the norm into the recurrent operator "
        "gained 0.4 ms of 8.9 on Ascend 910C in a report by others; one launch less is about half of that work's launches; "
        "not measured here."
    ),
    remove_when="the recurrent operator normalises q and k itself",
    exactness=Exactness.BITWISE,
    targets=(
        Target(at=f"{_GDN}._forward_core", use="make", how=REPLACE, fingerprints={"vllm-ascend 0.23.0": "804ec8b41e6a2497"}),
    ),
    assumes=(
        Target(at=f"{_GDN}.rearrange_mixed_qkv", fingerprints={"vllm-ascend 0.23.0": "44bfe2c6abb1779b"}),
        Target(
            at="vllm.model_executor.layers.fla.ops.l2norm:l2norm_fwd",
            fingerprints={"vllm-ascend 0.23.0": "46da28e8f3e6c5d4"},
        ),
    ),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        archs=("ascend910b", "ascend910_93"),
        facts={"model.hybrid": True},
    ),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    default=False,  # equal in Triton's interpreter; how triton-ascend compiles the larger launch is unproven
    verified="simulated",
    tests="tests/ascend/test_gdn.py",
)

count = Counters(PATCH.id)

PAIRS = ("spec", "decode", "non_spec")  # the suffixes of the variables q and k in _forward_core


def make(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_forward_core`` with each pair of ``l2norm_fwd`` calls as one call of ``_overlay_norm``."""
    from patches._lib.ascend_edited_source import edited

    norm = original.__globals__["l2norm_fwd"]

    def both(query: Any, key: Any) -> tuple[Any, Any]:
        return normalise(norm, query, key)

    statements = {}
    for name in PAIRS:
        statements[f"query_{name} = l2norm_fwd(query_{name})"] = (
            f"query_{name}, key_{name} = _overlay_norm(query_{name}, key_{name})"
        )
        statements[f"key_{name} = l2norm_fwd(key_{name})"] = "pass"
    return edited(original, statements=statements, names={"_overlay_norm": both})


def normalise(norm: Callable[[Any], Any], query: Any, key: Any) -> tuple[Any, Any]:
    """(norm(query), norm(key)), in one call where the rows of ``key`` follow those of ``query`` in memory."""
    adjacent = (
        query.dtype == key.dtype
        and query.shape[-1] == key.shape[-1]
        and query.is_contiguous()
        and key.is_contiguous()
        and query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
        and key.storage_offset() == query.storage_offset() + query.numel()
    )
    if not adjacent:
        count.refuse("q and k do not lie side by side")
        return norm(query), norm(key)
    count.hit()
    width = query.shape[-1]
    rows = query.numel() // width
    whole = norm(query.as_strided((rows + key.numel() // width, width), (width, 1)))
    return whole[:rows].view(query.shape), whole[rows:].view(key.shape)
