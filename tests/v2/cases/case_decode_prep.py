"""``decode-input-prep-v2`` against the original, step by step, and each condition of its gate broken once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from patches.common import decode_input_prep_v2 as patch
from tests.support import applied
from tests.v2.cases.engine import Engine, assert_equal, counted, stock_run


@pytest.mark.parametrize(("seed", "kind", "pad_to"), [(1, "mixed", 1), (3, "greedy", 4)])
def test_histories_leave_every_buffer_as_the_original_does(qwen: Engine, seed: int, kind: str, pad_to: int) -> None:
    stock = stock_run(qwen, seed, kind, pad_to)
    with applied("decode-input-prep-v2"), counted(patch.count) as counts:
        patched = qwen.run(seed, kind, pad_to)
    assert_equal(stock, patched)
    assert counts["hit"] > len(stock.steps) // 4
    assert counts["refused: more than one token a request"] > 0


def test_the_shadow_compares_every_value_and_finds_them_equal(qwen: Engine) -> None:
    with applied("decode-input-prep-v2", shadow=True), counted(patch.count) as counts:
        qwen.run(4, "greedy", 2)
    assert counts["shadow: equal"] == counts["hit"] > 20


class Original(Exception):
    """Raised in place of the original: it was taken."""


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("scheduled.total_num_scheduled_tokens", 9, "more than one token a request"),
        ("scheduled.scheduled_spec_decode_tokens", {"a": [1]}, "draft tokens"),
        ("scheduled.scheduled_new_reqs", [object()], "new request"),
        ("runner.speculator", object(), "speculation configured"),
        ("runner.num_speculative_steps", 2, "speculation configured"),
        ("runner.use_pp", True, "pipeline parallelism"),
        ("runner.pcp_manager", object(), "prefill context parallelism"),
        ("tables.cp_size", 2, "decode context parallelism"),
        ("tables.num_kv_cache_groups", 0, "no KV cache"),
        ("tables.has_sliding_window_groups", True, "sliding window masked block tables"),
        ("runner.is_encoder_decoder", True, "encoder-decoder"),
        ("model_state.num_new_sampled_tokens_per_step", 0, "more than one token sampled a step"),
        ("runner.fast_prefill", object(), "fast prefill"),
        ("runner.ubatch_runner", object(), "microbatches"),
        ("runner.model_config", SimpleNamespace(rswa_window=64), "R-SWA"),
        ("batch.has_prefill", True, "prefill in the batch"),
    ],
)
def test_each_condition_broken_once_takes_the_original(
    qwen: Engine, monkeypatch: pytest.MonkeyPatch, path: str, value: object, reason: str
) -> None:
    qwen.reset()
    runner = qwen.runner
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=2,
        num_scheduled_tokens={"a": 1, "b": 1},
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=[],
    )
    batch = SimpleNamespace(has_prefill=False)
    owners = {
        "scheduled": scheduled,
        "runner": runner,
        "tables": runner.block_tables,
        "model_state": runner.model_state,
        "batch": batch,
    }
    owner, name = path.split(".")
    monkeypatch.setattr(owners[owner], name, value, raising=False)

    def original(*args: object, **kwargs: object) -> None:
        raise Original

    with counted(patch.count) as counts, pytest.raises(Original):
        patch.prepare_inputs(original, runner, (scheduled,), {"batch_req_state": batch, "batch_desc": None})
    assert counts == {f"refused: {reason}": 1}
