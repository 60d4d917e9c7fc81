"""Tokens from shards are those of the gathered logits: rank by rank, with every rank in a thread of its own."""

from __future__ import annotations

import random
import types

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend

PATCH = "ascend-vocab-parallel-argmax"


def _heads(ranks, vocabulary, weight, **options):
    """A rank's (LogitsProcessor, lm_head) for each rank; the head's product is given, not computed."""
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding, pad_vocab_size
    from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor

    padded = pad_vocab_size(vocabulary, 64)
    while padded % ranks:
        padded += 64
    part = padded // ranks
    made = []
    for rank in range(ranks):
        shard = VocabParallelEmbedding._get_indices(padded, padded, vocabulary, vocabulary, rank, ranks)
        processor = AscendLogitsProcessor(vocabulary, **options)
        full = torch.zeros(weight.shape[0], padded, dtype=weight.dtype)
        full[:, :vocabulary] = weight
        mine = full[:, rank * part : (rank + 1) * part].contiguous()
        head = types.SimpleNamespace(
            shard_indices=shard,
            quant_method=types.SimpleNamespace(apply=lambda head, rows, bias=None, mine=mine: mine[rows].clone()),
        )
        made.append((processor, head))
    return made


@pytest.fixture
def on_ranks(world, monkeypatch):
    """``run(ranks, function)``: ``function(rank)`` in every rank's thread, with the real all-gather's meaning."""
    import ranks

    return lambda number, function: ranks.run(monkeypatch, number, function)


def _logits(rng, rows, vocabulary):
    from batches import logits_of

    return logits_of(rng, rows, vocabulary, half=rng.random() < 0.8)


