"""Split q, k and v of a single GDN token as views.

``rearrange_mixed_qkv`` copies the packed rows into three contiguous blocks. Of one row the three parts are contiguous
where they lie. The packed row is the convolution's output and is not written afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.runtime import Counters
from overlay.spec import REPLACE, Condition, Exactness, Kind, Patch, Target

_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"

PATCH = Patch(
    id="ascend-gdn-qkv-views",
    kind=Kind.CODE,
    summary="Split a single GDN token's q, k and v without a copy",
    why=(
        "Each GDN layer concatenates q, k and v anew in every step: about 123 us a step for 30 layers on Ascend 910C "
        "(reported by others); not measured here. Only for decode of one request without speculation."
    ),
    remove_when="vLLM splits without a copy where the parts are contiguous",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at=f"{_GDN}.rearrange_mixed_qkv",
            use="make",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "44bfe2c6abb1779b"},
        ),
    ),
    assumes=(Target(at=f"{_GDN}._forward_core", fingerprints={"vllm-ascend 0.23.0": "804ec8b41e6a2497"}),),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        facts={"model.hybrid": True},
    ),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    verified="simulated",
    tests="tests/ascend/test_gdn.py",
)

count = Counters(PATCH.id)


def make(original: Callable[..., Any]) -> Callable[..., Any]:
    """``rearrange_mixed_qkv``: [tokens, 2 key_dim + value_dim] -> q, k, v as [1, tokens, heads, head_dim]."""

    def rearrange_mixed_qkv(self: Any, mixed_qkv: Any) -> Any:
        if mixed_qkv is None:
            return None, None, None
        if mixed_qkv.shape[0] != 1 or mixed_qkv.stride(-1) != 1:
            count.refuse("more than one token" if mixed_qkv.shape[0] != 1 else "not contiguous")
            return original(self, mixed_qkv)
        count.hit()
        key, value = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = mixed_qkv[0].split([key, key, value])
        return (
            q.view(1, 1, -1, self.head_k_dim),
            k.view(1, 1, -1, self.head_k_dim),
            v.view(1, 1, -1, self.head_v_dim),
        )

    return rearrange_mixed_qkv
