"""min-tokens-mask-cache against the original processor of this release."""

from __future__ import annotations

import random
from typing import Any

from tests.support import applied
from tests.v1.checks.block_table import counted, spent

VOCABULARY = 64


def _processor() -> Any:
    import torch
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    return MinTokensLogitsProcessor(None, torch.device("cpu"), False)


def _entry(release: str, rnd: random.Random, structured: bool = False) -> tuple[Any, ...]:
    """As ``add_request`` makes it: (min tokens, output so far, stop ids[, structured outputs])."""
    stops = set(rnd.sample(range(VOCABULARY), rnd.choice((0, 1, 2, 5))))
    entry: tuple[Any, ...] = (rnd.randrange(1, 12), [0] * rnd.randrange(6), stops)
    if tuple(map(int, release.split("."))) >= (0, 32, 0):
        entry += (structured,)
    return entry


def _history(release: str, seed: int, steps: int, structured: bool) -> list[Any]:
    """Masked logits of every step of a random batch: entries come, go, swap and grow, with tails and odd drafts."""
    import torch

    rnd = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    processor = _processor()
    seen = []
    requests = 6
    drafts = [3] * requests
    for _ in range(steps):
        pick = rnd.random()
        if pick < 0.15:
            processor.min_toks[rnd.randrange(requests)] = _entry(release, rnd, structured and rnd.random() < 0.3)
        elif pick < 0.20 and processor.min_toks:
            del processor.min_toks[rnd.choice(list(processor.min_toks))]
        elif pick < 0.27:
            a, b = rnd.sample(range(requests), 2)
            one, other = processor.min_toks.pop(a, None), processor.min_toks.pop(b, None)
            if one is not None:
                processor.min_toks[b] = one
            if other is not None:
                processor.min_toks[a] = other
        elif pick < 0.45:
            drafts = [rnd.choice((0, 1, 2, 3)) for _ in range(requests)]
        elif pick < 0.7:
            for entry in processor.min_toks.values():
                entry[1].append(0)
        logits = torch.randn(max(1, sum(drafts)), VOCABULARY, generator=generator)
        returned = processor.apply_with_spec_decode(logits, list(drafts))
        assert returned is logits
        seen.append(logits.clone())
    return seen


def check_masked_logits_equal_the_originals_over_random_batches(release: str) -> dict[str, Any]:
    import torch

    before = counted("min-tokens-mask-cache")
    for seed in range(6):
        original = _history(release, seed, 300, structured=False)
        with applied("min-tokens-mask-cache", version=release):
            patched = _history(release, seed, 300, structured=False)
        for step, (mine, theirs) in enumerate(zip(patched, original, strict=True)):
            assert torch.equal(mine, theirs), f"seed {seed}, step {step}"
    events = spent("min-tokens-mask-cache", before)
    assert events["hit"] > 300 and events["built"] > 100, events
    return events


def check_structured_outputs_and_rows_outside_the_batch_go_to_the_original(release: str) -> dict[str, Any]:
    import torch

    before = counted("min-tokens-mask-cache")
    if tuple(map(int, release.split("."))) >= (0, 32, 0):
        original = _history(release, 9, 200, structured=True)
        with applied("min-tokens-mask-cache", version=release):
            patched = _history(release, 9, 200, structured=True)
        assert all(torch.equal(a, b) for a, b in zip(patched, original, strict=True))
        assert spent("min-tokens-mask-cache", before)["refused: structured outputs"] > 20
    with applied("min-tokens-mask-cache", version=release):
        processor = _processor()
        processor.min_toks[4] = _entry(release, random.Random(1))[:2] + ({3},) + _entry(release, random.Random(1))[3:]
        try:
            processor.apply_with_spec_decode(torch.zeros(2, VOCABULARY), [1, 1])
        except IndexError:
            pass
        else:
            raise AssertionError("the original raises IndexError for a request outside the batch")
    events = spent("min-tokens-mask-cache", before)
    assert events["refused: request outside the batch"] == 1, events
    return events


def check_the_key_is_the_content_and_the_cache_is_bounded(release: str) -> dict[str, Any]:
    """The same content is found again after anything happened in between; a longer draft or other stop ids is not."""
    import torch

    from patches.common.min_tokens_mask_cache import ENTRIES

    with applied("min-tokens-mask-cache", version=release):
        processor = _processor()
        tail = (False,) if tuple(map(int, release.split("."))) >= (0, 32, 0) else ()
        before = counted("min-tokens-mask-cache")
        for stops, drafts in (({1}, [2]), ({2}, [2]), ({1}, [1]), ({1}, [2]), ({2}, [2])):
            processor.min_toks = {0: (9, [], stops, *tail)}
            logits = processor.apply_with_spec_decode(torch.zeros(sum(drafts), VOCABULARY), drafts)
            assert set(torch.isneginf(logits).nonzero()[:, 1].tolist()) == stops
            assert torch.isneginf(logits).any(dim=1).all()
        events = spent("min-tokens-mask-cache", before)
        assert events == {"built": 3, "hit": 2}, events
        for token in range(VOCABULARY):
            processor.min_toks = {0: (9, [], {token}, *tail)}
            processor.apply_with_spec_decode(torch.zeros(1, VOCABULARY), [1])
        assert len(processor._overlay_masks) == ENTRIES
    return events
