"""``decode-input-prep-v2`` against the original, step by step, and each condition of its gate broken once."""

from __future__ import annotations

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