OPTIONS = [{}, {"soft_cap": 2.0}, {"scale": 0.3}, {"soft_cap": 30.0, "scale": 0.5}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_drafts_argmax_is_the_gathered_ones(on_ranks, ranks, options):
    import torch

    rng, cases = random.Random(ranks), []
    for _ in range(8):
        vocabulary = rng.choice((64 * ranks, 250, 251, 130))
        rows = rng.randint(1, 7)
        weight = _logits(rng, rows, vocabulary)
        heads = _heads(ranks, vocabulary, weight, **options)
        everything = torch.arange(rows)

        def stock(rank, heads=heads, rows=everything):
            processor, head = heads[rank]
            return processor(head, rows).argmax(dim=-1)

        def draft(rank, heads=heads, rows=everything):
            from patches.ascend import ascend_vocab_parallel_argmax as patch

            processor, head = heads[rank]
            return patch.make_draft(lambda self: processor(head, rows).argmax(dim=-1))(None)

        cases.append((draft, on_ranks(ranks, stock)))
    with applied(PATCH):
        for draft, expected in cases:
            for one, other in zip(expected, on_ranks(ranks, draft), strict=True):
                assert other.dtype == one.dtype and other.equal(one)


@pytest.mark.parametrize("rule", ["uncapped shard", "index by sliced width", "padding as it is"])
def test_the_checker_catches_other_rules(on_ranks, rule):
    """Rules that were published, or that vllm-ascend has, each wrong in some of the same batches."""
    import torch

    from patches._lib import ascend_sharded_logits

    class Wrong(ascend_sharded_logits.ShardedLogits):
        def part(self, rows=None, **_):
            part = (self._shard if rows is None else self._shard[rows]).clone()
            if rule == "uncapped shard":  # "monotone, so that it cannot matter"
                part[..., self.last_token - self.first_token :] = float("-inf")
                return part
            if rule == "index by sliced width":
                return part[..., : self.last_token - self.first_token]
            return part

        @property
        def first_token(self):
            first = super().first_token
            if rule == "index by sliced width" and first:
                return self._lm_head.shard_indices.num_org_elements
            return first

    rng = random.Random(9)
    wrong = 0
    for _ in range(25):
        options = {"soft_cap": 2.0} if rule == "uncapped shard" else {}
        weight = _logits(rng, 5, 250) - (50 if rule == "padding as it is" else 0)
        heads = _heads(2, 250, weight, **options)

        def stock(rank, heads=heads):
            return heads[rank][0](heads[rank][1], torch.arange(5)).argmax(dim=-1)

        def shards(rank, heads=heads):
            processor, head = heads[rank]
            return Wrong(processor, head, head.quant_method.apply(head, torch.arange(5)), None).argmax(dim=-1)

        wrong += not on_ranks(2, shards)[0].equal(on_ranks(2, stock)[0])
    assert wrong > 0


def _runner(metadata):
    """As much of a runner as ``_sample`` reads, with the real samplers."""
    from vllm_ascend.sample.rejection_sampler import AscendRejectionSampler
    from vllm_ascend.sample.sampler import AscendSampler
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    runner = object.__new__(NPUModelRunner)
    runner.sampler = AscendSampler()
    runner.rejection_sampler = AscendRejectionSampler(runner.sampler)
    runner.input_batch = types.SimpleNamespace(
        update_async_output_token_ids=lambda: None, sampling_metadata=metadata, num_reqs=len(metadata.output_token_ids)
    )
    return runner


def _sampled(heads, metadata, spec, rows, sharded):
    """A rank's function: the target's logits within ``execute_model``, its tokens within ``_sample``."""
    from patches.ascend import ascend_vocab_parallel_argmax as patch

    def run(rank):
        processor, head = heads[rank]
        if sharded:
            logits = patch.make_execute(lambda self: processor(head, rows))(None)
        else:
            logits = processor(head, rows)
        return _runner(metadata)._sample(logits, spec).sampled_token_ids

    return run


def _min_tokens(rng, requests, vocabulary):
    from batches import min_tokens

    entries = {}
    for request in range(requests):
        if rng.random() < 0.5:
            length = rng.randrange(8)
            stops = {rng.randrange(vocabulary) for _ in range(rng.randint(0, 3))}
            entries[request] = (length + rng.randint(1, 6), [1] * length, stops)
    return min_tokens(entries)


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "pytorch"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "min tokens"])
def test_verification_accepts_the_same_tokens(on_ranks, monkeypatch, triton, masked):
    import torch
    from batches import plain_metadata, spec_metadata
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm_ascend.sample import rejection_sampler

    from patches.ascend import ascend_vocab_parallel_argmax as patch

    monkeypatch.setattr(rejection_sampler, "HAS_TRITON", triton)
    rng = random.Random(5 + triton)
    rejected, cases = 0, []
    hits = patch.count.get("hit")
    tries = 4 if triton else 16
    for _ in range(tries):
        requests, vocabulary = rng.randint(1, 5), rng.choice((128, 250, 130))
        drafts = [rng.randint(0, 4) for _ in range(requests)]
        drafts[0] = max(drafts[0], 1)
        weight = _logits(rng, sum(drafts) + requests, vocabulary)
        processor = _min_tokens(rng, requests, vocabulary) if masked else None
        if masked and rng.random() < 0.7:  # the stop tokens are likely
            for _, _, stops in processor.min_toks.values():
                weight[:, list(stops)] += 3
        metadata = plain_metadata(requests, logitsprocs=LogitsProcessors([processor] if masked else []))
        spec = spec_metadata(rng, drafts, weight)
        heads = _heads(2, vocabulary, weight, **rng.choice(OPTIONS))
        rows = torch.arange(weight.shape[0])
        (expected, same) = on_ranks(2, _sampled(heads, metadata, spec, rows, False))
        assert expected.equal(same)
        cases.append((_sampled(heads, metadata, spec, rows, True), expected))
        rejected += int((expected == -1).sum())
    with applied(PATCH):
        for sharded, expected in cases:
            for found in on_ranks(2, sharded):
                assert found.dtype == expected.dtype and found.equal(expected)
    assert rejected > tries // 4
    assert patch.count.get("hit") == hits + 2 * tries


def test_masks_lie_below_infinities_and_reach_the_bonus_token(on_ranks):
    """Three rows of one request that is far below its min_tokens: two drafts and a bonus token.

    A target row of nothing but -inf: the rejection sampler makes these finite, so that a masked token is less. A row whose
    largest logits are stop tokens on both ranks. A bonus row likewise.
    """
    import torch
    from batches import min_tokens, plain_metadata, spec_metadata
    from vllm.v1.sample.logits_processor import LogitsProcessors

    stops = {0, 1, 127, 128, 249}
    weight = torch.zeros(3, 250, dtype=torch.bfloat16)
    weight[0] = float("-inf")
    weight[1:, list(stops)] = 9
    weight[1, 200], weight[2, 70] = 3, 4
    spec = spec_metadata(random.Random(0), [2], weight)
    spec.draft_token_ids[:] = torch.tensor([2, 200])
    metadata = plain_metadata(1, logitsprocs=LogitsProcessors([min_tokens({0: (9, [], stops)})]))
    heads = _heads(2, 250, weight)
    rows = torch.arange(3)
    expected = on_ranks(2, _sampled(heads, metadata, spec, rows, False))[0]
    assert expected.tolist() == [[2, 200, 70]]
    with applied(PATCH):
        assert on_ranks(2, _sampled(heads, metadata, spec, rows, True))[0].equal(expected)


