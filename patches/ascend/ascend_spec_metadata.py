"""Keep the index tensors of a verification step whose layout repeats.

``NPUModelRunner._calc_spec_decode_metadata`` pins and copies five small index arrays every step. They depend on two
arrays alone: the number of draft tokens of each request and where its scheduled tokens end. Under a steady number of
requests these repeat. The key is their whole content. Only the draft tokens themselves are looked up anew.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target

PATCH = Patch(
    id="ascend-spec-metadata",
    kind=Kind.CODE,
    summary="Keep the five index tensors of a verification step while its layout repeats",
    why=(
        "Five arrays are pinned and copied one by one every verification step (marked as to be optimised in the source "
        "of vllm-ascend 0.23.0); not measured here."
    ),
    remove_when="vllm-ascend computes the indices on the device or sends them in one copy",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner._calc_spec_decode_metadata",
            use="metadata",
            fingerprints={"vllm-ascend 0.23.0": "99cc9c6516e9f09a"},
        ),
    ),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        facts={"serving.prefill_context_parallel": 1},
    ),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    live=("model_runner",),
    verified="simulated",
    tests="tests/ascend/test_prepare_inputs.py",
)

count = Counters(PATCH.id)

LAYOUTS = 32  # kept per runner


def metadata(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """SpecDecodeMetadata of ``num_draft_tokens`` [requests] and ``cu_num_scheduled_tokens`` [requests]."""
    import dataclasses

    names = ("num_draft_tokens", "cu_num_scheduled_tokens", "num_pcp_pads")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if instance.pcp_size > 1 or given["num_pcp_pads"] is not None:
        count.refuse("context parallelism")
        return wrapped(*args, **kwargs)
    drafts, ends = given["num_draft_tokens"], given["cu_num_scheduled_tokens"]
    key = (str(drafts.dtype), drafts.tobytes(), str(ends.dtype), ends.tobytes())
    kept = instance.__dict__.setdefault("_overlay_layouts", {})
    found = kept.get(key)
    if found is None:
        count.add("built")
        found = wrapped(*args, **kwargs)
        if len(kept) >= LAYOUTS:
            del kept[next(iter(kept))]
        # No draft token ids: they are this step's.
        kept[key] = dataclasses.replace(found, draft_token_ids=found.draft_token_ids[:0])
        return found
    count.hit()
    ids = instance.input_ids.gpu[found.logits_indices][found.target_logits_indices + 1]
    return dataclasses.replace(found, draft_token_ids=ids, num_draft_tokens=list(found.num_draft_tokens))
