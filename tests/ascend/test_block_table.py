"""After every commit the device holds the host's rows, whatever was skipped before."""

from __future__ import annotations

import random

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend

PATCH = "ascend-block-table-dirty"


@pytest.fixture
def modelless_dummy_run(world, monkeypatch):
    """What a dummy run does to the tables, without weights: commits every row and zeroes some on the device."""
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    def dummy_run(runner):
        for table in runner.input_batch.block_table.block_tables:
            table.commit_block_table(table.max_num_reqs)
            table.block_table.gpu[1:].fill_(0)

    monkeypatch.setattr(NPUModelRunner, "_dummy_run", dummy_run)


def _table():
    import torch
    from vllm_ascend.worker.block_table import BlockTable

    return BlockTable(48, 6, 10, 64, True, torch.device("npu:0"), kernel_sizes=[16])


def _wrong_after_commits(seed, steps):
    """Commits after which a row below the committed number differs between host and device."""
    import types

    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    rng, table, wrong = random.Random(seed), _table(), 0
    runner = object.__new__(NPUModelRunner)
    runner.input_batch = types.SimpleNamespace(block_table=types.SimpleNamespace(block_tables=[table]))
    for _ in range(steps):
        row, other = rng.randrange(6), rng.randrange(6)
        match rng.choice(("append", "append", "none", "add", "clear", "move", "swap", "direct", "all", "dummy", "-", "-", "-")):
            case "append" if table.num_blocks_per_row[row] < 27:
                table.append_row([rng.randrange(1, 99)], row)
            case "none":
                table.append_row([], row)
            case "add":
                table.add_row([rng.randrange(1, 99) for _ in range(rng.randint(1, 5))], row)
            case "clear":
                table.clear_row(row)
            case "move":
                table.move_row(row, other)
            case "swap":
                table.swap_row(row, other)
            case "direct":
                table.block_table.cpu[row, 0] = rng.randrange(1, 99)
            case "dummy":
                NPUModelRunner._dummy_run(runner)
        rows = rng.choice((1, 2, 2, 3, 3, 3, 6))
        table.commit_block_table(rows)
        wrong += not table.block_table.gpu[:rows].equal(table.block_table.cpu[:rows])
        padded = min(rows + rng.randrange(3), 6)
        table.block_table.gpu[rows:padded].fill_(0)  # as building metadata of a padded batch does
    return wrong


def test_every_commit_leaves_the_hosts_rows_on_the_device(modelless_dummy_run):
    from overlay.runtime import Counters

    counts = Counters(PATCH)
    hits = counts.get("hit")
    assert _wrong_after_commits(0, 300) == 0
    with applied(PATCH, accept_drift=True):
        for seed in range(6):
            assert _wrong_after_commits(seed, 500) == 0
    assert counts.get("hit") > hits + 100
    for reason in ("changed", "another number of rows", "host tensor written directly"):
        assert counts.get(f"refused: {reason}") > 10, reason


def test_a_commit_is_a_snapshot(world):
    import torch_npu

    table = _table()
    with applied(PATCH):
        table.add_row([5, 6], 0)
        with torch_npu.copies.delay():
            table.commit_block_table(1)
            table.add_row([7, 8], 0)
        assert table.block_table.gpu[0, :6].tolist() == [15, 16, 17, 18, 19, 20]


def test_waking_up_forgets(world):
    import types

    from patches.ascend import ascend_block_table_dirty as patch

    table = _table()
    with applied(PATCH):
        table.add_row([5], 0)
        table.commit_block_table(1)
        table.block_table.gpu.fill_(0)  # slept
        runner = types.SimpleNamespace(
            input_batch=types.SimpleNamespace(block_table=types.SimpleNamespace(block_tables=[table]))
        )
        patch.wake_up(lambda: None, types.SimpleNamespace(model_runner=runner), (), {})
        table.commit_block_table(1)
        assert table.block_table.gpu[0, 0] == 15
