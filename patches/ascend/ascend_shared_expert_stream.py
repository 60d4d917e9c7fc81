"""Keep the shared experts' all-reduce on the side stream that computes them.

With ``multistream_overlap_shared_expert``, ``_forward_shared_experts`` computes on a side stream, joins it and only then
all-reduces the result, on the default stream behind the routed experts. The all-reduce moves to the side stream here,
and the join behind it. It runs there only where the computation ran there too: the side stream's wait for the default
stream (the event before the routed experts) then stands before both. Started on the side stream behind a computation
that stayed on the default one, as while a graph is captured in the published version of this idea, it would race.

Two communications then run at once, on two streams, which can deadlock (vllm-ascend PR 12237, for fused MC2 with AIV
communication): never with fused MC2, with AIV only when asked for, and not under FlashComm with data parallelism.
vllm-ascend's exclusion of fused MC2 together with the overlap stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.runtime import Counters, options
from overlay.spec import REPLACE, Condition, Exactness, Kind, Option, Patch, Target

PATCH = Patch(
    id="ascend-shared-expert-stream",
    kind=Kind.CODE,
    summary="All-reduce the shared experts on their side stream, in parallel with the routed experts",
    why=(
        "The all-reduce waits for the routed experts although it needs nothing of them: 0.3 ms of c1 TPOT on Ascend "
        "910C in a report by others; not measured here."
    ),
    remove_when="vllm-ascend reduces the shared experts before it joins their stream",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm_ascend.ops.fused_moe.fused_moe_0_23_0:AscendFusedMoE._forward_shared_experts",
            use="make",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "8c9d611633864f42"},
        ),
    ),
    assumes=(
        Target(
            at="vllm_ascend.ops.fused_moe.fused_moe_0_23_0:AscendFusedMoE.shared_forward_impl",
            fingerprints={"vllm-ascend 0.23.0": "0edfbeb2487b646d"},
        ),
        Target(at="vllm_ascend.utils:npu_stream_switch", fingerprints={"vllm-ascend 0.23.0": "2aeebe57d1af1921"}),
    ),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        facts={"model.moe": True},
        also="no_second_communication",
    ),
    options={"allow_aiv": Option(False, "with HCCL_OP_EXPANSION_MODE=AIV too: two AIV communications may deadlock")},
    conflicts=("ascend-fused-mc2",),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    default=False,  # no race in the checker; whether HCCL can be made to deadlock is not provable without the device
    verified="simulated",
    tests="tests/ascend/test_shared_experts.py",
)

count = Counters(PATCH.id)


def no_second_communication(facts: Any) -> str | None:
    """Settings under which two communications at once are known to hang."""
    if facts.env.get("VLLM_ASCEND_ENABLE_FUSED_MC2", "0") not in ("", "0"):
        return "fused MC2 beside another stream's all-reduce can deadlock (vllm-ascend PR 12237)"
    if facts.env.get("VLLM_ASCEND_ENABLE_FLASHCOMM1", "0") not in ("", "0") and facts.serving.data_parallel != 1:
        return "FlashComm1 with data parallelism and the overlap hangs (vllm-ascend issue 16446)"
    return None


def on_side_stream(layer: Any) -> bool:
    """Whether the all-reduce may follow the computation on the side stream, this time."""
    import os

    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.ascend_forward_context import _EXTRA_CTX, MoECommType

    if not layer.multistream_overlap_shared_expert:
        count.refuse("no overlap")
    elif _EXTRA_CTX.moe_comm_type not in (MoECommType.MC2, MoECommType.ALLTOALL):
        count.refuse("another kind of MoE communication")
    elif get_ascend_config().enable_fused_mc2:
        count.refuse("fused MC2")
    elif _EXTRA_CTX.flash_comm_v1_enabled:
        count.refuse("FlashComm1")
    elif os.environ.get("HCCL_OP_EXPANSION_MODE", "").upper() == "AIV" and not options(PATCH.id).get("allow_aiv"):
        count.refuse("AIV communication")
    else:
        count.hit()
        return True
    return False


def make(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_forward_shared_experts`` with its all-reduce before the join, on the side stream."""
    from patches._lib.ascend_edited_source import edited

    join = """if self.multistream_overlap_shared_expert:
    torch.npu.current_stream().wait_stream(shared_experts_calculation_stream())"""
    return edited(
        original,
        statements={
            join: "_overlay_side = _overlay_on_side_stream(self)\nif not _overlay_side:\n"
            + "\n".join(f"    {line}" for line in join.splitlines()),
            "shared_out = tensor_model_parallel_all_reduce(shared_out)": (
                "with npu_stream_switch(shared_experts_calculation_stream(), enabled=_overlay_side):\n"
                "    shared_out = tensor_model_parallel_all_reduce(shared_out)"
            ),
            "return shared_out": (
                "if _overlay_side:\n"
                "    torch.npu.current_stream().wait_stream(shared_experts_calculation_stream())\n"
                "return shared_out"
            ),
        },
        names={"_overlay_on_side_stream": on_side_stream},
    )
