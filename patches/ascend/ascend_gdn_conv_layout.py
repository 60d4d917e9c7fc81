"""Lay the GDN convolution's weight out once, so that its transposed view needs no copy.

``_forward_core`` hands ``conv1d.weight.view(D, K).transpose(0, 1)`` to an operator that wants it contiguous and
therefore transposes it, per layer and step. After loading, the parameter's memory is put into the order of the
transposed view. It stays the same parameter with the same shape and values: loading new weights into it writes through,
where a cache keyed by its address would go stale.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target

_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"

PATCH = Patch(
    id="ascend-gdn-conv-layout",
    kind=Kind.CODE,
    summary="Store GDN convolution weights in the order in which their operator reads them",
    why=(
        "The operator's weight is declared AutoContiguous, so that each GDN layer transposes it every step: about "
        "4.3 us x 30 layers on Ascend 910C (reported by others); not measured here."
    ),
    remove_when="vllm-ascend stores the weight transposed",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner.load_model",
            use="load_model",
            fingerprints={"vllm-ascend 0.23.0": "72fec91c7a931619"},
        ),
    ),
    assumes=(Target(at=f"{_GDN}._forward_core", fingerprints={"vllm-ascend 0.23.0": "804ec8b41e6a2497"}),),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        archs=("ascend910b", "ascend910_93"),  # the 310P path wants the weight as it is
        facts={"model.hybrid": True},
    ),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    live=("model_runner",),
    verified="simulated",
    tests="tests/ascend/test_gdn.py",
)

count = Counters(PATCH.id)


def lay_out(weight: Any) -> bool:
    """Reorder the memory of ``weight`` [channels, 1, width] in place of its values' order; False where it is not that.

    Afterwards ``weight.view(channels, width).transpose(0, 1)`` is contiguous.
    """
    if weight.dim() != 3 or weight.shape[1] != 1:
        return False
    channels, _, width = weight.shape
    matrix = weight.data.view(channels, width)
    if not matrix.t().is_contiguous():
        weight.data = matrix.t().contiguous().t().unsqueeze(1)
    return True


def load_model(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """After the target and the draft model are loaded."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    result = wrapped(*args, **kwargs)
    for model in (instance.model, getattr(getattr(instance, "drafter", None), "model", None)):
        for module in getattr(model, "modules", list)():
            if isinstance(module, QwenGatedDeltaNetAttention):
                if lay_out(module.conv1d.weight):
                    count.hit()
                else:
                    count.refuse("a weight of another shape")
    return result
