"""Fused MoE dispatch, computation and combination (VLLM_ASCEND_ENABLE_FUSED_MC2=1).

vllm-ascend 0.23.0 then asserts quantised expert weights with scales (``FusedMC2CommImpl.fused_experts``): with bf16
experts the server stops at its first MoE layer. The shared experts' overlap is switched off by vllm-ascend where this
is on, because the two can deadlock (PR 12237), and stays so here.

Its sibling in the reports, more than 512 tokens a rank through MC2, is not taken over: the operator's documentation
allows at most 512 on Atlas A3 and 256 on A2, and decode graphs of up to 512 tokens never reach the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay.spec import Check, Condition, Contribution, Exactness, Kind, Patch, at_least

PATCH = Patch(
    id="ascend-fused-mc2",
    kind=Kind.CONFIG,
    summary="Run MoE dispatch, experts and combine as one operator (FUSED_MC2 = 1)",
    why="A steady gain for 35B-A3B on Ascend 910C in a report by others, without a number; not measured here.",
    remove_when="vllm-ascend selects fused MC2 by itself",
    exactness=Exactness.ROUNDING,
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        archs=("ascend910_93",),
        facts={
            "model.moe": True,
            "serving.tensor_parallel": at_least(2),
            "serving.quantization": Check("a quantised model (fused MC2 asserts expert scales)", bool),
        },
    ),
    config="contribute",
    default=False,
    verified="simulated",
    tests="tests/ascend/test_config.py",
)

LIMIT = (
    "MC2 keeps its limit of 512 tokens a rank: the operator's documentation forbids more "
    "(npu_moe_distribute_dispatch: 512 on Atlas A3, 256 on A2)"
)


def contribute(facts: Any, options: Mapping[str, Any]) -> Contribution:
    """The variable; a value of the user's stands."""
    if facts.env.get("VLLM_ASCEND_ENABLE_FUSED_MC2", "0") not in ("", "0"):
        return Contribution(superseded="VLLM_ASCEND_ENABLE_FUSED_MC2 is set already", notes=(LIMIT,))
    return Contribution(
        env={"VLLM_ASCEND_ENABLE_FUSED_MC2": "1"},
        notes=(LIMIT, "takes effect with --enable-expert-parallel; multistream_overlap_shared_expert is then off"),
    )
