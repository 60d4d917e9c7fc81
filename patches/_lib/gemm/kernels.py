"""Triton kernels for y = x @ w.T + bias with few rows, and how each is launched.

x: [M, K], w: [N, K], bias: [N] or None, y: [M, N]; bf16 or fp16 with fp32 accumulation and one rounding at the end.
Weights are read once; everything else is arranged so that enough of their bytes are in flight:

``rows``   a program owns BN rows of w and adds products lane by lane (fused multiply-add). No tensor cores: the
           fewest instructions for one to four rows of x.
``lanes``  tensor-core tiles whose K range is split over the program's warps: each warp multiplies its own slice of
           K and the slices are added in warp order. For many rows of x and few of w.
``tiles``  one tensor-core tile of at least 64 rows of w a program. For large N.

Each takes SPLIT > 1, which splits K over programs as well: the fp32 parts go to a workspace and a second kernel adds
them in the order of the splits. No kernel uses atomics, so equal inputs give equal bits.

GATED: w holds a gate's rows and then as many of an up projection, and y = silu(gate) * up is half as wide. A program's rows
are taken in turns from the two halves, so that both partners of an element are its own. Both are rounded to y's dtype
before the activation, as where they are stored in between.

NORMED: y = rms_norm(x + residual) @ w.T. Norm and product are one sum: a program that reads x for its rows of w adds up the
squares on the way and scales its results by them at the end, so that the norm is neither a kernel nor a pass of its own.
One program a row of x also stores x + residual.

Importing this module imports torch and Triton: the launcher must not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from patches._lib.gemm.table import Mlp, Tile


@triton.jit
def _tile(at, n_in, k_in, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile of weights; outside N and K zeros."""
    if EVEN_K:
        if EVEN_N:
            return tl.load(at)
        else:  # noqa: RET505 - branches of a compile-time condition
            return tl.load(at, mask=n_in[:, None], other=0.0)
    else:
        return tl.load(at, mask=n_in[:, None] & k_in[None, :], other=0.0)


