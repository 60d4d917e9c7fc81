"""Greedy tokens straight from half-precision logits.

``Sampler.forward`` makes an fp32 copy of all logits before it takes their argmax, and ``AscendRejectionSampler.forward``
makes three (bonus rows twice, target rows once and a clone). Every bf16 or fp16 value has an fp32 value of its own, in
the same order, so the argmax of the original is the same token.

Two things of the original are kept apart. NaN in a target row counts as 0 there and as the largest value in a bonus row
and in plain decode. Infinities of target rows become fp32's largest finite values there, which no half-precision value
equals: they may stay infinite here, never become the largest half-precision value, which a finite logit can equal.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target

BUILD = "vllm-ascend 0.23.0"

PATCH = Patch(
    id="ascend-greedy-no-fp32",
    kind=Kind.CODE,
    summary="Take greedy tokens from bf16 logits without the fp32 copies, in decode and in verification",
    why=(
        "Each step casts [rows, vocabulary] logits to fp32 for an argmax (248320 values a row for Qwen3.5), in "
        "verification four times over. Found in a profile of an Ascend 910C by others; not measured here."
    ),
    remove_when="the samplers take the argmax of an all-greedy batch before they cast it",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm.v1.sample.sampler:Sampler.forward",
            use="sample",
            fingerprints={"vllm-ascend 0.23.0": "ad6db39c3f9ea15a"},
        ),
        Target(
            at="vllm_ascend.sample.rejection_sampler:AscendRejectionSampler.forward",
            use="verify",
            fingerprints={"vllm-ascend 0.23.0": "3e8abf585baaba1d"},
        ),
    ),
    assumes=(
        Target(
            at="vllm.v1.sample.sampler:Sampler.apply_logits_processors",
            fingerprints={"vllm-ascend 0.23.0": "6a82b7ee35720931"},
        ),
        Target(at="vllm.v1.sample.sampler:Sampler.sample", fingerprints={"vllm-ascend 0.23.0": "d1ad0ddd23d280d4"}),
        Target(
            at="vllm_ascend.sample.sampler:AscendSampler.greedy_sample",
            fingerprints={"vllm-ascend 0.23.0": "51a996283d349b9b"},
        ),
        Target(
            at="vllm_ascend.sample.rejection_sampler:AscendRejectionSampler.apply_logits_processors",
            fingerprints={"vllm-ascend 0.23.0": "2689aba8d66f3534"},
        ),
        Target(
            at="vllm_ascend.sample.rejection_sampler:apply_sampling_constraints",
            fingerprints={"vllm-ascend 0.23.0": "fa31a3e00e3a68e6"},
        ),
        Target(
            at="vllm_ascend.sample.rejection_sampler:rejection_sample",
            fingerprints={"vllm-ascend 0.23.0": "a2a748feb38ef078"},
        ),
    ),
    condition=Condition(plugins={"vllm_ascend": "==0.23.0"}, platforms=("ascend",), runner="V1"),
    conflicts=("greedy-native-dtype",),  # vLLM's own samplers, on other platforms
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    live=("model_runner.sampler",),
    verified="simulated",
    tests="tests/ascend/test_greedy.py",
)

count = Counters(PATCH.id)


def _refusal(logits: Any, metadata: Any) -> str | None:
    import torch

    from patches._lib.ascend_greedy import (
        argmax_processors_refusal,
        ascend_settings_refusal,
        plain_greedy_refusal,
    )

    if not isinstance(logits, torch.Tensor) or logits.dtype not in (torch.bfloat16, torch.float16):
        return "logits not in half precision"
    return (
        plain_greedy_refusal(metadata, logprobs=metadata.max_num_logprobs)
        or argmax_processors_refusal(metadata, min_tokens=False)
        or ascend_settings_refusal()
    )


def sample(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``Sampler.forward`` for logits [requests, vocabulary]: ids as int32 [requests, 1]."""
    import torch
    from vllm.v1.outputs import SamplerOutput

    logits = args[0] if args else kwargs["logits"]
    metadata = args[1] if len(args) > 1 else kwargs["sampling_metadata"]
    reason = _refusal(logits, metadata)
    if reason:
        count.refuse(reason)
        return wrapped(*args, **kwargs)
    count.hit()
    ids = instance.greedy_sample(logits).to(torch.int32)
    return SamplerOutput(sampled_token_ids=ids.unsqueeze(-1), logprobs_tensors=None)


def verify(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``AscendRejectionSampler.forward`` for logits [draft tokens + requests, vocabulary]."""
    import torch
    from vllm.v1.outputs import SamplerOutput
    from vllm_ascend.sample import rejection_sampler
    from vllm_ascend.utils import is_310p

    names = ("metadata", "draft_probs", "logits", "sampling_metadata")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    spec, logits, metadata = given["metadata"], given["logits"], given["sampling_metadata"]
    reason = _refusal(logits, metadata) or ("310P" if is_310p() else None)
    if reason is None and spec.max_spec_len > rejection_sampler.MAX_SPEC_LEN:
        reason = "too many draft tokens"  # the original's assertion speaks
    if reason:
        count.refuse(f"verification: {reason}")
        return wrapped(*args, **kwargs)
    count.add("verification hit")
    bonus = instance.sampler.greedy_sample(logits[spec.bonus_logits_indices]).to(torch.int32).unsqueeze(-1)
    target = torch.nan_to_num(logits[spec.target_logits_indices], nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    ids = rejection_sampler.rejection_sample(
        spec.draft_token_ids,
        spec.num_draft_tokens,
        spec.max_spec_len,
        spec.cu_num_draft_tokens,
        given["draft_probs"],
        target,
        bonus,
        metadata,
    )
    return SamplerOutput(sampled_token_ids=ids, logprobs_tensors=None)
