"""Shared experts on a side stream: vLLM does it; this entry checks that nothing switched it off.

``SharedExperts._determine_shared_experts_order`` runs them beside the routed experts for up to
VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD tokens (256), on CUDA in every release here (0.18.1: DefaultMoERunner), on ROCm
since 0.30. VLLM_DISABLE_SHARED_EXPERTS_STREAM=1 switches it off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlay.spec import Condition, Contribution, Exactness, Kind, Patch

if TYPE_CHECKING:
    from overlay.facts import Facts

PATCH = Patch(
    id="shared-expert-stream",
    kind=Kind.CONFIG,
    summary="Shared experts beside the routed ones on a second stream: in vLLM already, checked to be on",
    why="The articles' multi-stream overlap of shared experts; upstream has its counterpart since 0.20 and before.",
    remove_when="it is only a check: whenever nobody asks for it any more",
    exactness=Exactness.BITWISE,
    condition=Condition(
        vllm=">=0.18.1,<0.34", platforms=("cuda", "rocm", "dcu"), facts={"model.moe": True}, also="has_the_stream"
    ),
    config="contribute",
    verified="simulated",
    tests="tests/config_patches/test_config_patches.py",
)


def has_the_stream(facts: Facts) -> str | None:
    release = tuple(int(part) for part in re.findall(r"\d+", facts.build.public or "0")[:2])
    if facts.hardware.platform != "cuda" and release < (0, 30):
        return "before 0.30 vLLM has the side stream on CUDA only"
    return None


def contribute(facts: Facts, options: Mapping[str, Any]) -> Contribution:
    off = facts.env.get("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "0").strip()
    if off not in ("", "0"):
        return Contribution(
            nothing=f"VLLM_DISABLE_SHARED_EXPERTS_STREAM={off} switches vLLM's own side stream off: unset it to have it"
        )
    threshold = facts.env.get("VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD", "256").strip()
    if threshold.isdigit() and int(threshold) == 0:
        return Contribution(nothing="VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD=0 keeps vLLM's side stream unused")
    return Contribution(superseded=f"vLLM runs shared experts on a side stream itself, for up to {threshold} tokens (it is on)")
