"""``greedy-tail`` against the original: whole histories, the real sampler on awkward logits, and its gate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from patches.common import greedy_tail as patch
from tests.support import applied
from tests.v2.cases.engine import Engine, assert_equal, counted, stock_run


@pytest.mark.parametrize(("seed", "kind", "pad_to"), [(1, "mixed", 1), (5, "greedy", 4)])
def test_histories_leave_every_buffer_as_the_original_does(qwen: Engine, seed: int, kind: str, pad_to: int) -> None:
    stock = stock_run(qwen, seed, kind, pad_to)
    with applied("greedy-tail"), counted(patch.count) as counts:
        patched = qwen.run(seed, kind, pad_to)
    assert_equal(stock, patched)
    assert counts["hit"] > (20 if kind == "greedy" else 0)
    assert counts["refused: prompt not finished" if kind == "greedy" else "refused: temperature"] > 0


def batch_of(sampler: Any, rows: int) -> Any:
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    return InputBatch.make_dummy(rows, rows, InputBuffers(8, 16, torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_masked_rows_and_infinities_give_the_original_tokens(qwen: Engine, dtype: torch.dtype) -> None:
    """Logits as a grammar leaves them (-inf but for a few), rows of equal values, a whole row of -inf, a tie at the end."""
    qwen.reset()
    sampler = qwen.runner.sampler
    generator = torch.Generator().manual_seed(5)
    for width in (5, 8192, 9001):  # below, at and beyond one block of either kernel
        logits = torch.randn(4, width, generator=generator).to(dtype)
        logits[0] = 1.5
        logits[1] = float("-inf")
        logits[2] = float("-inf")
        logits[2, [width - 1, width // 2]] = 3.0
        logits[3, [0, width - 1]] = 50.0
        if width == 8192:
            logits[3, width - 1] = float("inf")
        expected = sampler(logits.clone(), batch_of(sampler, 4))
        with applied("greedy-tail"), counted(patch.count) as counts:
            found = sampler(logits.clone(), batch_of(sampler, 4))
        sampler.penalties_state.__dict__.pop("_overlay_greedy", None)
        assert counts["hit"] == 1
        for name in ("sampled_token_ids", "num_sampled", "num_rejected"):
            value, wanted = getattr(found, name), getattr(expected, name)
            assert value.dtype == wanted.dtype and value.shape == wanted.shape and torch.equal(value, wanted), name


REFUSALS = {
    "temperature": {"temperature": 0.5},
    "logprobs": {"logprobs": 2},
    "logits processing": {"presence_penalty": 1.0},
    "logits processing: bias": {"logit_bias": {3: 1.0}},
    "logits processing: allowed": {"allowed_token_ids": [1, 2]},
    "logits processing: min tokens": {"min_tokens": 3, "stop_token_ids": [5]},
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_request_that_needs_more_sends_the_batch_to_the_original(qwen: Engine, name: str) -> None:
    qwen.reset()
    sampler, reason = qwen.runner.sampler, name.partition(":")[0]
    with applied("greedy-tail"), counted(patch.count) as counts:
        batch, logits = batch_of(sampler, 3), torch.randn(3, 512)
        sampler(logits.clone(), batch)
        sampler.add_request(1, SamplingParams(**{"temperature": 0.0, **REFUSALS[name]}))
        sampler.apply_staged_writes()
        sampler(logits.clone(), batch)
        sampler.add_request(1, SamplingParams(temperature=0.0))  # and back again, with the slot's next owner
        sampler.apply_staged_writes()
        sampler(logits.clone(), batch)
    assert counts == {"hit": 2, f"refused: {reason}": 1}


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("batch.num_draft_tokens", 2, "speculation"),
        ("sampler.num_speculative_tokens", 4, "speculation"),
        ("sampler.compute_nans", True, "NaN counts wanted"),
        ("sampler.return_sampling_mask", True, "sampling mask wanted"),
        ("sampler.trace_replay_state", object(), "trace replay"),
        ("sampling_states.min_p", SimpleNamespace(np=np.full(8, 0.2)), "top-k, top-p or min-p"),
        ("sampling_states.top_k", SimpleNamespace(np=np.full(8, 5)), "top-k, top-p or min-p"),
        ("sampling_states.top_p", SimpleNamespace(np=np.full(8, 0.5)), "top-k, top-p or min-p"),
        ("batch.prefill_len_np", np.full(3, 9), "prompt not finished"),
    ],
)
def test_each_condition_broken_once_takes_the_original(
    qwen: Engine, monkeypatch: pytest.MonkeyPatch, path: str, value: Any, reason: str
) -> None:
    qwen.reset()
    sampler = qwen.runner.sampler
    batch = batch_of(sampler, 3)
    owner = {"batch": batch, "sampler": sampler, "sampling_states": sampler.sampling_states}[path.split(".")[0]]
    monkeypatch.setattr(owner, path.split(".")[1], value)
    original = object()
    with counted(patch.count) as counts:
        assert patch.call(lambda *args: original, sampler, (torch.zeros(3, 512), batch), {}) is original
    assert counts == {f"refused: {reason}": 1}


def test_a_sampler_of_another_class_takes_the_original(qwen: Engine) -> None:
    original = object()
    with counted(patch.count) as counts:
        assert patch.call(lambda *args: original, SimpleNamespace(), (None, None), {}) is original
    assert counts == {"refused: a sampler class of its own": 1}


def test_the_constant_counts_are_never_written(qwen: Engine) -> None:
    for ones, zeros, host in patch._constants.values():
        assert bool((ones == 1).all()) and not bool(zeros.any()) and host.all() and not host.flags.writeable
    assert patch._constants
