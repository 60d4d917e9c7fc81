"""Greedy tokens from half-precision logits are those of the original, in decode and in verification."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend

PATCH = "ascend-greedy-no-fp32"


@pytest.fixture
def samplers(world):
    from vllm_ascend.sample.rejection_sampler import AscendRejectionSampler
    from vllm_ascend.sample.sampler import AscendSampler

    sampler = AscendSampler()
    return sampler, AscendRejectionSampler(sampler)


def test_decode_takes_the_same_token(samplers):
    from batches import logits_of, plain_metadata

    sampler, _ = samplers
    from overlay.runtime import Counters

    rng, cases = random.Random(1), []
    counts = Counters(PATCH)
    for _ in range(120):
        rows = rng.randint(1, 9)
        logits = logits_of(rng, rows, rng.choice((7, 250, 1000)), half=rng.random() < 0.9)
        metadata = plain_metadata(rows)
        cases.append((logits, metadata, sampler(logits.clone(), metadata).sampled_token_ids))
    with applied(PATCH):
        for logits, metadata, expected in cases:
            found = sampler(logits.clone(), metadata).sampled_token_ids
            assert found.dtype == expected.dtype and found.equal(expected)
    assert counts.get("hit") > 80


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "pytorch"])
def test_verification_accepts_the_same_tokens(samplers, monkeypatch, triton):
    from batches import logits_of, plain_metadata, spec_metadata
    from vllm_ascend.sample import rejection_sampler

    monkeypatch.setattr(rejection_sampler, "HAS_TRITON", triton)
    _, sampler = samplers
    rng, cases = random.Random(2), []
    for _ in range(10 if triton else 80):
        requests = rng.randint(1, 6)
        drafts = [rng.randint(0, 4) for _ in range(requests)]
        drafts[rng.randrange(requests)] = rng.randint(1, 4)
        logits = logits_of(rng, sum(drafts) + requests, rng.choice((5, 130)))
        spec = spec_metadata(rng, drafts, logits)
        metadata = plain_metadata(requests)
        cases.append((spec, logits, metadata, sampler(spec, None, logits.clone(), metadata).sampled_token_ids))
    with applied(PATCH):
        for spec, logits, metadata, expected in cases:
            found = sampler(spec, None, logits.clone(), metadata).sampled_token_ids
            assert found.dtype == expected.dtype and found.equal(expected)
    assert sum(int((expected == -1).sum()) for *_, expected in cases) > 10


def _each_refusal():
    import torch

    yield "not all greedy", {"all_greedy": False, "temperature": torch.full((3,), 0.5)}
    yield "logprobs", {"max_num_logprobs": 2}
    yield "logprobs", {"max_num_logprobs": 5, "logprob_token_ids": {0: [1, 2]}}
    yield "bad words", {"bad_words_token_ids": {0: [[3]]}, "output_token_ids": [[], [], []]}
    mask = torch.zeros(3, 50, dtype=torch.bool)
    mask[:, :20] = True
    yield "allowed token ids", {"allowed_token_ids_mask": mask}


def test_each_gate_sends_the_batch_to_the_original(samplers):
    from batches import logits_of, plain_metadata

    from overlay.runtime import Counters

    sampler, _ = samplers
    counts = Counters(PATCH)
    for reason, changed in _each_refusal():
        metadata = plain_metadata(3, **changed)
        logits = logits_of(random.Random(3), 3, 50, special=False)
        before = counts.get(f"refused: {reason}")
        with applied(PATCH):
            output = sampler(logits, metadata)
        assert counts.get(f"refused: {reason}") == before + 1
        assert (output.logprobs_tensors is not None) == ("max_num_logprobs" in changed)


def test_processors_with_something_to_do_are_seen_and_idle_ones_are_not(samplers, world):
    from batches import logits_of, min_tokens, plain_metadata
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor

    from overlay.runtime import Counters

    sampler, _ = samplers
    counts = Counters(PATCH)
    idle, busy = min_tokens({}), min_tokens({0: (9, [], {4, 5})})
    bias = LogitBiasLogitsProcessor(None, "cpu", False)
    biased = LogitBiasLogitsProcessor(None, "cpu", False)
    biased.biases = {1: {3: 50.0}}
    biased.logits_slice = tuple(biased._device_tensor([i], biased.logits_slice[0].dtype) for i in (1, 3))
    biased.bias_tensor = biased._device_tensor([50.0], biased.bias_tensor.dtype)
    unknown = SimpleNamespace(is_argmax_invariant=lambda: False, apply=lambda logits: -logits)
    for processors, reason in (
        ([idle, bias], None),
        ([busy, bias], "min tokens"),
        ([idle, biased], "logit bias"),
        ([idle, bias, unknown], "a processor of another type"),
    ):
        metadata = plain_metadata(3, logitsprocs=LogitsProcessors(processors))
        logits = logits_of(random.Random(4), 3, 50, special=False)
        expected = sampler(logits.clone(), metadata).sampled_token_ids
        event = f"refused: {reason}" if reason else "hit"
        before = counts.get(event)
        with applied(PATCH):
            assert sampler(logits.clone(), metadata).sampled_token_ids.equal(expected)
        assert counts.get(event) == before + 1


def test_infinity_as_the_largest_finite_half_would_be_wrong(samplers):
    """Cleaning target rows in bf16 as they are in fp32 ties infinity with the largest finite value."""
    import torch
    from batches import plain_metadata, spec_metadata

    _, sampler = samplers
    limits = torch.finfo(torch.bfloat16)
    logits = torch.zeros(2, 8, dtype=torch.bfloat16)
    logits[0, 2], logits[0, 5] = limits.max, float("inf")
    spec = spec_metadata(random.Random(5), [1], logits)
    metadata = plain_metadata(1)
    expected = sampler(spec, None, logits.clone(), metadata).sampled_token_ids
    assert 5 in expected
    wrong = torch.nan_to_num(logits[:1], nan=0.0, posinf=limits.max, neginf=limits.min).argmax(-1)
    assert wrong.item() == 2
    with applied(PATCH):
        assert sampler(spec, None, logits.clone(), metadata).sampled_token_ids.equal(expected)
