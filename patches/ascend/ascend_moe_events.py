"""Do not record MoE events that nothing waits for.

Each MoE layer records up to three events around its dispatch, its second matmul and its combine. Only the shared
experts' side stream waits for them (``multistream_overlap_shared_expert``), and there they only space its work out: what
orders data is another event, ``before_routed_experts``. Without a side stream the waits are on the stream that recorded
the events, and say nothing. Consumers already accept None in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.runtime import Counters
from overlay.spec import REPLACE, Condition, Exactness, Kind, Option, Patch, Target

PATCH = Patch(
    id="ascend-moe-events",
    kind=Kind.CODE,
    summary="Record MoE dispatch, gmm2 and combine events only where a side stream waits for them",
    why=(
        "moe_comm_method.py and moe_mlp.py record their events in every MoE layer, with the overlap off as well (seen "
        "in a real fused_experts call: three records). A report by others puts part of 0.2 ms on Ascend 910C down to "
        "them; not measured here."
    ),
    remove_when="vllm-ascend records these events only for the overlap",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm_ascend.ops.fused_moe.moe_comm_method:MoECommMethod.fused_experts",
            use="make_fused_experts",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "42b5810a4106405a"},
        ),
        Target(
            at="vllm_ascend.ops.fused_moe.moe_mlp:quant_apply_mlp",
            use="make_quant_mlp",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "c905d2458ec161de"},
        ),
    ),
    assumes=(
        Target(
            at="vllm_ascend.ops.fused_moe.fused_moe_0_23_0:AscendFusedMoE._forward_shared_experts",
            fingerprints={"vllm-ascend 0.23.0": "8c9d611633864f42"},
        ),
    ),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        facts={"model.moe": True},
    ),
    options={"keep_hints": Option(True, "with the overlap on, record them: they space out the side stream's work")},
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    verified="simulated",
    tests="tests/ascend/test_shared_experts.py",
)

count = Counters(PATCH.id)


def event() -> Any:
    """An event recorded on the current stream, or None where nothing will wait for it."""
    import torch
    from vllm_ascend.ascend_config import get_ascend_config

    from overlay.runtime import options

    if get_ascend_config().multistream_overlap_shared_expert and options(PATCH.id).get("keep_hints", True):
        count.refuse("the side stream waits for it")
        return torch.npu.current_stream().record_event()
    count.hit()
    return None


def _without_records(original: Callable[..., Any], times: int) -> Callable[..., Any]:
    from patches._lib.ascend_edited_source import edited

    return edited(
        original,
        expressions={"torch.npu.current_stream().record_event()": "_overlay_event()"},
        times=times,
        names={"_overlay_event": event},
    )


def make_fused_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    return _without_records(original, 2)


def make_quant_mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    return _without_records(original, 3)
