"""More splits of the KV length for FlashAttention 3 where few KV heads leave the device idle.

In captured decode graphs vLLM bounds the number of splits at 32 (``flash_attn_max_num_splits_for_cuda_graph``). One request
with H KV heads on a rank then gives at most 32 x H thread blocks: with two heads 64, on an H200 with 132 multiprocessors.
At long contexts a higher bound fills the device. Another number of splits is another order of summation: ``rounding``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlay.spec import Condition, Contribution, Exactness, Kind, Option, Patch, at_least

if TYPE_CHECKING:
    from overlay.facts import Facts

PATCH = Patch(
    id="flash-split-limit",
    kind=Kind.CONFIG,
    summary="FlashAttention 3 may split long contexts further where few KV heads leave multiprocessors idle",
    why=(
        "32 splits x 2 KV heads are 64 thread blocks at batch 1; an H200 has 132 multiprocessors. At 16,384 tokens a layer "
        "takes 18.5 us with 16 splits and 15.5 us with 32, still falling; more than 32 were not measured."
    ),
    remove_when="vLLM sizes the bound by the device and the KV heads of a rank",
    exactness=Exactness.ROUNDING,
    condition=Condition(
        vllm=">=0.18.1,<0.34",
        platforms=("cuda",),
        archs=("sm90",),
        facts={
            "serving.max_model_len": at_least(16384),
            "serving.batch_invariant": False,
            "model.mla": False,
            "model.attention_free": False,
        },
    ),
    config="contribute",
    options={"limit": Option(0, "the bound to set; 0: by KV heads and multiprocessors, at most 128")},
    default=False,
    verified="simulated",
    tests="tests/config_patches/test_config_patches.py",
    measured="ab_runs/results/host/h200_attention_splits.yaml",
)

_STOCK, _MOST = 32, 128


def contribute(facts: Facts, options: Mapping[str, Any]) -> Contribution:
    serving = facts.serving
    if serving.enforce_eager or "FULL" not in (serving.cudagraph_mode or "FULL").upper():
        return Contribution(nothing="the bound counts in full CUDA graphs only, and none are captured")
    limit = options.get("limit") or 0
    if not limit:
        heads, ranks = facts.model.num_kv_heads, serving.tensor_parallel
        if not heads or not ranks:
            return Contribution(nothing="the number of KV heads a rank is unknown")
        per_rank = max(1, heads // ranks)
        sms = facts.hardware.sms or 132
        limit = _STOCK
        while limit < _MOST and limit * per_rank < 0.9 * sms:
            limit *= 2
        if limit == _STOCK:
            return Contribution(nothing=f"{_STOCK} splits of {per_rank} KV heads fill {sms} multiprocessors")
    return Contribution(args={"attention_config.flash_attn_max_num_splits_for_cuda_graph": limit})
