"""Prefetch the next layer's attention weights into the L2 cache while MoE experts run.

The experts' phase is the longest of a layer and waits on communication. On entering it, a side stream prefetches the
next attention layer's projection weights; on leaving it the default stream joins. A prefetch is a hint and changes no
value. Whether it helps, and how much of the cache it should take, only the device can tell.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters, options
from overlay.spec import Condition, Exactness, Kind, Option, Patch, Target

PATCH = Patch(
    id="ascend-attention-prefetch",
    kind=Kind.CODE,
    summary="Prefetch the next layer's attention weights while the MoE experts run",
    why=(
        "Attention projections wait for their weights from HBM while the MoE phase before leaves bandwidth unused; part "
        "of 0.2 ms on Ascend 910C in a report by others; not measured here."
    ),
    remove_when="vllm-ascend prefetches attention weights during MoE",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm_ascend.ops.fused_moe.fused_moe_0_23_0:AscendFusedMoE.shared_forward_impl",
            use="moe",
            fingerprints={"vllm-ascend 0.23.0": "0edfbeb2487b646d"},
        ),
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner.load_model",
            use="load_model",
            fingerprints={"vllm-ascend 0.23.0": "72fec91c7a931619"},
        ),
    ),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        facts={"model.moe": True},
    ),
    options={"max_bytes": Option(18 << 20, "most bytes of one weight to prefetch")},
    after=("ascend-gdn-conv-layout", "ascend-gemma-norm-weight"),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    default=False,  # changes no value; its benefit is unproven
    verified="simulated",
    tests="tests/ascend/test_attention_prefetch.py",
)

count = Counters(PATCH.id)

PROJECTIONS = ("qkv_proj", "o_proj", "in_proj_qkvz", "in_proj_qkv", "out_proj")

_stream: list[Any] = []


def _side() -> Any:
    import torch

    if not _stream:
        _stream.append(torch.npu.Stream())
    return _stream[0]


def plan(model: Any) -> int:
    """Tell every MoE module in ``model`` the attention weights that come next; how many modules were told."""
    from vllm_ascend.ops.fused_moe.fused_moe_0_23_0 import AscendFusedMoE

    waiting: list[Any] = []
    told = 0
    for name, module in getattr(model, "named_modules", list)():
        if isinstance(module, AscendFusedMoE):
            waiting = [module]
        elif waiting and name.rpartition(".")[2] in PROJECTIONS and getattr(module, "weight", None) is not None:
            if not hasattr(waiting[0], "_overlay_next_attention"):
                waiting[0]._overlay_next_attention = []
                told += 1
            waiting[0]._overlay_next_attention.append(module)
    return told


def load_model(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    count.add("layers", plan(instance.model))
    return result


def moe(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``shared_forward_impl`` between a fork that prefetches and its join (which a captured graph needs)."""
    import torch
    import torch_npu

    following = getattr(instance, "_overlay_next_attention", None)
    if not following:
        count.refuse("no attention layer follows")
        return wrapped(*args, **kwargs)
    hidden_states = args[0] if args else kwargs["hidden_states"]
    limit = options(PATCH.id).get("max_bytes", 18 << 20)
    side, default = _side(), torch.npu.current_stream()
    side.wait_stream(default)
    with torch.npu.stream(side):
        for module in following:
            size = min(module.weight.numel() * module.weight.element_size(), limit)
            torch_npu.npu_prefetch(module.weight, hidden_states, size)
    count.hit()
    try:
        return wrapped(*args, **kwargs)
    finally:
        default.wait_stream(side)