@triton.jit
def _row(at, k_in, EVEN_K: tl.constexpr):
    """A piece of a row of x in fp32, to be multiplied with a tile."""
    if EVEN_K:
        return tl.load(at).to(tl.float32)[None, :]
    else:  # noqa: RET505
        return tl.load(at, mask=k_in, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _weight_rows(n, N, GATED: tl.constexpr):
    """The rows of w that a program's places ``n`` stand for: in turns from the gate's half and from the other."""
    if GATED:
        return (n // 2 + (n % 2) * (N // 2)).to(tl.int64)
    else:  # noqa: RET505 - branches of a compile-time condition
        return n.to(tl.int64)


@triton.jit
def _gated(gate, up, y):
    """silu(gate) * up in fp32, of values rounded to y's dtype."""
    gate = gate.to(y.dtype.element_ty).to(tl.float32)
    up = up.to(y.dtype.element_ty).to(tl.float32)
    return (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty)


@triton.jit
def _store_row(total, y, n, n_in, N, BN: tl.constexpr, GATED: tl.constexpr):
    """Store a program's BN sums of one row, or half as many of their gated products; y points at the row."""
    if GATED:
        half: tl.constexpr = BN // 2
        gate, up = tl.split(tl.reshape(total, (half, 2)))
        out = tl.program_id(0) * half + tl.arange(0, half)
        tl.store(y + out, _gated(gate, up, y), mask=out < N // 2)
    else:
        tl.store(y + n, total.to(y.dtype.element_ty), mask=n_in)


@triton.jit
def _finish_row(acc, m, bias, y, part, n, n_in, N, y_m, split, M: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
                HAS_BIAS: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """Add up one row's accumulators and store the row, or its part."""
    total = tl.sum(acc, 1)
    if SPLIT > 1:
        tl.store(part + (split * M + m) * N + n, total, mask=n_in)
    else:
        if HAS_BIAS:
            total += tl.load(bias + _weight_rows(n, N, GATED), mask=n_in, other=0.0).to(tl.float32)
        _store_row(total, y + m * y_m, n, n_in, N, BN, GATED)


@triton.jit
def _rows(
    x, w, bias, y, part, N, K, x_m, w_n, y_m,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    tl.static_assert(M <= 4)
    step: tl.constexpr = BK * SPLIT
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    k = split * BK + tl.arange(0, BK)
    w_at = w + _weight_rows(n, N, GATED)[:, None] * w_n + k[None, :]
    x_at = x + k
    n_in = n < N
    acc0 = tl.zeros((BN, BK), tl.float32)
    if M > 1:
        acc1 = tl.zeros((BN, BK), tl.float32)
    if M > 2:
        acc2 = tl.zeros((BN, BK), tl.float32)
    if M > 3:
        acc3 = tl.zeros((BN, BK), tl.float32)
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    if EARLY:  # w does not depend on the kernel before this one: its first tile comes while that one still runs
        k_in = k < K
        tile = _tile(w_at, n_in, k_in, EVEN_N, EVEN_K).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    begin = 0
    if EARLY:
        acc0 += tile * _row(x_at, k_in, EVEN_K)
        if M > 1:
            acc1 += tile * _row(x_at + x_m, k_in, EVEN_K)
        if M > 2:
            acc2 += tile * _row(x_at + 2 * x_m, k_in, EVEN_K)
        if M > 3:
            acc3 += tile * _row(x_at + 3 * x_m, k_in, EVEN_K)
        w_at += step
        x_at += step
        begin = step
    for start in tl.range(begin, K, step, num_stages=STAGES):
        k_in = k + start < K
        tile = _tile(w_at, n_in, k_in, EVEN_N, EVEN_K).to(tl.float32)
        acc0 += tile * _row(x_at, k_in, EVEN_K)
        if M > 1:
            acc1 += tile * _row(x_at + x_m, k_in, EVEN_K)
        if M > 2:
            acc2 += tile * _row(x_at + 2 * x_m, k_in, EVEN_K)
        if M > 3:
            acc3 += tile * _row(x_at + 3 * x_m, k_in, EVEN_K)
        w_at += step
        x_at += step
    _finish_row(acc0, 0, bias, y, part, n, n_in, N, y_m, split, M, BN, SPLIT, HAS_BIAS, GATED)
    if M > 1:
        _finish_row(acc1, 1, bias, y, part, n, n_in, N, y_m, split, M, BN, SPLIT, HAS_BIAS, GATED)
    if M > 2:
        _finish_row(acc2, 2, bias, y, part, n, n_in, N, y_m, split, M, BN, SPLIT, HAS_BIAS, GATED)
    if M > 3:
        _finish_row(acc3, 3, bias, y, part, n, n_in, N, y_m, split, M, BN, SPLIT, HAS_BIAS, GATED)


@triton.jit(do_not_specialize=["M"])
def _lanes(
    x, w, bias, y, part, N, K, x_m, w_n, y_m, M,
    MP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    span: tl.constexpr = BK * SLICES
    k = split * span + (tl.arange(0, SLICES) * BK)[:, None] + tl.arange(0, BK)[None, :]
    m = tl.arange(0, MP)
    w_at = w + _weight_rows(n, N, GATED)[None, :, None] * w_n + k[:, None, :]
    x_at = x + m[None, :, None] * x_m + k[:, None, :]
    n_in = n < N
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((SLICES, MP, BN), tl.float32)
    for start in tl.range(0, K, span * SPLIT, num_stages=STAGES):
        if EVEN_K:
            if EVEN_N:
                tile = tl.load(w_at)
            else:
                tile = tl.load(w_at, mask=n_in[None, :, None], other=0.0)
            block = tl.load(x_at, mask=m[None, :, None] < M, other=0.0)
        else:
            k_in = k + start < K
            tile = tl.load(w_at, mask=n_in[None, :, None] & k_in[:, None, :], other=0.0)
            block = tl.load(x_at, mask=(m[None, :, None] < M) & k_in[:, None, :], other=0.0)
        acc = tl.dot(block, tl.permute(tile, (0, 2, 1)), acc)
        w_at += span * SPLIT
        x_at += span * SPLIT
    both = tl.sum(acc, 0)
    inside = (m[:, None] < M) & n_in[None, :]
    if SPLIT > 1:
        tl.store(part + (split * M + m[:, None]) * N + n[None, :], both, mask=inside)
    else:
        if HAS_BIAS:
            both += tl.load(bias + _weight_rows(n, N, GATED), mask=n_in, other=0.0).to(tl.float32)[None, :]
        if GATED:
            half: tl.constexpr = BN // 2
            gate, up = tl.split(tl.reshape(both, (MP, half, 2)))
            out = tl.program_id(0) * half + tl.arange(0, half)
            inside = (m[:, None] < M) & (out < N // 2)[None, :]
            tl.store(y + m[:, None] * y_m + out[None, :], _gated(gate, up, y), mask=inside)
        else:
            tl.store(y + m[:, None] * y_m + n[None, :], both.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _tiles(
    x, w, bias, y, part, N, K, x_m, w_n, y_m, M,
    MP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    k = split * BK + tl.arange(0, BK)
    m = tl.arange(0, MP)
    w_at = w + _weight_rows(n, N, GATED)[:, None] * w_n + k[None, :]
    x_at = x + m[:, None] * x_m + k[None, :]
    n_in = n < N
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BN, MP), tl.float32)
    for start in tl.range(0, K, BK * SPLIT, num_stages=STAGES):
        if EVEN_K:
            if EVEN_N:
                tile = tl.load(w_at)
            else:
                tile = tl.load(w_at, mask=n_in[:, None], other=0.0)
            block = tl.load(x_at, mask=m[:, None] < M, other=0.0)
        else:
            k_in = k[None, :] + start < K
            tile = tl.load(w_at, mask=n_in[:, None] & k_in, other=0.0)
            block = tl.load(x_at, mask=(m[:, None] < M) & k_in, other=0.0)
        acc = tl.dot(tile, tl.trans(block), acc)
        w_at += BK * SPLIT
        x_at += BK * SPLIT
    inside = n_in[:, None] & (m[None, :] < M)
    if SPLIT > 1:
        tl.store(part + (split * M + m[None, :]) * N + n[:, None], acc, mask=inside)
    else:
        if HAS_BIAS:
            acc += tl.load(bias + _weight_rows(n, N, GATED), mask=n_in, other=0.0).to(tl.float32)[:, None]
        if GATED:
            half: tl.constexpr = BN // 2
            gate, up = tl.split(tl.permute(tl.reshape(acc, (half, 2, MP)), (0, 2, 1)))
            out = tl.program_id(0) * half + tl.arange(0, half)
            inside = (out < N // 2)[:, None] & (m[None, :] < M)
            tl.store(y + m[None, :] * y_m + out[:, None], _gated(gate, up, y), mask=inside)
        else:
            tl.store(y + m[None, :] * y_m + n[:, None], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _normed_chunk(x, residual, gamma, at, k_in, kept, first):
    """A chunk of (x + residual) in fp32 and the same times the norm's weight; the first program keeps the sum."""
    both = tl.load(x + at, mask=k_in, other=0.0).to(tl.float32) + tl.load(residual + at, mask=k_in, other=0.0).to(tl.float32)
    if first:
        tl.store(kept + at, both.to(kept.dtype.element_ty), mask=k_in)
    return both, (both * gamma)[None, :]


@triton.jit
def _normed_total(acc, squares, K, eps):
    return tl.sum(acc, 1) * tl.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def _normed_rows(
    x, residual, gamma, w, y, kept, N, K, w_n, y_m, eps,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """x, residual, kept: [M, K] contiguous. kept is memory that nothing else reads or writes."""
    tl.static_assert(M <= 2)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    w_at = w + _weight_rows(n, N, GATED)[:, None] * w_n + k[None, :]
    n_in = n < N
    first = tl.program_id(0) == 0
    acc0, squares0 = tl.zeros((BN, BK), tl.float32), tl.zeros((BK,), tl.float32)
    if M > 1:
        acc1, squares1 = tl.zeros((BN, BK), tl.float32), tl.zeros((BK,), tl.float32)
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    for start in tl.range(0, K, BK, num_stages=STAGES):
        at = k + start
        k_in = at < K
        tile = _tile(w_at, n_in, k_in, EVEN_N, EVEN_K).to(tl.float32)
        scale = tl.load(gamma + at, mask=k_in, other=0.0).to(tl.float32)
        both, scaled = _normed_chunk(x, residual, scale, at, k_in, kept, first)
        squares0 += both * both
        acc0 += tile * scaled
        if M > 1:
            both, scaled = _normed_chunk(x + K, residual + K, scale, at, k_in, kept + K, first)
            squares1 += both * both
            acc1 += tile * scaled
        w_at += BK
    _store_row(_normed_total(acc0, squares0, K, eps), y, n, n_in, N, BN, GATED)
    if M > 1:
        _store_row(_normed_total(acc1, squares1, K, eps), y + y_m, n, n_in, N, BN, GATED)


@triton.jit
def _add_norm(x, residual, gamma, y, kept, K, eps, BLOCK: tl.constexpr):
    """A row a program: what vLLM's fused_add_rms_norm makes, roundings included."""
    k = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * K
    inside = k < K
    both = tl.load(x + row + k, mask=inside, other=0.0).to(tl.float32)
    both += tl.load(residual + row + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(kept + row + k, both.to(kept.dtype.element_ty), mask=inside)
    normed = both * tl.rsqrt(tl.sum(both * both, 0) / K + eps)
    normed = normed.to(y.dtype.element_ty).to(tl.float32) * tl.load(gamma + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row + k, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _combine(part, bias, y, N, y_m, M: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
             GATED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(1)
    inside = n < N
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT):
        total += tl.load(part + (split * M + m) * N + n, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + _weight_rows(n, N, GATED), mask=inside, other=0.0).to(tl.float32)
    _store_row(total, y + m * y_m, n, inside, N, BLOCK, GATED)


def run(
    tile: Tile,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """x @ w.T + bias with the kernel and block sizes of ``tile``; where ``gated``, silu(first half) * second half of it.

    x: [M, K] with M from 1 to 16 and unit stride along K; w: [N, K] likewise; bias: [N] contiguous or None; all of one
    dtype, bf16 or fp16, on one device. Returns [M, N] of that dtype, [M, N / 2] where gated (``out`` if given).
    """
    rows, k = x.shape
    n = w.shape[0]
    y = torch.empty((rows, n // 2 if gated else n), dtype=x.dtype, device=x.device) if out is None else out
    part = y if tile.split == 1 else torch.empty((tile.split, rows, n), dtype=torch.float32, device=x.device)
    kernel, arguments = _specialise(tile, rows, n, k, bias is not None, gated)
    kernel[(triton.cdiv(n, tile.bn), tile.split)](
        x, w, bias, y, part, n, k, x.stride(0), w.stride(0), y.stride(0), **arguments,
    )  # fmt: skip
    if tile.split > 1:
        block = 256
        pdl = {"launch_pdl": True} if tile.pdl else {}
        _combine[(triton.cdiv(n, block), rows)](
            part, bias, y, n, y.stride(0), M=rows, SPLIT=tile.split, BLOCK=block, HAS_BIAS=bias is not None, GATED=gated,
            PDL=tile.pdl, num_warps=2, **pdl,
        )  # fmt: skip
    return y


def run_normed(
    tile: Tile,
    x: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    eps: float,
    w: torch.Tensor,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual) @ w.T, x + residual) with the block sizes of ``tile``, whose kernel is ``rows``.

    x, residual: [M, K] contiguous, M 1 or 2; gamma: [K] contiguous; w: [N, K]; all of one dtype, bf16 or fp16. gated: as in
    ``run``. Both results are new tensors.
    """
    rows, k = x.shape
    n = w.shape[0]
    y = torch.empty((rows, n // 2 if gated else n), dtype=x.dtype, device=x.device)
    kept = torch.empty_like(residual)
    _normed_rows[(triton.cdiv(n, tile.bn),)](
        x, residual, gamma, w, y, kept, n, k, w.stride(0), y.stride(0), eps, **_normed_arguments(tile, rows, n, k, gated),
    )  # fmt: skip
    return y, kept


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual) for any number of rows; tensors as in ``run_normed``."""
    y, kept = torch.empty_like(x), torch.empty_like(residual)
    k = x.shape[-1]
    block = triton.next_power_of_2(k)
    _add_norm[(x.numel() // k,)](x, residual, gamma, y, kept, k, eps, BLOCK=block, num_warps=8 if block > 2048 else 4)
    return y, kept


def warm_normed(tile: Tile, dtype: torch.dtype, rows: int, n: int, k: int, gated: bool) -> None:
    """Compile what ``run_normed`` will need, without launching it."""
    wide, arguments = n // 2 if gated else n, _normed_arguments(tile, rows, n, k, gated)
    _normed_rows.warmup(dtype, dtype, dtype, dtype, dtype, dtype, n, k, k, wide, 1e-6, grid=(1,), **arguments)


def _normed_arguments(tile: Tile, rows: int, n: int, k: int, gated: bool) -> dict[str, Any]:
    return {
        "M": rows, "BN": tile.bn, "BK": tile.bk, "STAGES": tile.stages, "EVEN_N": n % tile.bn == 0,
        "EVEN_K": k % tile.bk == 0, "GATED": gated, "TRIGGER": tile.trigger, "num_warps": tile.warps,
        "num_stages": max(tile.stages, 1),
    }  # fmt: skip


def warm(tile: Tile, dtype: torch.dtype, rows: int, n: int, k: int, gated: bool = False) -> None:
    """Compile what ``run`` will need for contiguous x and w of these sizes, without launching it."""
    kernel, arguments = _specialise(tile, rows, n, k, False, gated)
    part = dtype if tile.split == 1 else torch.float32
    wide = n // 2 if gated else n
    if tile.kernel == "rows":
        kernel.warmup(dtype, dtype, None, dtype, part, n, k, k, k, wide, grid=(1, 1), **arguments)
    else:  # M is a run-time argument there, and warmup takes those by position
        constants = {name: value for name, value in arguments.items() if name != "M"}
        kernel.warmup(dtype, dtype, None, dtype, part, n, k, k, k, wide, rows, grid=(1, 1), **constants)


def warm_mlp(mlp: Mlp, dtype: torch.dtype) -> None:
    """The same for both launches of an MLP."""
    warm(mlp.first, dtype, mlp.m, 2 * mlp.inner, mlp.hidden, gated=True)
    if mlp.second is not None:
        warm(mlp.second, dtype, mlp.m, mlp.hidden, mlp.inner)


@functools.lru_cache(maxsize=4096)
def _specialise(tile: Tile, rows: int, n: int, k: int, has_bias: bool, gated: bool) -> tuple[Any, dict[str, Any]]:
    """The kernel of ``tile`` and its compile-time arguments for a product of rows x k by n x k."""
    arguments: dict[str, Any] = {
        "BN": tile.bn,
        "BK": tile.bk,
        "SPLIT": tile.split,
        "STAGES": tile.stages,
        "EVEN_N": n % tile.bn == 0,
        "EVEN_K": k % tile.span == 0,
        "HAS_BIAS": has_bias,
        "GATED": gated,
        "PDL": tile.pdl,
        "TRIGGER": tile.trigger or tile.pdl,
        "num_warps": tile.warps,
        "num_stages": max(tile.stages, 1),
    }
    if tile.pdl:
        arguments["launch_pdl"] = True
    if tile.kernel == "rows":
        return _rows, arguments | {"M": rows, "EARLY": tile.early}
    if tile.kernel == "lanes":
        return _lanes, arguments | {"M": rows, "MP": 16, "SLICES": tile.slices}
    return _tiles, arguments | {"M": rows, "MP": 8 if rows <= 8 and tile.narrow else 16}
