"""What ``decode-input-prep-v2`` keeps of a V2 runner, and the launch of its kernel.

The batch as the device sees it is a number of requests and their slots, in two small tensors at fixed addresses, written
when the batch changes. With them the kernel's arguments depend on the padded sizes only, so that its launch can be
replayed as a graph.
"""

from __future__ import annotations

from typing import Any

STATE = "_overlay_decode_prep"
_TAIL = 4096


class State:
    """Of one runner, for as long as its buffers are the same objects."""

    def __init__(self, runner: Any, graphs: Any) -> None:
        self.buffers, self.tables, self.requests = runner.input_buffers, runner.block_tables, runner.req_states
        self.graphs = graphs
        self.key = b""  # content of idx_mapping_np, its dtype included
        self.idx_mapping: Any = None  # this batch's own copy, [num_reqs]
        self.slots: Any = None  # the same at a fixed address, [max_num_reqs]
        self.number: Any = None  # int32 [1], number of requests
        self.constants: dict[int, tuple[Any, Any, Any]] = {}
        self.views: dict[tuple[int, int], dict[str, Any]] = {}
        self.counting: Any = None  # int32 [max_num_reqs + 1]: 0, 1, 2, ...; copied, never given away
        self.batch: Any = None  # the batch prepared last by the kernel
        self.pending: tuple[Any, int, int, dict[str, Any]] | None = None  # (idx_mapping, rows, tokens, views) not yet asked for

    def fits(self, runner: Any) -> bool:
        return (
            self.buffers is runner.input_buffers and self.tables is runner.block_tables and self.requests is runner.req_states
        )

    def hold(self, runner: Any, idx_np: Any, module: Any) -> None:
        """Bring the batch to the device if it is another one than the last. idx_np: int32 or int64 [num_reqs]."""
        import torch

        key = idx_np.dtype.char.encode() + idx_np.tobytes()
        if key == self.key:
            return
        if hasattr(module, "async_tensor_h2d"):
            self.idx_mapping = module.async_tensor_h2d(idx_np, device=runner.device, dtype=torch.int64)
        else:
            self.idx_mapping = module.async_copy_to_gpu(idx_np, device=runner.device)
        if self.slots is None:
            self.slots = torch.zeros(runner.max_num_reqs, dtype=self.idx_mapping.dtype, device=runner.device)
            self.number = torch.zeros(1, dtype=torch.int32, device=runner.device)
        n = len(idx_np)
        self.slots[:n] = self.idx_mapping
        self.number.fill_(n)
        self.key = key

    def views_of(self, rows: int, tokens: int) -> dict[str, Any]:
        """The buffers of a batch padded to ``rows`` and ``tokens``: views that are made once."""
        found = self.views.get((rows, tokens))
        if found is None:
            buffers, tables = self.buffers, self.tables
            found = self.views[rows, tokens] = {
                "query_start_loc": buffers.query_start_loc[: rows + 1],
                "seq_lens": buffers.seq_lens[:rows],
                "input_ids": buffers.input_ids[:tokens],
                "positions": buffers.positions[:tokens],
                "is_padding": buffers.is_padding[:tokens] if hasattr(buffers, "is_padding") else None,
                "block_tables": tuple(table[:rows] for table in tables.input_block_tables),
                "slot_mappings": tables.slot_mappings[:, :tokens],
            }
        return found

    def launch(self, n: int, rows: int, tokens: int, marks_padding: bool) -> None:
        """Write every input buffer of a decode step of ``n`` requests, padded to ``rows`` rows and ``tokens`` tokens."""
        buffers, tables = self.buffers, self.tables
        written = rows
        if hasattr(tables, "_num_dirty_rows"):  # 0.33: rows that a larger batch left behind are cleared too
            written = max(rows, tables._num_dirty_rows)
            tables._num_dirty_rows = n
        # Host-backed tensors move from buffer to buffer as they are written.
        moving = (self.requests.prefill_len.gpu.data_ptr(), tables.num_blocks.gpu.data_ptr())
        self.graphs.run(
            (written, tokens, marks_padding, *moving),
            lambda: self._launch(buffers, tables, written, tokens, marks_padding),
        )

    def _launch(self, buffers: Any, tables: Any, written: int, tokens: int, marks_padding: bool) -> None:
        from vllm.v1.attention.backends.utils import PAD_SLOT_ID

        from patches._lib.v2_decode_kernels import decode_inputs_kernel

        enabled = getattr(tables, "slot_mapping_enabled", None)
        most = tables.slot_mappings.shape[1]
        tails = -(-max(most, buffers.max_num_reqs + 1) // _TAIL)
        num_blocks = tables.num_blocks.gpu
        decode_inputs_kernel[(tables.num_kv_cache_groups, written + tails)](
            self.slots,
            self.number,
            self.requests.num_computed_tokens.gpu,
            self.requests.prefill_len.gpu,
            self.requests.last_sampled_tokens,
            buffers.input_ids,
            buffers.positions,
            buffers.seq_lens,
            buffers.query_start_loc,
            buffers.is_padding if marks_padding else buffers.input_ids,
            tables.block_table_ptrs,
            tables.input_block_table_ptrs,
            tables.block_table_strides,
            num_blocks,
            num_blocks.stride(0),
            tables.block_sizes_tensor,
            enabled if enabled is not None else tables.block_sizes_tensor,
            tables.slot_mappings,
            tables.slot_mappings.stride(0),
            written,
            buffers.max_num_reqs,
            tokens,
            most,
            HAS_PADDING=marks_padding,
            HAS_ENABLED=enabled is not None,
            PAD_ID=PAD_SLOT_ID,
            BLOCK=1024,
            TAIL=_TAIL,
        )
