"""All V2 patches in force at once, on several KV cache groups and under speculation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from patches.common import decision_cache, decode_input_prep_v2, greedy_tail, sampler_staged_writes
from tests.support import applied
from tests.v2.cases.engine import Engine, assert_equal, counted, stock_run

ALL = ("sampler-staged-writes", "decode-input-prep-v2", "greedy-tail", "decision-cache")


@contextmanager
def all_applied() -> Iterator[None]:
    with ExitStack() as stack:
        for patch in ALL:
            stack.enter_context(applied(patch))
        yield


def test_together_they_change_nothing_that_can_be_read(qwen: Engine) -> None:
    stock = stock_run(qwen, 3, "greedy", 4)
    with all_applied(), counted(decode_input_prep_v2.count) as prep, counted(greedy_tail.count) as tail:
        patched = qwen.run(3, "greedy", 4)
    assert_equal(stock, patched)
    assert prep["hit"] > 0 and tail["hit"] > 0
    assert stock.preemptions > 0


def test_two_cache_groups(gemma: Engine) -> None:
    assert gemma.runner.block_tables.num_kv_cache_groups == 2
    stock = stock_run(gemma, 6, "mixed", 2)
    with (
        all_applied(),
        counted(decode_input_prep_v2.count) as prep,
        counted(sampler_staged_writes.count) as writes,
    ):
        patched = gemma.run(6, "mixed", 2)
    assert_equal(stock, patched)
    assert prep["hit"] > 0
    assert writes["hit: block tables"] > 0


def test_under_speculation_with_rejections(speculating: Engine) -> None:
    """Two patches work there; the other two see speculation and take the original."""
    stock = stock_run(speculating, 5, "speculative")
    with (
        all_applied(),
        counted(decode_input_prep_v2.count) as prep,
        counted(greedy_tail.count) as tail,
        counted(sampler_staged_writes.count) as writes,
        counted(decision_cache.count) as kept,
    ):
        patched = speculating.run(5, "speculative")
    assert_equal(stock, patched)
    assert writes["hit: sampler"] > 0 and kept["hit"] > 0
    assert stock.preemptions > 0
    assert "hit" not in prep and "hit" not in tail
    assert sum(prep.values()) > 0 and tail["refused: speculation"] > 0
