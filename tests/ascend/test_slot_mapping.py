"""Slots from the host are those of the real kernel, over the whole buffer."""

from __future__ import annotations

import random

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend


def _tables(rng, requests, longest):
    """Two groups (the second one's kernel works on thirds of its blocks), filled, committed."""
    import replay
    import torch
    from vllm_ascend.worker.block_table import MultiGroupBlockTable

    tables = MultiGroupBlockTable(
        max_num_reqs=replay.MAX_REQS,
        max_model_len=replay.MAX_LEN,
        max_num_batched_tokens=256,
        pin_memory=True,
        device=torch.device("npu:0"),
        block_sizes=list(replay.BLOCKS),
        kernel_sizes=[[16], [16]],
    )
    for row in range(requests):
        tables.add_row(tuple([rng.randrange(1, 40_000_000) for _ in range(-(-longest // size))] for size in replay.BLOCKS), row)
    tables.commit_block_table(requests)
    return tables


def _step(rng, requests, most):
    """(bounds, positions) of a step: each request's tokens lie behind its computed ones."""
    import torch

    lengths = [rng.randint(1, max(1, most // requests)) for _ in range(requests)]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) + rng.randrange(300) for n in lengths])
    return bounds, positions


def _fill(tables):
    """Garbage in every entry, another in each."""
    import torch

    for table in tables.block_tables:
        table.slot_mapping.gpu.copy_(7_000_000 + torch.arange(table.slot_mapping.gpu.numel(), dtype=torch.int32))


def _slots(tables):
    return [table.slot_mapping.gpu.clone() for table in tables.block_tables]


def _host_runner(bounds, positions, requests):
    """The runner's buffers that the patch reads, with the runner's names."""
    import types

    import torch
    from vllm.v1.utils import CpuGpuBuffer

    start = CpuGpuBuffer(16, dtype=torch.int32, device=torch.device("npu:0"), pin_memory=True)
    start.cpu[: requests + 1] = bounds
    start.copy_to_gpu()
    host = torch.zeros(512, dtype=torch.int64)
    host[: len(positions)] = positions
    return types.SimpleNamespace(
        use_async_spec_decode=False,
        pcp_size=1,
        positions=host.clone(),
        query_start_loc=start,
        _positions_np_buf=host.numpy(),
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_whole_buffer_is_the_kernels(world, seed):
    from patches.ascend import ascend_host_slot_mapping as patch

    rng = random.Random(seed)
    requests = rng.randint(1, 6)
    tables = _tables(rng, requests, 480)
    bounds, positions = _step(rng, requests, 79)
    runner = _host_runner(bounds, positions, requests)
    arguments = requests, runner.query_start_loc.gpu[: requests + 1], runner.positions[: len(positions)]

    _fill(tables)
    tables.compute_slot_mapping(*arguments)
    expected = _slots(tables)
    _fill(tables)
    before = patch.count.get("hit")
    with applied("ascend-host-slot-mapping"):
        patch._preparing.append(runner)
        try:
            tables.compute_slot_mapping(*arguments)
        finally:
            patch._preparing.pop()
    assert patch.count.get("hit") == before + 2
    for one, other in zip(expected, _slots(tables), strict=True):
        assert one.equal(other)


def test_the_published_copy_leaves_a_wrong_tail(world):
    """It writes the slots of the step's tokens alone: what the step before left behind them stays."""
    rng = random.Random(3)
    tables = _tables(rng, 2, 480)
    bounds, positions = _step(rng, 2, 40)
    _fill(tables)
    tables.compute_slot_mapping(2, bounds, positions)
    expected = _slots(tables)
    _fill(tables)
    table = tables[0]
    tokens = len(positions)
    slots = (
        table.block_table.cpu[[i for i in range(2) for _ in range(int(bounds[i]), int(bounds[i + 1]))], positions // 16].long()
        * 16
        + positions % 16
    )
    table.slot_mapping.cpu[:tokens] = slots.int()
    table.slot_mapping.copy_to_gpu(tokens)
    assert table.slot_mapping.gpu[:tokens].equal(expected[0][:tokens])
    assert not table.slot_mapping.gpu.equal(expected[0])


@pytest.mark.parametrize(
    "reason, spoil",
    [
        ("outside _prepare_inputs", None),
        ("optimistic positions", lambda runner: setattr(runner, "use_async_spec_decode", True)),
        ("context parallelism", lambda runner: setattr(runner, "pcp_size", 2)),
        ("other positions", lambda runner: setattr(runner, "positions", runner.positions.clone())),
        ("other request bounds", lambda runner: runner.query_start_loc.np.__setitem__(2, 99)),
        ("a position beyond the table", lambda runner: runner._positions_np_buf.__setitem__(0, 5000)),
    ],
)
def test_each_gate_leaves_the_kernel(world, reason, spoil):
    from patches.ascend import ascend_host_slot_mapping as patch

    rng = random.Random(4)
    tables = _tables(rng, 2, 480)
    bounds, positions = _step(rng, 2, 20)
    runner = _host_runner(bounds, positions, 2)
    arguments = 2, runner.query_start_loc.gpu[:3], runner.positions[: len(positions)]
    _fill(tables)
    tables.compute_slot_mapping(*arguments)
    expected = _slots(tables)
    if spoil:
        spoil(runner)
        patch._preparing.append(runner)
    before = patch.count.get(f"refused: {reason}")
    _fill(tables)
    try:
        with applied("ascend-host-slot-mapping"):
            tables.compute_slot_mapping(*arguments)
    finally:
        patch._preparing.clear()
    assert patch.count.get(f"refused: {reason}") == before + 2
    for one, other in zip(expected, _slots(tables), strict=True):
        assert one.equal(other)


def test_many_tokens_and_slots_beyond_int32_leave_the_kernel(world):
    from patches.ascend import ascend_host_slot_mapping as patch

    rng = random.Random(5)
    tables = _tables(rng, 1, 480)
    tables[0].block_table.np[0, :3] = 2**28
    with applied("ascend-host-slot-mapping"):
        for tokens, reason in ((80, "many tokens"), (20, "a slot beyond int32")):
            import torch

            runner = _host_runner(torch.tensor([0, tokens]), torch.arange(tokens), 1)
            before = patch.count.get(f"refused: {reason}")
            patch._preparing.append(runner)
            try:
                tables[0].compute_slot_mapping(1, runner.query_start_loc.gpu[:2], runner.positions[:tokens])
            finally:
                patch._preparing.clear()
            assert patch.count.get(f"refused: {reason}") == before + 1


def test_the_fast_kernel_is_the_real_one(world):
    """The replay of whole steps runs an equal kernel in place of the interpreted one."""
    import replay
    from vllm_ascend.worker import block_table

    for seed in range(6):
        rng = random.Random(seed)
        requests = rng.randint(1, 6)
        tables = _tables(rng, requests, 480)
        bounds, positions = _step(rng, requests, 120)
        _fill(tables)
        tables.compute_slot_mapping(requests, bounds, positions)
        expected = _slots(tables)
        _fill(tables)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_table, "_compute_slot_mapping_kernel", replay.FastSlotKernel())
            tables.compute_slot_mapping(requests, bounds, positions)
        for one, other in zip(expected, _slots(tables), strict=True):
            assert one.equal(other)
