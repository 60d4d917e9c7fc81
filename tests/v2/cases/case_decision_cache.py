"""``decision-cache`` against the original: whole histories, with and without speculation, and its invalidation."""

from __future__ import annotations

import numpy as np
import pytest
from vllm import SamplingParams

from patches.common import decision_cache as patch
from tests.support import applied
from tests.v2.cases.engine import Engine, assert_equal, counted, stock_run


@pytest.mark.parametrize(("seed", "kind", "pad_to"), [(1, "mixed", 1), (2, "processed", 1)])
def test_histories_leave_every_buffer_as_the_original_does(qwen: Engine, seed: int, kind: str, pad_to: int) -> None:
    stock = stock_run(qwen, seed, kind, pad_to)
    with applied("decision-cache"), counted(patch.count) as counts:
        patched = qwen.run(seed, kind, pad_to)
    assert_equal(stock, patched)
    assert counts["hit"] > len(stock.steps)
    assert counts["refused: requests or batch changed"] > 5


def test_every_answer_follows_each_new_request_and_each_batch(qwen: Engine) -> None:
    """Random owners of the slots, random batches: every kept answer equals the original's fresh one."""
    qwen.reset()
    sampler = qwen.runner.sampler
    states, token_ids = sampler.sampling_states, sampler.logprob_token_ids_state
    rng = np.random.default_rng(3)
    names = ("max_num_logprobs", "any_greedy", "any_explicit_seed")
    originals = {name: getattr(type(states), name) for name in names}
    ids_original = type(token_ids).max_num_token_ids
    top_original = type(states).get_top_k_top_p
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1.0, "logprobs": 4},
        {"temperature": 0.9, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.0, "logprob_token_ids": [3, 4]},
    ]
    with applied("decision-cache"), counted(patch.count) as counts:
        for _ in range(400):
            if rng.random() < 0.3:
                sampler.add_request(int(rng.integers(4)), SamplingParams(**kinds[rng.integers(len(kinds))]))
                sampler.apply_staged_writes()
            rows = np.sort(rng.permutation(4)[: rng.integers(1, 5)]) if rng.random() < 0.4 else np.arange(4)
            for name in names:
                assert getattr(states, name)(rows) == originals[name](states, rows), name
            assert token_ids.max_num_token_ids(rows) == ids_original(token_ids, rows)
            import torch

            index = torch.from_numpy(rows.astype(np.int64))
            found, wanted = states.get_top_k_top_p(index, rows), top_original(states, index, rows)
            assert [x is None for x in found[:2]] == [x is None for x in wanted[:2]]
            assert all(x is None or torch.equal(x, y) for x, y in zip(found[:2], wanted[:2], strict=True))
            logits = torch.randn(len(rows), 32)
            mine, theirs = logits.clone(), logits.clone()
            states.apply_temperature(mine, index, rows)
            states.apply_min_p(mine, index, rows)
            values = states.temperature.np[rows]
            if not ((values == 0) | (values == 1)).all():
                scale = torch.from_numpy(np.where(values == 0, 1, values))[:, None]
                theirs = theirs / scale
            if (states.min_p.np[rows] == 0).all():
                assert torch.allclose(mine, theirs, rtol=1e-6)
            else:
                assert torch.isinf(mine).any()
    assert counts["hit"] > 500
