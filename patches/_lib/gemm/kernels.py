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

Importing this module imports torch and Triton: the launcher must not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from patches._lib.gemm.table import Tile


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
def _finish_row(acc, m, bias, y, part, n, n_in, N, y_m, split, M: tl.constexpr, SPLIT: tl.constexpr,
                HAS_BIAS: tl.constexpr):  # fmt: skip
    """Add up one row's accumulators and store the row, or its part."""
    total = tl.sum(acc, 1)
    if SPLIT > 1:
        tl.store(part + (split * M + m) * N + n, total, mask=n_in)
    else:
        if HAS_BIAS:
            total += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)
        tl.store(y + m * y_m + n, total.to(y.dtype.element_ty), mask=n_in)


@triton.jit
def _rows(
    x, w, bias, y, part, N, K, x_m, w_n, y_m,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tl.static_assert(M <= 4)
    step: tl.constexpr = BK * SPLIT
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    k = split * BK + tl.arange(0, BK)
    w_at = w + n.to(tl.int64)[:, None] * w_n + k[None, :]
    x_at = x + k
    n_in = n < N
    acc0 = tl.zeros((BN, BK), tl.float32)
    if M > 1:
        acc1 = tl.zeros((BN, BK), tl.float32)
    if M > 2:
        acc2 = tl.zeros((BN, BK), tl.float32)
    if M > 3:
        acc3 = tl.zeros((BN, BK), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in tl.range(0, K, step, num_stages=STAGES):
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
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    _finish_row(acc0, 0, bias, y, part, n, n_in, N, y_m, split, M, SPLIT, HAS_BIAS)
    if M > 1:
        _finish_row(acc1, 1, bias, y, part, n, n_in, N, y_m, split, M, SPLIT, HAS_BIAS)
    if M > 2:
        _finish_row(acc2, 2, bias, y, part, n, n_in, N, y_m, split, M, SPLIT, HAS_BIAS)
    if M > 3:
        _finish_row(acc3, 3, bias, y, part, n, n_in, N, y_m, split, M, SPLIT, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])
def _lanes(
    x, w, bias, y, part, N, K, x_m, w_n, y_m, M,
    MP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    span: tl.constexpr = BK * SLICES
    k = split * span + (tl.arange(0, SLICES) * BK)[:, None] + tl.arange(0, BK)[None, :]
    m = tl.arange(0, MP)
    w_at = w + n.to(tl.int64)[None, :, None] * w_n + k[:, None, :]
    x_at = x + m[None, :, None] * x_m + k[:, None, :]
    n_in = n < N
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
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    both = tl.sum(acc, 0)
    inside = (m[:, None] < M) & n_in[None, :]
    if SPLIT > 1:
        tl.store(part + (split * M + m[:, None]) * N + n[None, :], both, mask=inside)
    else:
        if HAS_BIAS:
            both += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
        tl.store(y + m[:, None] * y_m + n[None, :], both.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _tiles(
    x, w, bias, y, part, N, K, x_m, w_n, y_m, M,
    MP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    k = split * BK + tl.arange(0, BK)
    m = tl.arange(0, MP)
    w_at = w + n.to(tl.int64)[:, None] * w_n + k[None, :]
    x_at = x + m[:, None] * x_m + k[None, :]
    n_in = n < N
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
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    inside = n_in[:, None] & (m[None, :] < M)
    if SPLIT > 1:
        tl.store(part + (split * M + m[None, :]) * N + n[:, None], acc, mask=inside)
    else:
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)[:, None]
        tl.store(y + m[None, :] * y_m + n[:, None], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _combine(part, bias, y, N, y_m, M: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
             PDL: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(1)
    inside = n < N
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT):
        total += tl.load(part + (split * M + m) * N + n, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + m * y_m + n, total.to(y.dtype.element_ty), mask=inside)


def run(
    tile: Tile,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ w.T + bias with the kernel and block sizes of ``tile``.

    x: [M, K] with M from 1 to 16 and unit stride along K; w: [N, K] likewise; bias: [N] contiguous or None; all of one
    dtype, bf16 or fp16, on one device. Returns [M, N] of that dtype (``out`` if given).
    """
    rows, k = x.shape
    n = w.shape[0]
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device) if out is None else out
    part = y if tile.split == 1 else torch.empty((tile.split, rows, n), dtype=torch.float32, device=x.device)
    kernel, arguments = _specialise(tile, rows, n, k, bias is not None)
    kernel[(triton.cdiv(n, tile.bn), tile.split)](
        x, w, bias, y, part, n, k, x.stride(0), w.stride(0), y.stride(0), **arguments,
    )  # fmt: skip
    if tile.split > 1:
        block = 256
        pdl = {"launch_pdl": True} if tile.pdl else {}
        _combine[(triton.cdiv(n, block), rows)](
            part, bias, y, n, y.stride(0), M=rows, SPLIT=tile.split, BLOCK=block, HAS_BIAS=bias is not None,
            PDL=tile.pdl, num_warps=2, **pdl,
        )  # fmt: skip
    return y


def warm(tile: Tile, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    """Compile what ``run`` will need for contiguous x and w of these sizes, without launching it."""
    kernel, arguments = _specialise(tile, rows, n, k, False)
    part = dtype if tile.split == 1 else torch.float32
    if tile.kernel == "rows":
        kernel.warmup(dtype, dtype, None, dtype, part, n, k, k, k, n, grid=(1, 1), **arguments)
    else:  # M is a run-time argument there, and warmup takes those by position
        constants = {name: value for name, value in arguments.items() if name != "M"}
        kernel.warmup(dtype, dtype, None, dtype, part, n, k, k, k, n, rows, grid=(1, 1), **constants)


@functools.lru_cache(maxsize=4096)
def _specialise(tile: Tile, rows: int, n: int, k: int, has_bias: bool) -> tuple[Any, dict[str, Any]]:
    """The kernel of ``tile`` and its compile-time arguments for a product of rows x k by n x k."""
    arguments: dict[str, Any] = {
        "BN": tile.bn,
        "BK": tile.bk,
        "SPLIT": tile.split,
        "STAGES": tile.stages,
        "EVEN_N": n % tile.bn == 0,
        "EVEN_K": k % tile.span == 0,
        "HAS_BIAS": has_bias,
        "PDL": tile.pdl,
        "num_warps": tile.warps,
        "num_stages": max(tile.stages, 1),
    }
    if tile.pdl:
        arguments["launch_pdl"] = True
    if tile.kernel == "rows":
        return _rows, arguments | {"M": rows}
    if tile.kernel == "lanes":
        return _lanes, arguments | {"M": rows, "MP": 16, "SLICES": tile.slices}
    return _tiles, arguments | {"M": rows, "MP": 8 if rows <= 8 and tile.narrow else 16}
