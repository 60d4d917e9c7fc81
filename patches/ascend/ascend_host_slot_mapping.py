"""Positions and slot mapping from the host for few tokens.

``BlockTable.compute_slot_mapping`` launches a Triton kernel per KV cache group; its launch costs more than the few
integer operations of a small decode step. Inside ``_prepare_inputs`` the host has the same positions, request bounds
and block table at hand, so it can compute the slots and send them in one copy.

The kernel also fills the rest of the buffer, up to ``max_num_batched_tokens``, with -1, and proposers read it there.
The host sends the whole buffer for that reason: nobody has to know who else wrote its tail in the meantime.

Positions likewise: in place of three kernels (gather, cast, add) one copy of what the host computed already.

The host's positions are the device's only where they are no guess: under asynchronous scheduling with speculation the
device corrects them by the tokens accepted, and slots from uncorrected positions corrupt the KV cache in silence. There
the kernel stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.runtime import Counters, options
from overlay.spec import REPLACE, Condition, Exactness, Kind, Option, Patch, Target

PATCH = Patch(
    id="ascend-host-slot-mapping",
    kind=Kind.CODE,
    summary="Take positions and slot mapping from the host for steps of few tokens, the -1 tail included",
    why=(
        "_compute_slot_mapping_kernel costs about 131 us a launch on Ascend 910C whatever the batch (reported by "
        "others; 173 us measured by vllm-ascend's PR 13048); not measured here."
    ),
    remove_when="vllm-ascend has its own slot mapping kernel (PR 13048, main since August 2026)",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm_ascend.worker.block_table:BlockTable.compute_slot_mapping",
            use="compute",
            fingerprints={"vllm-ascend 0.23.0": "455e41f39f3dc3d8"},
        ),
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner._prepare_inputs",
            use="make_prepare",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "87fb5f2108f253d0"},
        ),
    ),
    assumes=(
        Target(
            at="vllm.v1.worker.block_table:_compute_slot_mapping_kernel",
            fingerprints={"vllm-ascend 0.23.0": "3985e81ef0955a79"},
        ),
    ),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        facts={"serving.decode_context_parallel": 1, "serving.prefill_context_parallel": 1},
        also="positions_are_known",
    ),
    options={
        "max_tokens": Option(80, "steps of fewer tokens take the host's way"),
        "positions": Option(True, "copy the positions from the host as well"),
    },
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    live=("model_runner", "model_runner.input_batch.block_table.block_tables.0"),
    verified="simulated",
    tests="tests/ascend/test_slot_mapping.py",
)

count = Counters(PATCH.id)

LARGEST_BUFFER = 65536  # entries: beyond this the copy of the whole buffer is no longer small beside a launch
INT32 = 2**31

_preparing: list[Any] = []  # the runner inside _prepare_inputs; a worker prepares one step at a time


def positions_are_known(facts: Any) -> str | None:
    """Asynchronous scheduling with speculation schedules from optimistic positions."""
    if facts.serving.speculative_method and facts.serving.async_scheduling is not False:
        return "positions are optimistic under asynchronous scheduling with speculation"
    return None


def make_prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_prepare_inputs`` that offers its positions to ``send_positions`` and marks the time of ``compute``."""
    from patches._lib.ascend_edited_source import edited

    stock = """self.positions[:total_num_scheduled_tokens] = (
        self.num_computed_tokens[req_indices_gpu].to(torch.int64) + self.query_pos.gpu[:total_num_scheduled_tokens])"""
    inner = edited(
        original,
        statements={stock: f"if not _overlay_send(self, total_num_scheduled_tokens):\n    {stock}"},
        names={"_overlay_send": send_positions},
    )

    def _prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        _preparing.append(self)
        try:
            return inner(self, *args, **kwargs)
        finally:
            _preparing.pop()

    return _prepare_inputs


def send_positions(runner: Any, num_tokens: int) -> bool:
    """Copy the host's positions (int64) to the device; False where they may differ from the device's own."""
    import torch

    if not options(PATCH.id).get("positions", True):
        return False
    if runner.use_async_spec_decode:
        count.refuse("positions: optimistic")
    elif num_tokens >= options(PATCH.id).get("max_tokens", 80):
        count.refuse("positions: many tokens")
    else:
        count.add("positions hit")
        snapshot = torch.empty(num_tokens, dtype=torch.int64, pin_memory=True)
        snapshot.copy_(runner._positions_cpu_buf[:num_tokens])
        runner.positions[:num_tokens].copy_(snapshot, non_blocking=True)
        return True
    return False


def _refusal(table: Any, num_reqs: int, query_start_loc: Any, positions: Any, limit: int) -> str | None:
    if not _preparing:
        return "outside _prepare_inputs"
    runner = _preparing[-1]
    if runner.use_async_spec_decode:
        return "optimistic positions"
    if table.pcp_world_size * table.dcp_world_size != 1 or runner.pcp_size != 1:
        return "context parallelism"
    num_tokens = positions.shape[0]
    if num_tokens >= limit:
        return "many tokens"
    if positions.data_ptr() != runner.positions.data_ptr():
        return "other positions"
    if query_start_loc.data_ptr() != runner.query_start_loc.gpu.data_ptr():
        return "other request bounds"
    if query_start_loc.shape[0] != num_reqs + 1 or int(runner.query_start_loc.np[num_reqs]) != num_tokens:
        return "other request bounds"
    if not num_tokens <= table.max_num_batched_tokens <= LARGEST_BUFFER:
        return "large buffer"
    return None


def compute(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Slots of ``num_reqs`` requests' tokens into ``slot_mapping.gpu[:max_num_batched_tokens]`` (int32), -1 behind them."""
    import numpy as np
    import torch

    names = ("num_reqs", "query_start_loc", "positions")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    limit = options(PATCH.id).get("max_tokens", 80)
    reason = _refusal(instance, given["num_reqs"], given["query_start_loc"], given["positions"], limit)
    if reason is None:
        runner, num_reqs = _preparing[-1], given["num_reqs"]
        num_tokens = given["positions"].shape[0]
        bounds = runner.query_start_loc.np[: num_reqs + 1]
        positions = runner._positions_np_buf[:num_tokens].astype(np.int64)
        rows = np.repeat(np.arange(num_reqs), np.diff(bounds))
        columns, offsets = np.divmod(positions, instance.block_size)
        table = instance.block_table.np
        if num_tokens and (columns.min() < 0 or columns.max() >= table.shape[1]):
            reason = "a position beyond the table"
        else:
            slots = table[rows, columns].astype(np.int64) * instance.block_size + offsets
            if num_tokens and slots.max() >= INT32:
                reason = "a slot beyond int32"
    if reason is not None:
        count.refuse(reason)
        return wrapped(*args, **kwargs)
    count.hit()
    whole = torch.empty(instance.max_num_batched_tokens, dtype=torch.int32, pin_memory=True)
    host = whole.numpy()
    host[:num_tokens] = slots
    host[num_tokens:] = -1
    instance.slot_mapping.gpu[: instance.max_num_batched_tokens].copy_(whole, non_blocking=True)
    return None
