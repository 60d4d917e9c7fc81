"""``sampler-staged-writes`` against the original, step by step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from patches.common import sampler_staged_writes as patch
from tests.support import applied
from tests.v2.cases.engine import Engine, assert_equal, counted, stock_run


@pytest.mark.parametrize(("seed", "kind", "pad_to"), [(1, "mixed", 1), (2, "processed", 1), (3, "greedy", 4)])
def test_histories_leave_every_buffer_as_the_original_does(qwen: Engine, seed: int, kind: str, pad_to: int) -> None:
    stock = stock_run(qwen, seed, kind, pad_to)
    with applied("sampler-staged-writes"), counted(patch.count) as counts:
        patched = qwen.run(seed, kind, pad_to)
    assert_equal(stock, patched)
    assert counts["hit: sampler"] > len(stock.steps) // 3
    assert counts["hit: block tables"] > 0
    assert counts["hit: gather"] > 0
    assert counts["refused: sampler: requests added"] >= 3


class Custom:
    """A logits processor of a user's."""


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("sampler.logits_processors", [Custom()], "custom logits processor"),
        ("tables.has_sliding_window_groups", True, "gather: sliding window"),
        ("runner.pcp_manager", object(), "gather: prefill context parallelism"),
        ("config.kv_cache_groups", [SimpleNamespace(kv_cache_spec=Custom())], "gather: a cache of another kind"),
    ],
)
def test_each_condition_broken_once_takes_the_original(
    qwen: Engine, monkeypatch: pytest.MonkeyPatch, path: str, value: object, reason: str
) -> None:
    qwen.reset()
    runner = qwen.runner
    owners = {
        "sampler": runner.sampler,
        "tables": runner.block_tables,
        "runner": runner,
        "config": runner.kv_cache_config,
    }
    owner, name = path.split(".")
    monkeypatch.setattr(owners[owner], name, value, raising=False)
    original = object()
    with counted(patch.count) as counts:
        if owner == "sampler":
            assert patch.apply_sampler(lambda: original, runner.sampler, (), {}) is original
        else:
            assert patch.prepare_attn(lambda batch: original, runner, (SimpleNamespace(),), {}) is original
    assert counts == {f"refused: {reason}": 1}


def test_a_sampler_of_another_class_copies_every_step() -> None:
    with counted(patch.count) as counts:
        assert patch.apply_sampler(lambda: 7, Custom(), (), {}) == 7
    assert counts == {"refused: a sampler class of its own": 1}