@pytest.mark.parametrize("masked", [False, True], ids=["", "min tokens"])
def test_plain_decode_samples_the_same_tokens(on_ranks, masked):
    import torch
    from batches import plain_metadata
    from vllm.v1.sample.logits_processor import LogitsProcessors

    rng, cases = random.Random(8), []
    for _ in range(25):
        requests, vocabulary = rng.randint(1, 8), rng.choice((128, 250, 130))
        weight = _logits(rng, requests, vocabulary)
        processors = [_min_tokens(rng, requests, vocabulary)] if masked else []
        metadata = plain_metadata(requests, logitsprocs=LogitsProcessors(processors))
        heads = _heads(2, vocabulary, weight, **rng.choice(OPTIONS))
        rows = torch.arange(requests)
        expected = on_ranks(2, _sampled(heads, metadata, None, rows, False))[0]
        cases.append((_sampled(heads, metadata, None, rows, True), expected))
    with applied(PATCH):
        for sharded, expected in cases:
            for found in on_ranks(2, sharded):
                assert found.dtype == expected.dtype and found.equal(expected)


def test_a_batch_that_wants_more_is_gathered_and_sampled_as_before(on_ranks):
    import torch
    from batches import plain_metadata

    from patches.ascend import ascend_vocab_parallel_argmax as patch

    rng = random.Random(10)
    weight = _logits(rng, 3, 250).nan_to_num(0.0, 9.0, -9.0)
    heads = _heads(2, 250, weight)
    mask = torch.zeros(3, 250, dtype=torch.bool)
    mask[:, :100] = True
    for reason, changed in (
        ("logprobs", {"max_num_logprobs": 3}),
        ("allowed token ids", {"allowed_token_ids_mask": mask}),
        ("bad words", {"bad_words_token_ids": {0: [[int(weight[0].argmax())]]}}),
    ):
        metadata = plain_metadata(3, **changed)
        rows = torch.arange(3)
        expected = on_ranks(2, _sampled(heads, metadata, None, rows, False))[0]
        before = patch.count.get(f"refused: {reason}")
        with applied(PATCH):
            found = on_ranks(2, _sampled(heads, metadata, None, rows, True))[0]
        assert found.equal(expected)
        assert patch.count.get(f"refused: {reason}") == before + 2


def test_an_unknown_consumer_gets_the_ordinary_logits(on_ranks):
    """Structured output reads dtype, device and values; others may index or call torch functions."""
    import torch

    from patches.ascend import ascend_vocab_parallel_argmax as patch

    weight = _logits(random.Random(11), 4, 250)
    heads = _heads(2, 250, weight, soft_cap=30.0)
    rows = torch.arange(4)
    expected = on_ranks(2, lambda rank: heads[rank][0](heads[rank][1], rows))[0]

    def consume(rank):
        processor, head = heads[rank]
        lazy = patch.make_execute(lambda self: processor(head, rows))(None)
        assert lazy.dtype == expected.dtype and len(lazy) == 4
        return [lazy.to("cpu").float(), lazy[1:3].float(), torch.nn.functional.softmax(lazy, -1), lazy.contiguous()]

    with applied(PATCH):
        found = on_ranks(2, consume)[0]
    wanted = [expected.float(), expected[1:3].float(), torch.softmax(expected, -1), expected]
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_outside_draft_and_target_nothing_changes(on_ranks):
    import torch

    weight = _logits(random.Random(12), 2, 250)
    heads = _heads(2, 250, weight)
    with applied(PATCH):
        (found, _) = on_ranks(2, lambda rank: heads[rank][0](heads[rank][1], torch.arange(2)))
    assert isinstance(found, torch.Tensor) and found.shape == (2, 250)


def test_min_tokens_masks_are_kept_by_content(world):
    from batches import min_tokens

    from patches._lib.ascend_sharded_logits import min_tokens_masks

    logits = types.SimpleNamespace(first_token=100, last_token=200)
    output = [1]
    processor = min_tokens({0: (4, output, {150, 50}), 2: (9, [1] * 7, {199, 200})})
    on_drafts, on_bonus = min_tokens_masks(processor, logits, [2, 1, 3], "cpu")
    assert sorted(zip(*(t.tolist() for t in on_drafts), strict=True)) == [(0, 50), (1, 50), (3, 99), (4, 99)]
    assert sorted(zip(*(t.tolist() for t in on_bonus), strict=True)) == [(0, 50), (2, 99)]
    assert min_tokens_masks(processor, logits, [2, 1, 3], "cpu")[0] is on_drafts
    output += [1, 1]  # one row left to mask
    again, _ = min_tokens_masks(processor, logits, [2, 1, 3], "cpu")
    assert sorted(zip(*(t.tolist() for t in again), strict=True)) == [(0, 50), (3, 99), (4, 99)]
