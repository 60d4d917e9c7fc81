"""Mamba states move between blocks on the side stream: after the step that wrote them, before the pass that reads them."""

from __future__ import annotations

import types

import numpy as np
import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend

BLOCK = 4


@pytest.fixture
def states(world, monkeypatch):
    """The real buffers and functions over one layer of states [blocks, width]; ``copy`` notes what a copy accesses."""
    import torch
    from torch_npu import trace
    from vllm.v1.worker import mamba_utils

    state = torch.arange(20 * 8, dtype=torch.float32).view(20, 8).clone()
    memory = types.SimpleNamespace(state=state)

    def copy(sources, targets, sizes):
        """What the batch copy kernel does, by address, within this one layer."""
        base, row = state.data_ptr(), state.stride(0) * state.element_size()
        trace.access(state.untyped_storage().data_ptr(), True, "copy")
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            state[(target - base) // row] = state[(source - base) // row]

    monkeypatch.setattr(mamba_utils, "batch_memcpy", copy)
    return memory


def _step(state, prepare=lambda: None):
    """A request that crosses a block boundary: metadata between ``preprocess_mamba`` and the copy, then the pass."""
    import torch
    from torch_npu import trace
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker import mamba_utils

    address = state.untyped_storage().data_ptr()
    buffers = object.__new__(mamba_utils.MambaCopyBuffers)

    def make(n, dtype):
        return CpuGpuBuffer(n, dtype=dtype, device=torch.device("npu:0"), pin_memory=True)

    buffers.__dict__.update(
        src_ptrs=make(4, torch.int64),
        dst_ptrs=make(4, torch.int64),
        sizes=make(4, torch.int32),
        mamba_group_ids=[0],
        mamba_spec=types.SimpleNamespace(block_size=BLOCK, num_speculative_blocks=0),
        offset=0,
    )

    def state_copy(tensor, block_ids, source, tokens):
        return types.SimpleNamespace(start_addr=tensor[block_ids[source]].data_ptr(), num_elements=8)

    request = types.SimpleNamespace(num_computed_tokens=4, block_ids=[[3, 7, 9]])
    scheduler = types.SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids=set(),
        scheduled_cached_reqs=types.SimpleNamespace(resumed_req_ids=set()),
        num_scheduled_tokens={"one": 1},
    )
    batch = types.SimpleNamespace(req_ids=["one"], num_accepted_tokens_cpu=np.ones(1, dtype=np.int32))
    groups = types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(layer_names=["layer"])])
    context = {"layer": types.SimpleNamespace(kv_cache=[state])}

    trace.access(address, True, "the step before writes states")
    arguments = (scheduler, groups, None, {"one": 0}, batch, {"one": request}, context, (state_copy,), buffers)
    mamba_utils.preprocess_mamba(*arguments)
    prepare()
    mamba_utils.do_mamba_copy_block(buffers)
    trace.access(address, False, "the forward pass reads states")
    return buffers, arguments


def _traced(state):
    from torch_npu import trace

    trace.clear()
    trace.on = True
    try:
        _step(state)
        return trace.races(), {access.stream for access in trace.accesses if access.what == "copy"}
    finally:
        trace.on = False


def test_the_state_is_copied_once_and_ordered(states):
    import torch

    before = states.state.clone()
    races, streams = _traced(states.state)
    expected = states.state.clone()
    assert not races and streams == {torch.npu.default_stream().id}
    assert not expected.equal(before) and expected[7].equal(before[3])

    states.state.copy_(before)
    with applied("ascend-mamba-copy-overlap"):
        races, streams = _traced(states.state)
    assert states.state.equal(expected)
    assert not races and streams and torch.npu.default_stream().id not in streams


def test_leaving_out_either_wait_is_a_race(states, monkeypatch):
    import torch_npu

    original = torch_npu.Stream.wait_event
    for left_out in (0, 1):
        calls = []

        def wait_event(self, event, calls=calls, left_out=left_out):
            calls.append(event)
            if len(calls) - 1 != left_out:
                original(self, event)

        monkeypatch.setattr(torch_npu.Stream, "wait_event", wait_event)
        with applied("ascend-mamba-copy-overlap"):
            races, _ = _traced(states.state)
        assert races, left_out


def test_events_are_made_once_and_the_host_arrays_are_free_before_they_are_written(states):
    from torch_npu import trace
    from vllm.v1.worker import mamba_utils

    with applied("ascend-mamba-copy-overlap"):
        buffers, arguments = _step(states.state)
        events = buffers._overlay_events
        trace.clear()
        trace.on = True
        mamba_utils.preprocess_mamba(*arguments)  # nothing to copy any more
        trace.on = False
    assert buffers._overlay_events is events and trace.events["synchronize"] == 1


def test_a_kv_connector_keeps_the_copy_where_it_was(states, monkeypatch):
    import torch
    import vllm.distributed.kv_transfer as kv_transfer

    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    with applied("ascend-mamba-copy-overlap"):
        _, streams = _traced(states.state)
    assert streams == {torch.npu.default_stream().id}
