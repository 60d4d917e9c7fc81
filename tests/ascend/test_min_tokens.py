"""The min-tokens mask cache under vllm-ascend's rejection sampler, which calls the patched method."""

from __future__ import annotations

import random

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend

PATCH = "min-tokens-mask-cache"


class Batch:
    """Requests with lengths that grow, min_tokens that run out, swaps and departures, as the input batch has them."""

    def __init__(self, seed):
        from batches import min_tokens

        self.rng = random.Random(seed)
        self.processor = min_tokens({})
        self.requests = []

    def step(self):
        """Change the batch; the number of drafts of each request."""
        rng = self.rng
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            if len(self.requests) < 6:
                length = rng.randrange(4)
                stops = {rng.randrange(40) for _ in range(rng.randint(0, 3))}
                self.requests.append([length + rng.randint(0, 25), [1] * length, stops])
        if len(self.requests) > 1 and rng.random() < 0.15:
            i, j = rng.sample(range(len(self.requests)), 2)
            self.requests[i], self.requests[j] = self.requests[j], self.requests[i]
        if len(self.requests) > 1 and rng.random() < 0.25:
            self.requests.pop(rng.randrange(len(self.requests)))  # finished or preempted: rows move up
        if not self.requests:
            self.requests.append([5, [], {3}])
        self.processor.min_toks = {
            row: (least, output, stops) for row, (least, output, stops) in enumerate(self.requests) if len(output) < least
        }
        return [rng.choice((4, 4, 4, rng.randint(0, 4))) for _ in self.requests]

    def accept(self, drafts):
        for request, number in zip(self.requests, drafts, strict=True):
            request[1].extend([1] * (1 + self.rng.randint(0, number)))


def _play(seed, steps):
    """Masked logits of every step, through ``AscendRejectionSampler.apply_logits_processors``."""
    import types

    import torch
    from batches import plain_metadata
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm_ascend.sample.rejection_sampler import AscendRejectionSampler
    from vllm_ascend.sample.sampler import AscendSampler

    sampler, batch, seen = AscendRejectionSampler(AscendSampler()), Batch(seed), []
    for _ in range(steps):
        drafts = batch.step()
        metadata = plain_metadata(len(drafts), logitsprocs=LogitsProcessors([batch.processor]))
        logits = torch.zeros(sum(drafts), 40)
        spec = types.SimpleNamespace(num_draft_tokens=drafts)
        seen.append(sampler.apply_logits_processors(logits, metadata, spec).clone())
        batch.accept(drafts)
    return seen


@pytest.mark.parametrize("seed", [1, 2])
def test_masks_are_the_originals_through_tails_swaps_and_departures(world, seed):
    from overlay.runtime import Counters

    expected = _play(seed, 400)
    counts = Counters(PATCH)
    hits, built = counts.get("hit"), counts.get("built")
    with applied(PATCH):
        found = _play(seed, 400)
    for one, other in zip(expected, found, strict=True):
        assert other.equal(one)
    assert counts.get("hit") > hits and counts.get("built") > built
    assert sum(bool(mask.isinf().any()) for mask in expected) > 100


def test_a_cache_keyed_by_the_batchs_shape_would_not_be(world):
    """Kept while the numbers of drafts and of requests stay, a mask outlives min_tokens and swaps."""
    import torch
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    original, kept, expected = MinTokensLogitsProcessor.apply_with_spec_decode, {}, _play(1, 400)

    def by_shape(self, logits, num_draft_tokens):
        key = (tuple(num_draft_tokens), len(self.min_toks))
        if key not in kept:
            kept[key] = original(self, torch.zeros_like(logits), num_draft_tokens).isinf()
        return logits.masked_fill_(kept[key], float("-inf"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MinTokensLogitsProcessor, "apply_with_spec_decode", by_shape)
        found = _play(1, 400)
    assert any(not one.equal(other) for one, other in zip(expected, found, strict=True))
