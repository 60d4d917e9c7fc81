"""The Triton kernel of ``decode-input-prep``: everything a pure decode step of the V1 runner writes, in one launch.

It is imported when a fast step is first taken. Under Triton's interpreter (TRITON_INTERPRET=1) it runs on CPU tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of the pointer table; 0 stands for a buffer that this release does not have.
FIELDS = (
    "input_ids",  # int32 [max tokens]
    "positions",  # int64 [max tokens]
    "query_start_loc",  # int32 [max requests + 1]
    "seq_lens",  # int32 [max requests]
    "discard_request_mask",  # bool [max requests]
    "num_computed_tokens",  # int32 [max requests]
    "num_accepted_tokens",  # [max requests]
    "req_indices",  # int64 [max tokens]
    "query_pos",  # int64 [max tokens]
    "num_scheduled_tokens",  # int32 [max requests]
    "mrope_positions",  # int64 [rows, max tokens + 1]
    "mrope_deltas",  # int64 [max requests]
)


@triton.jit
def _pointer(table, row, dtype: tl.constexpr):
    return tl.load(table + row).to(tl.pointer_type(dtype))


@triton.jit(do_not_specialize=["num_reqs", "ahead", "position", "delta"])
def decode_step(
    table,  # int64: addresses in the order of FIELDS
    groups,  # int64 [groups, 4]: addresses of block table and slot mapping, row stride, block size
    sampled,  # int32 [num_reqs, 1]: the tokens of the step before
    before,  # int32 [max requests]: positions, ``ahead`` of which the requests are now (not SINGLE)
    after,  # int32 [max requests], out: the requests' positions (not SINGLE); never the memory of ``before``
    num_reqs,
    ahead,  # 0 or 1 (not SINGLE)
    position,  # of the only request (SINGLE)
    delta,  # its M-RoPE offset (SINGLE)
    SINGLE: tl.constexpr,  # one request: its position comes as a number, not in ``before``
    BATCH: tl.constexpr,  # a power of two above the largest number of requests
    MAX_REQS: tl.constexpr,
    ACCEPTED: tl.constexpr,  # length of num_accepted_tokens, 0 where the release keeps no such buffer here
    ACCEPTED_TYPE: tl.constexpr,
    SCRATCH: tl.constexpr,  # the release keeps request indices, query positions and scheduled tokens on the device
    POSITIONS: tl.constexpr,  # positions are written (0.18.1 leaves them alone for M-RoPE models)
    ROPE_ROWS: tl.constexpr,  # rows of mrope_positions, 0 without M-RoPE
    ROPE_STRIDE: tl.constexpr,
    CHUNKS: tl.constexpr,  # programs a KV cache group
    CHUNK: tl.constexpr,  # slots a program
    SLOTS: tl.constexpr,  # length of a slot mapping whose tail is padded, 0 where only the requests' slots are written
    PAD: tl.constexpr,
):
    """Program 0 writes what is common to all groups; each further program a chunk of one group's slot mapping."""
    program = tl.program_id(0)
    if program == 0:
        row = tl.arange(0, BATCH)
        live = row < num_reqs
        if SINGLE:
            computed = tl.zeros([BATCH], dtype=tl.int64) + position
        else:
            computed = tl.load(before + row, mask=live, other=0).to(tl.int64) + ahead
            tl.store(after + row, computed.to(tl.int32), mask=live)
        tl.store(_pointer(table, 5, tl.int32) + row, computed.to(tl.int32), mask=live)
        token = tl.load(sampled + row, mask=live, other=0)
        tl.store(_pointer(table, 0, tl.int32) + row, token, mask=live)
        if POSITIONS:
            tl.store(_pointer(table, 1, tl.int64) + row, computed, mask=live)
        # beyond the requests the query starts stay at their end, and lengths are zero
        tl.store(_pointer(table, 2, tl.int32) + row, tl.minimum(row, num_reqs).to(tl.int32), mask=row <= MAX_REQS)
        length = tl.where(live, computed + 1, 0).to(tl.int32)
        tl.store(_pointer(table, 3, tl.int32) + row, length, mask=row < MAX_REQS)
        zero = tl.zeros([BATCH], dtype=tl.int64)
        tl.store(_pointer(table, 4, tl.int8) + row, zero.to(tl.int8), mask=live)
        if ACCEPTED > 0:
            tl.store(_pointer(table, 6, ACCEPTED_TYPE) + row, (zero + 1).to(ACCEPTED_TYPE), mask=row < ACCEPTED)
        if SCRATCH:
            tl.store(_pointer(table, 7, tl.int64) + row, row.to(tl.int64), mask=live)
            tl.store(_pointer(table, 8, tl.int64) + row, zero, mask=live)
            tl.store(_pointer(table, 9, tl.int32) + row, (zero + 1).to(tl.int32), mask=live)
        if ROPE_ROWS > 0:
            if SINGLE:
                rope = computed + delta
            else:
                rope = computed + tl.load(_pointer(table, 11, tl.int64) + row, mask=live, other=0)
            for i in tl.static_range(ROPE_ROWS):
                tl.store(_pointer(table, 10, tl.int64) + i * ROPE_STRIDE + row, rope, mask=live)
    else:
        group = groups + ((program - 1) // CHUNKS) * 4
        blocks = tl.load(group).to(tl.pointer_type(tl.int32))
        slots = tl.load(group + 1).to(tl.pointer_type(tl.int64))
        stride = tl.load(group + 2)
        size = tl.load(group + 3)
        slot = ((program - 1) % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
        active = slot < num_reqs
        if SINGLE:
            at = tl.zeros([CHUNK], dtype=tl.int64) + position
        else:
            at = tl.load(before + slot, mask=active, other=0).to(tl.int64) + ahead
        block = tl.load(blocks + slot.to(tl.int64) * stride + at // size, mask=active, other=0).to(tl.int64)
        value = tl.where(active, block * size + at % size, PAD)
        if SLOTS > 0:
            tl.store(slots + slot, value, mask=slot < SLOTS)
        else:
            tl.store(slots + slot, value, mask=active)
