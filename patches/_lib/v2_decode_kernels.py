"""Triton kernels of the V2 runner's decode patches. Imports Triton: import it inside functions only.

Sizes of a batch are never specialised: another one must not compile a kernel in the middle of serving.
"""

from __future__ import annotations

from vllm.triton_utils import tl, triton


@triton.jit
def _table(pointers, group):
    """Pointer to int32 from row ``group`` of a table of addresses."""
    return tl.multiple_of(tl.cast(tl.load(pointers + group), tl.pointer_type(tl.int32)), 16)


@triton.jit(do_not_specialize=["num_rows", "max_num_reqs", "num_tokens_padded", "max_num_tokens"])
def decode_inputs_kernel(
    idx_mapping,  # [max_num_reqs] int32 or int64: batch row -> request slot
    number,  # [1] int32: number of requests
    num_computed,  # [max_num_reqs] int32
    prefill_len,  # [max_num_reqs] int32
    last_sampled,  # [max_num_reqs, 1] int64
    input_ids,  # [max_num_tokens] int32, out
    positions,  # [max_num_tokens] int64, out
    seq_lens,  # [max_num_reqs] int32, out
    query_start_loc,  # [max_num_reqs + 1] int32, out
    is_padding,  # [max_num_tokens] bool, out (HAS_PADDING)
    tables,  # [groups] addresses of int32 [max_num_reqs, blocks]
    batch_tables,  # [groups] addresses of int32 [max_num_reqs, blocks], out
    table_strides,  # [groups] int64
    num_blocks,  # [groups, max_num_reqs] int32
    num_blocks_stride,
    block_sizes,  # [groups] int32
    mapping_enabled,  # [groups] bool (HAS_ENABLED)
    slot_mappings,  # [groups, max_num_tokens] int64, out
    slot_mappings_stride,
    num_rows,  # rows of batch_tables to write: those beyond num_reqs become zero
    max_num_reqs,
    num_tokens_padded,
    max_num_tokens,
    HAS_PADDING: tl.constexpr,
    HAS_ENABLED: tl.constexpr,
    PAD_ID: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """All input buffers of a decode step of one token a request. Grid: (groups, num_rows + tails of TAIL tokens)."""
    group = tl.program_id(0)
    row = tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    num_reqs = tl.load(number)

    if row >= num_rows:
        # What lies behind the batch, a part of TAIL entries each.
        first = num_reqs + (row - num_rows) * TAIL
        slots = slot_mappings + group * slot_mappings_stride
        for i in range(first, tl.minimum(first + TAIL, max_num_tokens), BLOCK):
            at = i + offsets
            tl.store(slots + at, PAD_ID, mask=(at < first + TAIL) & (at < max_num_tokens))
        if group == 0:
            for i in range(first, tl.minimum(first + TAIL, max_num_reqs + 1), BLOCK):
                at = i + offsets
                inside = at < first + TAIL
                tl.store(seq_lens + at, 0, mask=inside & (at < max_num_reqs))
                tl.store(query_start_loc + at, num_reqs, mask=inside & (at < max_num_reqs + 1))
            if HAS_PADDING:
                for i in range(first, tl.minimum(first + TAIL, num_tokens_padded), BLOCK):
                    at = i + offsets
                    ones = tl.full([BLOCK], 1, tl.int1)
                    tl.store(is_padding + at, ones, mask=(at < first + TAIL) & (at < num_tokens_padded))
        return

    stride = tl.load(table_strides + group)
    batch_row = _table(batch_tables, group) + row * stride
    if row >= num_reqs:
        for i in tl.range(0, stride, BLOCK):
            at = i + offsets
            tl.store(batch_row + at, 0, mask=at < stride)
        return

    slot = tl.load(idx_mapping + row)
    computed = tl.load(num_computed + slot)
    position = computed.to(tl.int64)
    if group == 0:
        tl.store(positions + row, position)
        tl.store(seq_lens + row, computed + 1)
        tl.store(query_start_loc + row, row)
        if HAS_PADDING:
            tl.store(is_padding + row, tl.full([], 0, tl.int1))
        if computed >= tl.load(prefill_len + slot):
            tl.store(input_ids + row, tl.load(last_sampled + slot).to(tl.int32))

    table_row = _table(tables, group) + slot * stride
    block_size = tl.load(block_sizes + group)
    if HAS_ENABLED:
        enabled = tl.load(mapping_enabled + group)
        block = tl.load(table_row + tl.where(enabled, position // block_size, 0))
        mapped = tl.where(enabled, block * block_size + position % block_size, PAD_ID)
    else:
        block = tl.load(table_row + position // block_size)
        mapped = block * block_size + position % block_size
    tl.store(slot_mappings + group * slot_mappings_stride + row, mapped)

    blocks = tl.load(num_blocks + group * num_blocks_stride + slot)
    for i in tl.range(0, blocks, BLOCK):
        at = i + offsets
        tl.store(batch_row + at, tl.load(table_row + at, mask=at < blocks), mask=at < blocks)


@triton.jit
def row_argmax_kernel(
    logits,  # [rows, vocab_size] float
    logits_stride,
    sampled,  # [rows] int64, out
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Index of the largest value of each row, the lowest index among equals. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = offsets
    for start in range(0, vocab_size, BLOCK):
        at = start + offsets
        value = tl.load(logits + row * logits_stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        larger = value > best  # an equal value later in the lane has the higher index
        best = tl.where(larger, value, best)
        index = tl.where(larger, at, index)
    top = tl.max(best, axis=0)
    tl.store(sampled + row, tl.min(tl.where(best == top, index, 2147483647), axis=0).to(tl.int64))


@triton.jit
def part_argmax_kernel(
    logits,  # [rows, vocab_size] float
    logits_stride,
    best,  # [rows, PARTS, 2] float64, out: value and index
    vocab_size,
    part_size,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest value and its lowest index in each part of each row. Grid: (rows, PARTS)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * part_size
    end = tl.minimum(first + part_size, vocab_size)
    offsets = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    index = first + offsets
    for start in range(first, end, BLOCK):
        at = start + offsets
        value = tl.load(logits + row * logits_stride + at, mask=at < end, other=float("-inf")).to(tl.float32)
        larger = value > top
        top = tl.where(larger, value, top)
        index = tl.where(larger, at, index)
    largest = tl.max(top, axis=0)
    lowest = tl.min(tl.where(top == largest, index, 2147483647), axis=0)
    place = best + (row * PARTS + part) * 2
    tl.store(place, largest.to(tl.float64))
    tl.store(place + 1, lowest.to(tl.float64))


@triton.jit
def best_of_parts_kernel(
    best,  # [rows, PARTS, 2] float64
    sampled,  # [rows] int64, out
    PARTS: tl.constexpr,
):
    """Index of the largest value of all parts, the lowest of equals. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    value = tl.load(best + (row * PARTS + parts) * 2)
    index = tl.load(best + (row * PARTS + parts) * 2 + 1)
    largest = tl.max(value, axis=0)
    tl.store(sampled + row, tl.min(tl.where(value == largest, index, 2147483647.0), axis=0).to(tl.int64))
