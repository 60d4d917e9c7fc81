"""``sampler-staged-writes`` against the original, step by step."""

from __future__ import annotations

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
    assert counts["refused: sampler: requests added"] >= 5
