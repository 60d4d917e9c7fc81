"""Keep 1 + weight of Gemma-style RMS norms in place of adding it in every forward pass.

``AscendGemmaRMSNorm`` adds 1 to its weight for each fused add-and-norm, and Qwen3.5's attention for its q and k norms.
The sum is kept in a buffer of the module, made after loading and made again after everything that may change weights: a
reload, a weight update, waking up. A module without the buffer adds as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.runtime import Counters
from overlay.spec import REPLACE, Condition, Exactness, Kind, Patch, Target

PATCH = Patch(
    id="ascend-gemma-norm-weight",
    kind=Kind.CODE,
    summary="Keep 1 + weight of Gemma RMS norms, made again whenever weights are loaded",
    why=(
        "Two small kernels per layer and step for a sum that changes only with the weights (40 layers, two norms, in "
        "a report on Ascend 910C by others); not measured here."
    ),
    remove_when="vllm-ascend folds the 1 into the weight at load",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm_ascend.ops.layernorm:AscendGemmaRMSNorm.forward_oot",
            use="make_norm",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "e18970dea64c817c"},
        ),
        Target(
            at="vllm.model_executor.models.qwen3_next:Qwen3NextAttention.forward",
            use="make_attention",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "01100cc62584d05e"},
        ),
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner.load_model",
            use="refresh_runner",
            fingerprints={"vllm-ascend 0.23.0": "72fec91c7a931619"},
        ),
        Target(
            at="vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights",
            use="refresh_runner",
            fingerprints={"vllm-ascend 0.23.0": "5a5ba9ffccecddfe"},
        ),
        Target(
            at="vllm_ascend.worker.worker:NPUWorker.update_weights",
            use="refresh_worker",
            fingerprints={"vllm-ascend 0.23.0": "b8ab518156a273cb"},
        ),
        Target(
            at="vllm_ascend.worker.worker:NPUWorker.finish_weight_update",
            use="refresh_worker",
            fingerprints={"vllm-ascend 0.23.0": "847b1541756edfd9"},
        ),
        Target(
            at="vllm_ascend.worker.worker:NPUWorker.wake_up",
            use="wake_up",
            fingerprints={"vllm-ascend 0.23.0": "15b050ab3e164091"},
        ),
    ),
    condition=Condition(plugins={"vllm_ascend": "==0.23.0"}, platforms=("ascend",), runner="V1"),
    after=("ascend-gdn-conv-layout", "ascend-block-table-dirty"),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    # Exact as long as weights change through the calls above. A trainer that writes into parameters by itself
    # (reinforcement learning in one process) leaves the buffer behind, unseen.
    default=False,
    verified="simulated",
    tests="tests/ascend/test_gemma_norm.py",
)

count = Counters(PATCH.id)

NAME = "overlay_one_plus_weight"


def _with_buffer(owner: str) -> str:
    return f"({owner}.{NAME} if hasattr({owner}, {NAME!r}) else 1.0 + {owner}.weight)"


def make_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """``forward_oot``, its two sums read from the buffer."""
    from patches._lib.ascend_edited_source import edited

    return edited(original, expressions={"1.0 + self.weight": _with_buffer("self")}, times=2)


def make_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """vllm-ascend's attention of Qwen3-Next and Qwen3.5, the sums of its q and k norms read from their buffers."""
    from patches._lib.ascend_edited_source import edited

    return edited(
        original,
        expressions={f"1.0 + self.{name}.weight": _with_buffer(f"self.{name}") for name in ("q_norm", "k_norm")},
    )


def refresh(model: Any) -> int:
    """Make the buffer of every Gemma norm in ``model`` anew, in place where there is one; how many there are."""
    import torch
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    found = 0
    for module in getattr(model, "modules", list)():
        if not isinstance(module, GemmaRMSNorm):
            continue
        found += 1
        with torch.no_grad():
            total = 1.0 + module.weight.data
            kept = getattr(module, NAME, None)
            if kept is None or kept.shape != total.shape or kept.dtype != total.dtype or kept.device != total.device:
                module.register_buffer(NAME, total, persistent=False)
            else:
                kept.copy_(total)  # captured graphs read this memory
    return found


def _refresh_all(runner: Any) -> None:
    for model in (getattr(runner, "model", None), getattr(getattr(runner, "drafter", None), "model", None)):
        count.add("buffers", refresh(model))


def refresh_runner(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    finally:
        _refresh_all(instance)


def refresh_worker(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    finally:
        _refresh_all(getattr(instance, "model_runner", None))


def wake_up(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """After the weights came back; while only the KV cache wakes they may have no memory."""
    result = wrapped(*args, **kwargs)
    tags = args[0] if args else kwargs.get("tags")
    if tags is None or "weights" in tags:
        _refresh_all(getattr(instance, "model_runner", None))
    return result
