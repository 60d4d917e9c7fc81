"""A snapshot stays what it was, however late its transfer reads it."""

from __future__ import annotations

import random

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend


def _corrupted(send, seed):
    """In how many of six calls the device ends up with something else than the host held at the call."""
    import torch
    import torch_npu
    from vllm.v1.utils import CpuGpuBuffer

    rng = random.Random(seed)
    buffer = CpuGpuBuffer(8, dtype=torch.int32, device=torch.device("npu:0"), pin_memory=True)
    wrong = 0
    for _ in range(6):
        with torch_npu.copies.delay():
            held = [rng.randrange(1000) for _ in range(8)]
            buffer.np[:] = held
            returned = send(buffer)
            buffer.np[:] = -1  # the host goes on to the next step while the transfer is under way
            if rng.random() < 0.5:
                send(buffer)
                buffer.np[:] = -2
                held = [-1] * 8
        wrong += returned.tolist() != held
        assert returned is buffer.gpu
    return wrong


def test_the_original_and_the_patch_are_snapshots(world):
    from vllm_ascend.worker import model_runner_v1, utils

    assert _corrupted(utils.copy_snapshot_to_gpu, 1) == 0
    with applied("ascend-snapshot-copy"):
        assert _corrupted(model_runner_v1.copy_snapshot_to_gpu, 1) == 0
        assert _corrupted(utils.copy_snapshot_to_gpu, 2) == 0


def test_a_plain_copy_is_none(world):
    assert _corrupted(lambda buffer: buffer.copy_to_gpu(), 1) == 6


def test_one_staging_buffer_used_again_is_none(world):
    """The published form: the second call overwrites the staging memory under the first transfer."""
    import torch

    staging = {}

    def send(buffer):
        pinned = staging.setdefault(id(buffer), torch.empty_like(buffer.cpu))
        pinned.copy_(buffer.cpu)
        return buffer.gpu.copy_(pinned, non_blocking=True)

    import torch_npu
    from vllm.v1.utils import CpuGpuBuffer

    first = CpuGpuBuffer(4, dtype=torch.int32, device=torch.device("npu:0"), pin_memory=True)
    seen = []
    with torch_npu.copies.delay():
        for value in (1, 2):
            first.np[:] = value
            send(first)
            torch_npu.copies.queue.append(lambda: seen.append(first.gpu.tolist()))  # what a kernel behind it reads
    assert seen == [[2] * 4, [2] * 4]  # the first kernel was to see ones

    from vllm_ascend.worker import utils

    seen.clear()
    with applied("ascend-snapshot-copy"), torch_npu.copies.delay():
        for value in (1, 2):
            first.np[:] = value
            utils.copy_snapshot_to_gpu(first)
            torch_npu.copies.queue.append(lambda: seen.append(first.gpu.tolist()))
    assert seen == [[1] * 4, [2] * 4]
