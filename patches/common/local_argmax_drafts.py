"""Draft tokens from each rank's own argmax under tensor parallelism, in place of gathering the whole vocabulary.

vLLM has the knob (``speculative_config.use_local_argmax_reduction``), off by default: a greedy draft step then exchanges two
numbers a rank and token, not ``vocab_size`` logits. The draft model must offer ``get_top_tokens``; vLLM refuses to start
where it does not, so the knob is turned only for draft models that were read to have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlay.spec import Condition, Contribution, Exactness, Kind, Patch, at_least

if TYPE_CHECKING:
    from overlay.facts import Facts

PATCH = Patch(
    id="local-argmax-drafts",
    kind=Kind.CONFIG,
    summary="Draft models pick tokens by local argmax under tensor parallelism (use_local_argmax_reduction)",
    why=(
        "Greedy draft steps gather the logits of the whole vocabulary over all ranks, K times a step, to take one "
        "argmax: 152k x 2 bytes a row against two numbers a rank."
    ),
    remove_when="vLLM uses the local argmax reduction by default",
    exactness=Exactness.BITWISE,
    condition=Condition(
        vllm=">=0.26.0,<0.34",
        platforms=("cuda", "rocm", "dcu"),
        facts={
            "serving.tensor_parallel": at_least(2),
            "serving.num_speculative_tokens": at_least(1),
            "serving.speculative_method": "mtp",
            "serving.draft_sample_method": "greedy",
            "serving.adaptive_verification": False,
        },
        also="draft_offers_it",
    ),
    config="contribute",
    verified="simulated",
    tests="tests/config_patches/test_config_patches.py",
)

# Model types whose MTP model has ``get_top_tokens`` (LocalArgmaxMixin) in 0.26.0, 0.28.0, 0.32.0 and 0.33.0.
_DRAFTS = ("qwen3_5", "qwen3_5_moe")


def draft_offers_it(facts: Facts) -> str | None:
    if facts.model.model_type not in _DRAFTS:
        return f"the MTP model of {facts.model.model_type!r} is not known to offer get_top_tokens in these releases"
    return None


def contribute(facts: Facts, options: Mapping[str, Any]) -> Contribution:
    return Contribution(args={"speculative_config.use_local_argmax_reduction": True})
