"""Look the rotary cosines and sines of a step up once.

``update_cos_sin`` gathers and repeats the same rows of the cache twice, to keep the cosines of the one result and the
sines of the other. It returns at once for models configured through a nested (vision-language) configuration, Qwen3.5
among them: nothing is gained there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.runtime import Counters
from overlay.spec import REPLACE, Condition, Exactness, Kind, Patch, Target

PATCH = Patch(
    id="ascend-cos-sin-once",
    kind=Kind.CODE,
    summary="Gather rotary cosines and sines together (update_cos_sin)",
    why="Two gathers and two repeats a step where one of each does. Read in the source of vllm-ascend 0.23.0.",
    remove_when="update_cos_sin gathers once",
    exactness=Exactness.BITWISE,
    # Every module that took the name with a from-import.
    targets=tuple(
        Target(
            at=f"vllm_ascend.{module}:update_cos_sin",
            use="make",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "de13be780bd378bf"},
        )
        for module in ("ops.rotary_embedding", "worker.model_runner_v1")
    ),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        facts={"model.multimodal": False},
    ),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    verified="simulated",
    tests="tests/ascend/test_cos_sin.py",
)

count = Counters(PATCH.id)


def make(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The replacement: ``positions`` [tokens] -> the module's cos and sin buffers and their slices."""
    state = original.__globals__

    def update_cos_sin(positions: Any) -> None:
        cache, cos, sin = state["_cos_sin_cache"], state["_cos"], state["_sin"]
        if cache is None or cos is None or sin is None:
            count.refuse("no buffers for this model")
            return
        count.hit()
        tokens = positions.size(0)
        pair = cache.index_select(0, positions).view(tokens, 2, -1).repeat(1, 1, 2)
        cos[:, :tokens] = pair[:, 0:1]
        sin[:, :tokens] = pair[:, 1:2]
        state["_cos_slice"], state["_sin_slice"] = cos[:, :tokens], sin[:, :tokens]

    return update_cos_sin
