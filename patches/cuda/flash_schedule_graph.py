"""FlashAttention's scheduler metadata of a decode step in one graph launch.

FlashAttention 3 plans each step's attention on the device ahead of the model: a kernel writes the plan, a copy brings it
to the buffer that captured steps read, a fill clears the buffer's rest. ``build`` of the metadata builder launches the three
from Python, one after the other, in both runners. What they read are the sequence lengths and query starts; what else they
depend on are sizes. So they are captured once per sizes and addresses: a replay reads the same memory as the original's
launches would, whoever wrote it.

All that is left of ``build`` runs as it is: the builder's own ``fast_build``, which leaves out the plan and nothing else.

The longest sequence of the step is the one scalar that changes from step to step. FlashAttention reads it only to tell
whether a sliding window reaches over everything: with a window the original runs. ``shadow`` compares every plan.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters, options
from overlay.spec import Condition, Exactness, Kind, Option, Patch, Target
from patches._lib.fingerprints import by_release
from patches._lib.step_graphs import StepGraphs

_BUILDER = "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder"

PATCH = Patch(
    id="flash-schedule-graph",
    kind=Kind.CODE,
    summary="FlashAttention 3: the scheduler metadata of a decode step in one graph launch",
    why=(
        "Each decode step launches the planning kernel, a copy and a fill from Python: build took 135 of about 1500 us of a "
        "step on the host of an H200 (vLLM 0.26.0, Qwen3-0.6B, V1 and V2), 45 of them in the planning call."
    ),
    remove_when="vLLM computes the scheduler metadata inside the captured step, or FlashAttention no longer needs them",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at=f"{_BUILDER}.build",
            use="build",
            fingerprints=by_release("131cbdcd158f89a3 3d58d41e4fc34e64 2ba758d75df32254 fc9dd3a58003d792 ebfa7394e21bf066 ="),
        ),
    ),
    assumes=(
        Target(
            at=f"{_BUILDER}.__init__",
            fingerprints=by_release("da0ae8cb32e29715 4e5235e204b504a1 f66356a94e69eae8 db6b3cd9eb2c6fc5 cfce5023ddb9fc7e ="),
        ),
        Target(
            at=f"{_BUILDER}._store_scheduler_metadata",
            fingerprints=by_release("- - - d6196c768effb536 = ="),
            versions=">=0.28.0",
        ),
        Target(
            at=f"{_BUILDER}._get_scheduler_metadata", fingerprints=by_release("- - - d467334ddb742571 = ="), versions=">=0.28.0"
        ),
        Target(
            at="vllm.vllm_flash_attn.flash_attn_interface:get_scheduler_metadata",
            fingerprints=by_release("d50abb5d1162384c = = = = ="),
        ),
    ),
    condition=Condition(
        vllm=">=0.18.1,<0.34",
        platforms=("cuda",),
        archs=("sm90",),
        facts={
            "serving.enforce_eager": False,
            "serving.decode_context_parallel": 1,
            "serving.batch_invariant": False,
            "model.mla": False,
            "model.attention_free": False,
        },
    ),
    options={"shadow": Option(False, "run the original too, and stop at the first difference (slow: for testing)")},
    tests="tests/v1/test_flash_schedule_graph.py",
    measured="ab_runs/results/host/h200_qwen3_0.6b.yaml",
)

count = Counters(PATCH.id)

_GRAPHS = "_overlay_schedule_graphs"


def build(wrapped: Any, builder: Any, args: tuple, kwargs: dict) -> Any:
    prefix = args[0] if args else kwargs.get("common_prefix_len")
    common = args[1] if len(args) > 1 else kwargs.get("common_attn_metadata")
    reason = _refusal(builder, prefix, common, len(args) + len(kwargs))
    if reason is not None:
        count.refuse(reason)
        return wrapped(*args, **kwargs)
    graphs = builder.__dict__.get(_GRAPHS)
    if graphs is None:
        graphs = builder.__dict__[_GRAPHS] = StepGraphs(count)
    key = _key(builder, common.num_reqs, common.num_actual_tokens, common.query_start_loc, common.seq_lens)
    replayed, metadata = graphs.run(key, lambda: wrapped(prefix, common))
    if not replayed:
        count.refuse("not captured yet")
        return metadata
    plan = metadata.scheduler_metadata  # the builder's buffer up to this plan's length: always the same place
    if options(PATCH.id).get("shadow"):
        _shadow(builder, plan, common.num_reqs, lambda: wrapped(prefix, common))
    metadata = wrapped(prefix, common, True)
    metadata.scheduler_metadata = plan
    count.hit()
    return metadata


def _key(builder: Any, requests: int, tokens: int, starts: Any, lengths: Any) -> tuple[int, ...]:
    """What a plan depends on besides the lengths and starts themselves."""
    ends = (starts.data_ptr(), starts.shape[0], lengths.data_ptr(), lengths.shape[0])
    return (requests, tokens, *ends, builder.scheduler_metadata.data_ptr())


def plans_of(builders: list[Any], batch: Any) -> list[Any] | None:
    """The captured plans (with a ``replay``) of a V2 decode step padded as ``batch``, or None where one is not captured."""
    found = []
    rows, tokens = batch.num_reqs_after_padding, batch.num_tokens_after_padding
    for builder in builders:
        graphs = builder.__dict__.get(_GRAPHS)
        if graphs is None:
            return None
        entry = graphs.captured(_key(builder, rows, tokens, batch.query_start_loc[: rows + 1], batch.seq_lens[:rows]))
        if entry is None:
            return None
        found.append(entry)
    return found


def _refusal(builder: Any, prefix: Any, common: Any, given: int) -> str | None:
    """Why this call takes the original. given: number of arguments."""
    if given != 2 or prefix is None or common is None:
        return "called in another way"
    if type(builder).__name__ != "FlashAttentionMetadataBuilder":
        return "a builder class of its own"
    if not builder.aot_schedule or not builder.use_full_cuda_graph:
        return "no plan ahead of the step"
    if builder.aot_sliding_window is None:
        return "first call"
    if tuple(builder.aot_sliding_window) != (-1, -1):
        return "sliding window"
    if prefix:
        return "cascade attention"
    if builder.dcp_world_size != 1:
        return "decode context parallelism"
    if common.max_query_len != 1:
        return "more than one token a request"
    if common.causal is not True:
        return "not causal"
    if getattr(builder, "rswa_window", None) is not None:
        return "R-SWA"
    if getattr(common, "mm_req_doc_ranges", None) is not None:
        return "bidirectional ranges"
    if not (common.query_start_loc.is_contiguous() and common.seq_lens.is_contiguous()):
        return "lengths in pieces"
    return None


def _shadow(builder: Any, plan: Any, requests: int, original: Any) -> None:
    """Compare the buffer that captured steps read with the original's. Raises AssertionError.

    A plan is a few vectors of one entry a request, each padded to a multiple of four, and a counter at the end. FlashAttention
    writes no padding: it holds whatever was there, in the original too.
    """
    import torch

    mine = builder.scheduler_metadata.clone()
    builder.scheduler_metadata.fill_(-7)
    theirs = original()
    places = torch.arange(len(mine), device=mine.device)
    padding = (places < len(plan) - 1) & (places % (-(-requests // 4) * 4) >= requests)
    assert torch.equal(mine[~padding], builder.scheduler_metadata[~padding]), (
        f"{PATCH.id}: the plan differs from the original's"
    )
    same = theirs.scheduler_metadata.data_ptr() == plan.data_ptr() and theirs.scheduler_metadata.shape == plan.shape
    assert same, f"{PATCH.id}: the plan lies elsewhere than the original's"
    count.add("shadow: equal")
