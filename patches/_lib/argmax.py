"""Greedy tokens of a few rows of bf16 or fp16 logits in one kernel launch.

``torch.argmax`` of a long row takes a launch, a memset for its semaphores and, as its result is int64, one more launch for the
int32 token ids that vLLM keeps. Here a row is cut into parts, a program each; a program's best value and its index are one
integer, the row's best is an atomic maximum of these, and whichever program of a row comes last writes the token id.

Same result as ``torch.argmax``: the lowest index among equals, -0.0 equal to 0.0, the first NaN above everything. Values are
compared as the integers that their bits are, so no arithmetic rounds or flushes anything.

A row's maximum and the number of its finished programs live in a workspace that is zero whenever no launch runs: the last
program clears what its row used. Launches that share a workspace must not run at the same time, so each stream has its own.
Imports Triton: import it inside functions only. Under Triton's interpreter (TRITON_INTERPRET=1) it runs on CPU tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

MAX_ROWS = 64
PART = 4096  # values of a row that one program reads

# dtype -> bits of its infinity: a larger magnitude is a NaN
INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


@triton.jit
def _keys(values, index, INFINITY: tl.constexpr):
    """int64 keys, all above zero, in the order in which argmax prefers (value, index). values: bf16 or fp16."""
    bits = values.to(tl.int16, bitcast=True).to(tl.int32)
    magnitude = bits & 0x7FFF
    order = tl.where(bits < 0, -magnitude, magnitude)  # both zeros are 0
    order = tl.where(magnitude > INFINITY, 0x8000, order)
    return ((order + 0x8000).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def argmax_kernel(
    logits,  # [rows, vocabulary] bf16 or fp16, consecutive along the vocabulary
    stride,  # from row to row
    vocabulary,
    tokens,  # [rows] int32, out
    workspace,  # [rows, 2] int64: best key so far, finished programs; zero before and after
    INFINITY: tl.constexpr,
    PART: tl.constexpr,
):
    """Grid: (parts of a row, rows)."""
    row = tl.program_id(1)
    index = tl.program_id(0) * PART + tl.arange(0, PART)
    inside = index < vocabulary
    values = tl.load(logits + row.to(tl.int64) * stride + index, mask=inside, other=0.0)
    best = tl.max(tl.where(inside, _keys(values, index, INFINITY), 0), axis=0)
    # One thread of the program runs both, in this order: whoever sees the count sees the key too.
    tl.atomic_max(workspace + row * 2, best, sem="acq_rel")
    finished = tl.atomic_add(workspace + row * 2 + 1, 1, sem="acq_rel")
    if finished == tl.num_programs(0) - 1:
        best = tl.atomic_xchg(workspace + row * 2, 0, sem="acq_rel")  # the row's, past any cache of this processor
        tl.atomic_xchg(workspace + row * 2 + 1, 0, sem="acq_rel")
        tl.store(tokens + row, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32))


_workspaces: dict[tuple[int | None, int], torch.Tensor] = {}


def takes(logits: torch.Tensor) -> bool:
    """Whether ``argmax`` can take these logits here and now.

    Not while a stream is captured: the graph may be replayed in a stream other than that of the workspace.
    """
    return (
        logits.dim() == 2
        and 0 < logits.shape[0] <= MAX_ROWS
        and 0 < logits.shape[1] < 1 << 31
        and logits.dtype in INFINITY
        and logits.stride(1) == 1
        and logits.stride(0) >= 0
        and not (logits.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def argmax(logits: torch.Tensor, workspace: torch.Tensor | None = None) -> torch.Tensor:
    """Token ids, a fresh int32 [rows, 1], of logits [rows, vocabulary] that ``takes`` said yes to.

    workspace: int64 [at least rows, 2] of zeros, for a caller who captures graphs; the current stream's own by default.
    """
    rows, vocabulary = logits.shape
    if workspace is None:
        workspace = _workspace(logits.device)
    tokens = torch.empty((rows, 1), dtype=torch.int32, device=logits.device)
    grid = (triton.cdiv(vocabulary, PART), rows)
    argmax_kernel[grid](logits, logits.stride(0), vocabulary, tokens, workspace, **_constants(logits))
    return tokens


def compile_for(logits: torch.Tensor) -> None:
    """Compile ahead what ``argmax`` would run for logits of this kind; launches nothing."""
    tokens = torch.empty((1, 1), dtype=torch.int32, device=logits.device)
    given = (logits, logits.stride(0), logits.shape[1], tokens, _workspace(logits.device))
    argmax_kernel.warmup(*given, grid=(1, 1), **_constants(logits))


def _constants(logits: torch.Tensor) -> dict[str, Any]:
    return {"INFINITY": INFINITY[logits.dtype], "PART": PART, "num_warps": 8}


def _workspace(device: torch.device) -> torch.Tensor:
    """The current stream's workspace, int64 [MAX_ROWS, 2]."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _workspaces.get((device.index, stream))
    if found is None:
        found = torch.zeros((MAX_ROWS, 2), dtype=torch.int64, device=device)
        _workspaces[device.index, stream] = found
    return found
