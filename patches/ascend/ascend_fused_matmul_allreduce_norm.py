"""The fused matmul, all-reduce, add and RMS norm, where an image has it for this chip.

vllm-ascend 0.23.0 brings the operator and a compilation pass that uses it, with kernels for Atlas A2 (ascend910b) alone;
on 910C (ascend910_93) its verification fails. An image built with kernels for 910C is known by its kernel
configuration. Then vllm-ascend's own pass is switched on, whose fallbacks are its own: it rewrites only graphs that match
its pattern, in compile ranges above 512 tokens, and leaves every other graph as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay.spec import Condition, Contribution, Exactness, Kind, Patch, at_least

PATCH = Patch(
    id="ascend-fused-matmul-allreduce-norm",
    kind=Kind.CONFIG,
    summary="Fuse o_proj, all-reduce, residual add and RMS norm, on images that have the operator for this chip",
    why=(
        "The sequence runs in every layer: 5.2 to 5.1 ms c1 TPOT and 213 to 179 ms TTFT with a purpose-built operator on "
        "Ascend 910C in a report by others; not measured here."
    ),
    remove_when="vllm-ascend enables the pass where the operator exists",
    exactness=Exactness.ROUNDING,  # the all-reduce becomes reduce-scatter and all-gather
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        facts={"serving.tensor_parallel": at_least(2)},
        also="operator_missing",
    ),
    config="contribute",
    default=False,
    verified="simulated",
    tests="tests/ascend/test_probes.py",
)

OPERATOR = "matmul_allreduce_add_rmsnorm"


def operator_missing(facts: Any) -> str | None:
    """A build without a kernel of the operator for this chip."""
    from patches._lib.ascend_build import kernel_built_for

    if facts.hardware.arch is None or not kernel_built_for(facts, OPERATOR, facts.hardware.arch):
        return "the build has no such operator"
    return None


def contribute(facts: Any, options: Mapping[str, Any]) -> Contribution:
    """vllm-ascend's own switch of its pass."""
    return Contribution(args={"additional_config.ascend_compilation_config.fuse_allreduce_rms": True})
