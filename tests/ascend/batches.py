"""Seeded batches for the samplers: logits with ties, infinities and NaN, and the metadata around them."""

from __future__ import annotations

import random
from typing import Any


def logits_of(rng: random.Random, rows: int, vocabulary: int, *, half: bool = True, special: bool = True) -> Any:
    """[rows, vocabulary], bf16 (or fp32), coarse enough for ties; some rows hold infinities or NaN."""
    import torch

    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    logits = torch.randn(rows, vocabulary, generator=generator)
    if rng.random() < 0.5:
        logits = (logits * 2).round()  # many ties
    logits = logits.to(torch.bfloat16 if half else torch.float32)
    limits = torch.finfo(logits.dtype)
    for row in range(rows if special else 0):
        for value in (float("inf"), float("-inf"), float("nan"), limits.max, limits.min):
            for _ in range(rng.choice((0, 0, 0, 1, 2))):
                logits[row, rng.randrange(vocabulary)] = value
        if rng.random() < 0.05:
            logits[row] = rng.choice((float("nan"), float("-inf"), float("inf")))
    return logits


def plain_metadata(requests: int, **changed: Any) -> Any:
    """SamplingMetadata of an all-greedy batch that asks for nothing else."""
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.zeros(requests)
    return SamplingMetadata(
        **{
            "temperature": None,
            "all_greedy": True,
            "all_random": False,
            "top_p": None,
            "top_k": None,
            "generators": {},
            "max_num_logprobs": None,
            "no_penalties": True,
            "prompt_token_ids": None,
            "frequency_penalties": none,
            "presence_penalties": none,
            "repetition_penalties": none + 1,
            "output_token_ids": [[] for _ in range(requests)],
            "allowed_token_ids_mask": None,
            "bad_words_token_ids": {},
            "logitsprocs": LogitsProcessors(),
            **changed,
        }
    )


def spec_metadata(rng: random.Random, drafts: list[int], logits: Any) -> Any:
    """SpecDecodeMetadata of ``drafts`` tokens a request; about two thirds of the drafts agree with ``logits``."""
    import torch
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    target, bonus, row = [], [], 0
    for number in drafts:
        target += range(row, row + number)
        bonus.append(row + number)
        row += number + 1
    best = logits.float().nan_to_num(0.0).argmax(-1).tolist()
    ids = [best[i] if rng.random() < 0.66 else rng.randrange(logits.shape[1]) for i in target]

    def tensor(values: list[int]) -> Any:
        return torch.tensor(values, dtype=torch.int32)

    def ends(values: list[int]) -> Any:
        return tensor(values).cumsum(0, dtype=torch.int32)

    return SpecDecodeMetadata(
        draft_token_ids=tensor(ids),
        num_draft_tokens=list(drafts),
        cu_num_draft_tokens=ends(drafts),
        cu_num_sampled_tokens=ends([number + 1 for number in drafts]),
        target_logits_indices=tensor(target).long(),
        bonus_logits_indices=tensor(bonus).long(),
        logits_indices=torch.arange(row),
    )


def min_tokens(entries: dict[int, tuple[int, list[int], set[int]]]) -> Any:
    """The real MinTokensLogitsProcessor, holding ``entries`` (request -> min_tokens, output ids, stop ids)."""
    import torch
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    processor.min_toks = {request: entry for request, entry in entries.items() if len(entry[1]) < entry[0]}
    rows = [request for request, (_, _, stops) in processor.min_toks.items() for _ in stops]
    stops = [token for _, _, stops in processor.min_toks.values() for token in stops]
    processor.logits_slice = (
        processor._device_tensor(rows, torch.int32),
        processor._device_tensor(stops, torch.int32),
    )
    return processor
