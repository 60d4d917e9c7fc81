"""The attention metadata of a decode step from the step before.

From one decode step to the next nothing changes in a V2 runner's FlashAttention metadata but the length of the longest
sequence: everything else in them are sizes and views of the same buffers. Each step still builds them anew, some 80 us of
Python an attention group: views, a common description, the builder, the metadata.

They are kept for each padded size, addresses included, and given again with the new length, behind a captured model step
only. What the builder does on the device is done by ``flash-schedule-graph``: kept is what it has captured.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters, options
from overlay.spec import Condition, Exactness, Kind, Option, Patch, Target
from patches._lib.v2_fingerprints import seen
from patches.cuda import flash_schedule_graph

_STATES = "vllm.v1.worker.gpu.model_states"

PATCH = Patch(
    id="attention-metadata-reuse",
    kind=Kind.CODE,
    summary="V2 runner: FlashAttention metadata of a decode step kept from the step before",
    why=(
        "prepare_attn of the model state took 190 to 280 us a step on the host of an H200 (vLLM 0.26.0, Qwen3-0.6B), 135 of "
        "them in the launches that flash-schedule-graph replays: the rest builds the same objects again."
    ),
    remove_when="vLLM keeps the metadata of captured steps",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at=f"{_STATES}.default:DefaultModelState.prepare_attn",
            use="prepare_attn",
            fingerprints=seen("2ac9bb0787c00094 8b79121d72d6e627 4028936b0c50e9cc 49cd4b225241ae84 63b76acb353f617e"),
        ),
    ),
    assumes=(
        Target(
            at="vllm.v1.worker.gpu.attn_utils:build_attn_metadata",
            fingerprints=seen("5702d717ee2ab7fc c36d068121db548c = 0ccc1f16580d85ef ="),
        ),
        Target(
            at="vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.build",
            fingerprints=seen("3d58d41e4fc34e64 2ba758d75df32254 fc9dd3a58003d792 ebfa7394e21bf066 ="),
        ),
        Target(
            at="vllm.v1.worker.utils:AttentionGroup.build_metadata",
            fingerprints=seen("- - - ae317e8176ba2ec7 ="),
            versions=">=0.32.0",
        ),
        Target(
            at="vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata",
            fingerprints=seen("a215d1728e13b591 753e60f0229a9264 350fb2fcfe95776c d065956fcc6ddf62 ="),
        ),
    ),
    condition=Condition(
        vllm=">=0.23.0,<0.34",
        runner="V2",
        platforms=("cuda",),
        archs=("sm90",),
        facts={
            "serving.num_speculative_tokens": 0,
            "serving.enforce_eager": False,
            "serving.decode_context_parallel": 1,
        },
    ),
    options={"shadow": Option(False, "run the original too, and stop at the first difference (slow: for testing)")},
    requires=("flash-schedule-graph",),
    after=("flash-schedule-graph",),
    live=("model_runner.model_state",),
    tests="tests/v2/cases/case_metadata_reuse.py",
    measured="ab_runs/results/host/h200_qwen3_0.6b.yaml",
)

count = Counters(PATCH.id)

_KEPT = "_overlay_attention_metadata"


def prepare_attn(wrapped: Any, state: Any, args: tuple, kwargs: dict) -> Any:
    reason = _refusal(state, args, kwargs)
    if reason is not None:
        count.refuse(reason)
        return wrapped(*args, **kwargs)
    batch, _, tables, slot_mappings, groups, _ = args
    key = (
        batch.num_reqs_after_padding,
        batch.num_tokens_after_padding,
        batch.query_start_loc.data_ptr(),
        batch.seq_lens.data_ptr(),
        slot_mappings.data_ptr(),
        slot_mappings.stride(),
        *(table.data_ptr() for table in tables),
    )
    kept = state.__dict__.get(_KEPT)
    if kept is None or kept[0] is not groups:
        kept = state.__dict__[_KEPT] = (groups, {})
    entry = kept[1].get(key)
    if entry is None:
        metadata = wrapped(*args, **kwargs)
        plans = flash_schedule_graph.plans_of([group.get_metadata_builder(0) for part in groups for group in part], batch)
        if plans is not None and len(kept[1]) < 256:
            kept[1][key] = (metadata, list({id(m): m for m in metadata.values()}.values()), plans)
        count.refuse("not kept yet")
        return metadata
    metadata, objects, plans = entry
    longest = int(batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs_after_padding].max())
    for one in objects:
        one.max_seq_len = longest
    for plan in plans:
        plan.replay()
    count.hit()
    if options(PATCH.id).get("shadow"):
        _shadow(metadata, wrapped(*args, **kwargs))
    return metadata


def _refusal(state: Any, args: tuple, kwargs: dict) -> str | None:
    """Why this call takes the original."""
    if len(args) != 6 or (kwargs and (len(kwargs) > 1 or kwargs.get("for_capture") is not False)):
        return "called in another way"
    batch, mode, _, _, groups, _ = args
    if type(state).__name__ != "DefaultModelState":
        return "a model state of its own"
    if mode.name != "FULL":
        return "not a captured model step"
    if batch.num_reqs != batch.num_tokens or batch.num_draft_tokens:
        return "more than one token a request"
    if batch.dcp_local_seq_lens is not None:
        return "decode context parallelism"
    if getattr(batch, "fast_prefill", None) is not None:
        return "fast prefill"
    if getattr(batch, "prompt_lens", None) is not None:
        return "R-SWA"
    if state.model_config.is_mm_prefix_lm:
        return "bidirectional ranges"
    for group in (group for part in groups for group in part):
        if type(group.get_metadata_builder(0)).__name__ != "FlashAttentionMetadataBuilder":
            return "another attention backend"
        if getattr(group, "kernel_block_size", None) is not None:
            return "block tables mapped for the kernel"
    return None


def _shadow(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare every field of every layer's metadata: equal values, or tensors at the same place. Raises AssertionError."""
    import torch

    assert list(mine) == list(theirs), f"{PATCH.id}: other layers than the original"
    for layer, expected in theirs.items():
        assert type(mine[layer]) is type(expected)
        for name, value in vars(expected).items():
            own = getattr(mine[layer], name)
            if isinstance(value, torch.Tensor):
                same = own.data_ptr() == value.data_ptr() and own.shape == value.shape and own.stride() == value.stride()
                same = same and own.dtype == value.dtype
            else:
                same = own == value
            assert same, f"{PATCH.id}: {layer}.{name} is {own}, the original's {value}"
    count.add("shadow: equal")
