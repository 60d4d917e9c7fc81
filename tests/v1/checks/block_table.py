"""block-table-dirty against the original ``BlockTable`` of this release."""

from __future__ import annotations

from typing import Any

import numpy as np

from overlay.ledger import _store, read_memory
from tests.support import applied
from tests.v1 import block_table_history as history


def counted(patch: str) -> dict[str, int]:
    return read_memory(_store.memory).get(patch, {})


def spent(patch: str, before: dict[str, int]) -> dict[str, int]:
    """event -> how often it happened since ``before``."""
    return {event: n - before.get(event, 0) for event, n in counted(patch).items() if n > before.get(event, 0)}


def check_device_copy_equals_the_originals_after_every_step(release: str) -> dict[str, Any]:
    """A thousand random steps a release: decode, boundary, preemption, resume, swap, condense, reuse, three groups."""
    steps, seeds = 250, (1, 2, 3, 4)
    before = counted("block-table-dirty")
    for seed in seeds:
        original = history.replay(seed, steps)
        with applied("block-table-dirty", version=release):
            patched = history.replay(seed, steps)
        for step, (ours, theirs) in enumerate(zip(patched, original, strict=True)):
            for group, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                assert np.array_equal(mine, other), f"seed {seed}, step {step}, group {group}"
    events = spent("block-table-dirty", before)
    assert events["hit"] > steps, events
    assert events["refused: changed"] > 100, events
    assert events["refused: host tensor written directly"] > 0, events
    return events


def check_every_writer_makes_the_table_dirty(release: str) -> dict[str, Any]:
    """After each kind of write the next commit copies; without one it does not. Nothing appended is no write."""
    with applied("block-table-dirty", version=release):
        tables = history.make_batch().block_table
        table = tables.block_tables[0]
        writes = {
            "append": lambda: tables.append_row(([7], [8], [9]), 0),
            "add": lambda: tables.add_row(([1, 2], [3], [4]), 1),
            "move": lambda: tables.move_row(1, 2),
            "swap": lambda: tables.swap_row(0, 2),
            "clear": tables.clear,
            "host tensor": lambda: table.block_table.cpu.fill_(3),
        }
        if hasattr(tables, "clear_row"):
            writes["clear row"] = lambda: tables.clear_row(0)
        tables.add_row(([1], [2], [3]), 0)
        tables.commit_block_table(4)
        before = counted("block-table-dirty")
        for name, write in writes.items():
            write()
            table.block_table.gpu.fill_(-5)  # so that a copy shows
            tables.commit_block_table(4)
            assert np.array_equal(table.block_table.gpu.numpy()[:4], table.block_table.np[:4]), name
            table.block_table.gpu.fill_(-6)
            tables.commit_block_table(4)
            assert (table.block_table.gpu.numpy()[:4] == -6).all(), f"{name}: copied without need"
            table.block_table.gpu.copy_(table.block_table.cpu)
        tables.append_row(([], [], []), 0)
        table.block_table.gpu.fill_(-7)
        tables.commit_block_table(4)
        assert (table.block_table.gpu.numpy()[:4] == -7).all(), "nothing was appended"
        tables.commit_block_table(5)
        assert np.array_equal(table.block_table.gpu.numpy()[:5], table.block_table.np[:5]), "another number"
        events = spent("block-table-dirty", before)
        assert events["refused: another number of requests"] == 3, events
        return events


def check_a_dummy_run_and_a_wake_up_forget_what_the_device_holds(release: str) -> dict[str, Any]:
    """Device rows below a committed number are overwritten by a dummy run's padding; the next commit must copy."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    class Broken(Exception):
        pass

    with applied("block-table-dirty", version=release):
        batch = history.make_batch()
        runner = object.__new__(GPUModelRunner)
        runner.input_batch = batch
        worker = object.__new__(Worker)
        worker.model_runner = runner
        tables = batch.block_table
        tables.add_row(([5], [6], [7]), 0)
        for name, call in {
            # both fail at once on such bare objects; what was begun may have written, so it counts all the same
            "dummy run": lambda: GPUModelRunner._dummy_run(runner, 1),
            "wake up": lambda: Worker.wake_up(worker),
        }.items():
            tables.commit_block_table(2)
            tables.block_tables[0].block_table.gpu[:2].fill_(-1)
            try:
                call()
            except Exception:
                pass
            tables.commit_block_table(2)
            host = tables.block_tables[0].block_table.np[:2]
            assert np.array_equal(tables.block_tables[0].block_table.gpu.numpy()[:2], host), name
    return {}


def check_without_a_version_counter_nothing_is_skipped(release: str) -> dict[str, Any]:
    """Tensors made under inference mode do not count their writes: every commit copies, no buffer is enrolled."""
    import torch

    from patches._lib.held import enrol, held

    with applied("block-table-dirty", version=release):
        table = history.make_batch().block_table.block_tables[0]
        with torch.inference_mode():
            table.block_table.cpu = torch.zeros_like(table.block_table.cpu)
            table.block_table.gpu = torch.zeros_like(table.block_table.cpu)
        before = counted("block-table-dirty")
        for _ in range(3):
            with torch.inference_mode():
                table.block_table.gpu.fill_(-3)
                table.commit_block_table(2)
            assert (table.block_table.gpu[:2] == 0).all()
        events = spent("block-table-dirty", before)
        assert events == {"refused: changed": 1, "refused: host tensor without a version counter": 2}, events
    assert not enrol(table.block_table) and held(table.block_table) is None
    return events
