"""The buffers that a decode step of the V1 runner fills, their addresses on the device, and the launch that fills them.

One ``DecodeState`` belongs to one runner. It is built when a step could first be taken, and again whenever a buffer has
moved: the addresses are compared each step.
"""

from __future__ import annotations

import os
from typing import Any

from patches._lib.held import forget

PAD_SLOT = -1
CHUNK = 1024


class Unsupported(Exception):
    """A buffer is not what the kernel writes; the message is a short reason."""


def _device(buffer: Any) -> Any:
    """The device tensor of a ``CpuGpuBuffer``, or the tensor itself."""
    return getattr(buffer, "gpu", buffer)


def tables_of(runner: Any) -> list[Any]:
    """The block tables of the KV cache groups that map tokens to slots (from 0.26 on Mamba groups do not)."""
    found = []
    for table in runner.input_batch.block_table.block_tables:
        mode = getattr(table, "slot_mapping_mode", None)
        if mode is None or mode.name == "TOKEN_TO_KV_SLOT":
            found.append(table)
        elif mode.name != "NONE":
            raise Unsupported("slot mapping mode")
    return found


class DecodeState:
    """Pointer tables, constants and host views for one runner's buffers. Raises Unsupported."""

    def __init__(self, runner: Any) -> None:
        import numpy as np
        import torch

        self.batch = runner.input_batch
        self.device = runner.device
        self.max_reqs = runner.max_num_reqs
        self.tables = tables_of(runner)
        self.on_device = hasattr(runner, "num_computed_tokens")  # 0.23: positions and slots are computed there
        self.computed = (
            runner.num_computed_tokens if self.on_device else torch.zeros(self.max_reqs, dtype=torch.int32, device=self.device)
        )
        # Positions as the kernel left them, two buffers in turns: its programs read one while one of them writes the other.
        # Nothing else ever writes them, so that a step which continues the one before needs no copy of its positions.
        self.carried = [torch.zeros(self.max_reqs, dtype=torch.int32, device=self.device) for _ in range(2)]
        self.carried_values: list[int] = []
        self.rope = runner.mrope_positions if runner.uses_mrope else None
        self.deltas = torch.zeros(self.max_reqs, dtype=torch.int64, device=self.device)
        self.delta_values: list[int] = []
        self.lengths = runner.optimistic_seq_lens_cpu.numpy() if self.on_device else runner.seq_lens.np
        self.positions = None if self.on_device else runner.positions.np
        self.rows = np.arange(self.max_reqs + 1)
        self.arange = torch.arange(self.max_reqs, dtype=torch.int32, device=self.device)
        self.fast_prefill = bool(getattr(runner.cache_config, "kv_sharing_fast_prefill", False))
        self.indices: dict[int, Any] = {}  # number of requests -> logits indices
        self.accounts = [getattr(runner, name) for name in self.HOST_ONLY if hasattr(runner, name)]
        self.addresses = self.addresses_of(runner)
        self._check(runner)
        self._make_tables(runner)
        self._make_constants(runner)

    HOST_ONLY = ("query_start_loc", "discard_request_mask", "req_indices", "query_pos", "num_scheduled_tokens")

    def addresses_of(self, runner: Any) -> tuple[int, ...]:
        """Where everything is now; a difference to ``addresses`` means that the tables are stale."""
        found = [
            runner.input_ids.gpu.data_ptr(),
            _device(runner.positions).data_ptr(),
            runner.query_start_loc.gpu.data_ptr(),
            _device(runner.seq_lens).data_ptr(),
            runner.discard_request_mask.gpu.data_ptr(),
            self.computed.data_ptr(),
        ]
        if self.on_device:
            found += (
                runner.num_computed_tokens.data_ptr(),
                runner.optimistic_seq_lens_cpu.data_ptr(),
                runner.num_accepted_tokens.gpu.data_ptr(),
                runner.req_indices.gpu.data_ptr(),
                runner.query_pos.gpu.data_ptr(),
                runner.num_scheduled_tokens.gpu.data_ptr(),
            )
        if self.rope is not None:
            found.append(runner.mrope_positions.gpu.data_ptr())
        for table in self.tables:
            found.append(table.block_table.gpu.data_ptr())
            found.append(table.slot_mapping.gpu.data_ptr())
        return tuple(found)

    def moved(self, runner: Any) -> bool:
        return self.batch is not runner.input_batch or self.addresses != self.addresses_of(runner)

    def _check(self, runner: Any) -> None:
        import torch

        wanted = [
            (runner.input_ids.gpu, torch.int32),
            (_device(runner.positions), torch.int64),
            (runner.query_start_loc.gpu, torch.int32),
            (_device(runner.seq_lens), torch.int32),
            (runner.discard_request_mask.gpu, torch.bool),
            (self.computed, torch.int32),
        ]
        if self.on_device:
            wanted += [
                (runner.num_accepted_tokens.gpu, runner.num_accepted_tokens.gpu.dtype),
                (runner.req_indices.gpu, torch.int64),
                (runner.query_pos.gpu, torch.int64),
                (runner.num_scheduled_tokens.gpu, torch.int32),
            ]
        if self.rope is not None:
            wanted.append((self.rope.gpu, torch.int64))
        for table in self.tables:
            wanted += [(table.block_table.gpu, torch.int32), (table.slot_mapping.gpu, torch.int64)]
        for tensor, dtype in wanted:
            if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.device != self.computed.device:
                raise Unsupported("a buffer's type or layout")
        if runner.query_start_loc.gpu.shape[0] != self.max_reqs + 1 or _device(runner.seq_lens).shape[0] != self.max_reqs:
            raise Unsupported("a buffer's size")
        if not self.tables:
            raise Unsupported("no KV cache group with slots")
        for table in self.tables:
            if getattr(table, "dcp_world_size", 1) * getattr(table, "pcp_world_size", 1) != 1:
                raise Unsupported("context parallel")
            split = getattr(table, "blocks_per_kv_block", 1)
            if getattr(table, "kv_cache_block_size", table.block_size * split) != table.block_size * split:
                raise Unsupported("block size")

    def _make_tables(self, runner: Any) -> None:
        import torch

        from patches._lib.v1_decode_kernels import FIELDS

        pointers = dict.fromkeys(FIELDS, 0)
        pointers["num_computed_tokens"] = self.computed.data_ptr()
        pointers["mrope_deltas"] = self.deltas.data_ptr()
        present = ["input_ids", "positions", "query_start_loc", "seq_lens", "discard_request_mask"]
        if self.on_device:
            present += ["num_accepted_tokens", "req_indices", "query_pos", "num_scheduled_tokens"]
        if self.rope is not None:
            present.append("mrope_positions")
        for name in present:
            pointers[name] = _device(getattr(runner, name)).data_ptr()
        self.table = torch.tensor([pointers[name] for name in FIELDS], dtype=torch.int64, device=self.device)
        self.groups = torch.tensor(
            [
                [
                    table.block_table.gpu.data_ptr(),
                    table.slot_mapping.gpu.data_ptr(),
                    table.block_table.gpu.stride(0),
                    table.block_size,
                ]
                for table in self.tables
            ],
            dtype=torch.int64,
            device=self.device,
        )

    def _make_constants(self, runner: Any) -> None:
        import torch
        import triton.language as tl

        slots = {table.slot_mapping.gpu.shape[0] for table in self.tables}
        if len(slots) != 1:
            raise Unsupported("a buffer's size")
        accepted = runner.num_accepted_tokens.gpu if self.on_device else None
        if accepted is not None and accepted.dtype not in (torch.int32, torch.int64):
            raise Unsupported("a buffer's type or layout")
        covered = slots.pop() if self.on_device else self.max_reqs  # 0.18.1 pads the tail elsewhere
        # the tail of num_accepted_tokens counts as well: it may be longer than the requests
        longest = max(self.max_reqs + 1, 0 if accepted is None else accepted.shape[0])
        self.chunks = -(-covered // CHUNK)
        self.grid = (1 + len(self.tables) * self.chunks,)
        self.constants = {
            "BATCH": 1 << (longest - 1).bit_length(),
            "MAX_REQS": self.max_reqs,
            "ACCEPTED": 0 if accepted is None else accepted.shape[0],
            "ACCEPTED_TYPE": tl.int64 if accepted is not None and accepted.dtype is torch.int64 else tl.int32,
            "SCRATCH": self.on_device,
            "POSITIONS": self.on_device or self.rope is None,
            "ROPE_ROWS": 0 if self.rope is None else self.rope.gpu.shape[0],
            "ROPE_STRIDE": 0 if self.rope is None else self.rope.gpu.stride(0),
            "CHUNKS": self.chunks,
            "CHUNK": CHUNK,
            "SLOTS": covered if self.on_device else 0,
            "PAD": PAD_SLOT,
        }

    def launch(self, runner: Any, positions: list[int], deltas: list[int]) -> None:
        """Fill the device buffers for requests at ``positions``. deltas: M-RoPE offsets, empty without M-RoPE."""
        from patches._lib.v1_decode_kernels import decode_step

        number = len(positions)
        single = number == 1
        before, after = self.carried
        values, self.carried_values = self.carried_values, []  # should the launch fail, nothing is known
        ahead = int(not single and values == [position - 1 for position in positions])
        if not single:
            if not ahead:
                before[:number].copy_(self.batch.num_computed_tokens_cpu_tensor[:number], non_blocking=True)
            if deltas != self.delta_values:
                self._upload(deltas)
        decode_step[self.grid](
            self.table,
            self.groups,
            self.batch.prev_sampled_token_ids,
            before,
            after,
            number,
            ahead,
            positions[0],
            deltas[0] if deltas else 0,
            SINGLE=single,
            **self.constants,
        )
        if not single:
            self.carried, self.carried_values = [after, before], positions
        for buffer in self.accounts:
            forget(buffer)

    def compile(self) -> None:
        """Compile both forms of the kernel ahead of the first request, launching neither."""
        import torch

        from patches._lib.v1_decode_kernels import decode_step

        if os.environ.get("TRITON_INTERPRET") == "1":
            return
        sampled = torch.zeros(1, 1, dtype=torch.int32, device=self.device)
        for single in (True, False):
            given = (self.table, self.groups, sampled, *self.carried, 2, 0, 2, 2)
            decode_step.warmup(*given, SINGLE=single, grid=self.grid, **self.constants)

    def _upload(self, deltas: list[int]) -> None:
        import torch

        fresh = torch.tensor(deltas, dtype=torch.int64)
        if self.device.type != "cpu":
            fresh = fresh.pin_memory()
        self.deltas[: len(deltas)].copy_(fresh, non_blocking=True)
        self.delta_values = deltas

    def mirror(self, runner: Any, positions: list[int], deltas: list[int]) -> None:
        """The host's side of the same step: metadata builders and the next step read it."""
        number = len(positions)
        rows = self.rows[:number]
        batch = self.batch
        computed = batch.num_computed_tokens_cpu[:number]
        runner.input_ids.np[:number] = batch.token_ids_cpu[rows, computed]
        starts = runner.query_start_loc.np
        starts[: number + 1] = self.rows[: number + 1]
        starts[number + 1 :] = number
        self.lengths[:number] = computed
        self.lengths[:number] += 1
        self.lengths[number:] = 0
        runner.discard_request_mask.np[:number] = False
        if self.on_device:
            runner.query_pos.np[:number] = 0
            runner.prev_positions.np[:number] = rows
            runner.num_accepted_tokens.np.fill(1)
            runner.req_indices.np[:number] = rows
            runner.num_scheduled_tokens.np[:number] = 1
        else:
            self.positions[:number] = computed
        if self.rope is not None:
            self.rope.np[:, :number] = [p + d for p, d in zip(positions, deltas, strict=True)]

    def logits_indices(self, number: int) -> Any:
        """What picks each request's only row out of the hidden states.

        A slice: the runner takes ``hidden_states[logits_indices]``, and that is then a view in place of a gathered copy
        of the same rows. Fast prefill of shared KV caches reads the indices themselves (int32 [requests], on the device,
        never written).
        """
        found = self.indices.get(number)
        if found is None:
            found = self.indices[number] = self.arange[:number] if self.fast_prefill else slice(0, number)
        return found


def kernels_run(device: Any) -> bool:
    """Whether Triton kernels can run on ``device``."""
    return device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
