"""What a greedy step on vllm-ascend's samplers needs to know of its batch. Reads host data only, never the device."""

from __future__ import annotations

from typing import Any

NOT_GREEDY = "not all greedy"


def plain_greedy_refusal(metadata: Any, *, logprobs: int | None) -> str | None:
    """Why the next token of this batch is not simply the argmax of its logits; None where it is.

    metadata: vLLM's SamplingMetadata. logprobs: ``max_num_logprobs`` of the requests themselves (the rejection sampler
    hands its sampler another one). MinTokens is left to the caller: see ``argmax_processors_refusal``.
    """
    if not metadata.all_greedy:
        return NOT_GREEDY
    if logprobs is not None or metadata.logprob_token_ids:
        return "logprobs"
    if not metadata.no_penalties:
        return "penalties"
    if metadata.bad_words_token_ids:
        return "bad words"
    if metadata.allowed_token_ids_mask is not None:
        return "allowed token ids"
    holder = metadata.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests():
        return "thinking budget"
    return None


def argmax_processors_refusal(metadata: Any, *, min_tokens: bool) -> str | None:
    """Why a logits processor that can change the argmax has something to do; None where all are idle.

    The list of such processors is never empty (MinTokens and LogitBias are always loaded): what counts is what they hold.
    min_tokens: whether the caller masks for MinTokens itself.
    """
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor

    for processor in metadata.logitsprocs.non_argmax_invariant:
        if type(processor) is MinTokensLogitsProcessor:
            if processor.min_toks and not min_tokens:
                return "min tokens"
        elif type(processor) is LogitBiasLogitsProcessor:
            if processor.biases:
                return "logit bias"
        else:
            return "a processor of another type"
    return None


def ascend_settings_refusal() -> str | None:
    """Why vllm-ascend's own settings exclude a plain argmax; None where they do not."""
    from vllm_ascend.ascend_config import get_ascend_config

    config = get_ascend_config()
    if config.enable_reduce_sample:
        return "enable_reduce_sample"
    if config.rejection_sampler_config.enable_entropy_verify:
        return "entropy verification"
    return None


class Presampled:
    """Token ids that stand where ``rejection_sample`` expects the target rows' logits.

    For an all-greedy batch it reads of these logits their number of rows, their device, and ``argmax(dim=-1)``.
    """

    ndim = 2

    def __init__(self, ids: Any) -> None:
        self.ids = ids
        self.device = ids.device
        self.shape = (ids.shape[0], 1)

    def is_contiguous(self) -> bool:
        return True

    def argmax(self, dim: int = -1) -> Any:
        return self.ids
