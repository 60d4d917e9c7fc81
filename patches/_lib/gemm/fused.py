"""One kernel for the front half of a gated MLP in decode with one row, and the two small kernels around its product.

``norm_gate_up``: residual add, RMS norm, gate and up product, SiLU and product. A decode step with one row pays about
2.5 us of launch and drain for each of the small kernels that this leaves out, next to products of 4 to 25 us.
Every program computes the norm for itself from the row (a few KB, from L2), while its weights are on their way.

The mathematics and the places of rounding are those of vLLM's own definitions (``RMSNorm.forward_native`` with a
residual, ``SiluAndMul.forward_native``): the sum and the new residual in fp32 and the model's dtype, the normalised row
rounded once before and once after its weight, gate and up rounded before the activation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from patches._lib.gemm.table import Tile


@triton.jit
def _norm_gate_up(
    x, residual, norm, w, y, added, N, K, w_n, eps,
    BN: tl.constexpr, BK: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    FETCH: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    n_in = n < N
    k = tl.arange(0, BK)
    if FETCH > 0:  # the weights of this program, on their way to L2 while the norm is computed: FETCH bytes a lane
        lane = tl.arange(0, LANES) * FETCH
        gate_at = (w + first.to(tl.int64) * w_n).to(tl.int64) + lane
        up_at = (w + (first + N).to(tl.int64) * w_n).to(tl.int64) + lane
        size = tl.full((LANES,), FETCH, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $3; cp.async.bulk.prefetch.L2.global [$2], $3; mov.b32 $0, 0;",
            "=r,l,l,r", [gate_at, up_at, size], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    squares = tl.zeros((BK,), tl.float32)
    for start in range(0, K, BK):
        inside = k + start < K
        row = tl.load(x + start + k, mask=inside, other=0.0).to(tl.float32)
        row += tl.load(residual + start + k, mask=inside, other=0.0).to(tl.float32)
        squares += row * row
        if tl.program_id(0) == 0:
            tl.store(added + start + k, row.to(added.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    gate = tl.zeros((BN, BK), tl.float32)
    up = tl.zeros((BN, BK), tl.float32)
    gate_w = w + n.to(tl.int64)[:, None] * w_n + k[None, :]
    up_w = gate_w + N.to(tl.int64) * w_n
    for start in tl.range(0, K, BK, num_stages=STAGES):
        inside = k + start < K
        if EVEN_K and EVEN_N:
            gate_tile = tl.load(gate_w + start)
            up_tile = tl.load(up_w + start)
        else:
            both = n_in[:, None] & inside[None, :]
            gate_tile = tl.load(gate_w + start, mask=both, other=0.0)
            up_tile = tl.load(up_w + start, mask=both, other=0.0)
        row = tl.load(x + start + k, mask=inside, other=0.0).to(tl.float32)
        row += tl.load(residual + start + k, mask=inside, other=0.0).to(tl.float32)
        normed = (row * scale).to(x.dtype.element_ty).to(tl.float32)
        normed = (normed * tl.load(norm + start + k, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        normed = normed.to(tl.float32)[None, :]
        gate += gate_tile.to(tl.float32) * normed
        up += up_tile.to(tl.float32) * normed
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gate_sum = tl.sum(gate, 1).to(y.dtype.element_ty).to(tl.float32)
    up_sum = tl.sum(up, 1).to(y.dtype.element_ty).to(tl.float32)
    activation = (gate_sum * tl.sigmoid(gate_sum)).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + n, (activation * up_sum).to(y.dtype.element_ty), mask=n_in)


@triton.jit
def _add_norm(x, residual, norm, y, added, K, x_m, r_m, eps, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    row = tl.load(x + m * x_m + k, mask=inside, other=0.0).to(tl.float32)
    row += tl.load(residual + m * r_m + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(added + m * K + k, row.to(added.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(row * row, 0) / K + eps)
    normed = (row * scale).to(y.dtype.element_ty).to(tl.float32)
    normed *= tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + m * K + k, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _silu_and_mul(x, y, N, x_m, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    gate = tl.load(x + m * x_m + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + m * x_m + N + n, mask=inside, other=0.0).to(tl.float32)
    activation = (gate * tl.sigmoid(gate)).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + m * N + n, (activation * up).to(y.dtype.element_ty), mask=inside)


def norm_gate_up(
    tile: Tile, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(silu(g) * u, x + residual) with g, u the two halves of rms_norm(x + residual) * norm @ weight.T.

    x, residual: [1, K]; norm: [K]; weight: [2 N, K], gate rows first; one dtype, bf16 or fp16. Returns [1, N] and [1, K].
    """
    rows, k = x.shape
    if rows != 1 or tile.kernel != "rows" or tile.split != 1:
        raise ValueError(f"the fused kernel takes one row and an unsplit tile by rows, not {rows} rows and {tile}")
    n = weight.shape[0] // 2
    y = torch.empty((1, n), dtype=x.dtype, device=x.device)
    added = torch.empty_like(x)
    lanes = 32 * tile.warps
    fetch, rest = divmod(tile.bn * k * 2, lanes)
    hopper = x.is_cuda and torch.version.cuda is not None and torch.cuda.get_device_capability(x.device)[0] >= 9
    if rest or fetch % 16 or n % tile.bn or not hopper:
        fetch = 0  # a hint only: prefetches of whole 16-byte pieces, inside the weight
    _norm_gate_up[(triton.cdiv(n, tile.bn),)](
        x, residual, norm, weight, y, added, n, k, weight.stride(0), eps,
        BN=tile.bn, BK=tile.bk, EVEN_N=n % tile.bn == 0, EVEN_K=k % tile.bk == 0, STAGES=tile.stages, FETCH=fetch,
        LANES=lanes, PDL=tile.pdl, num_warps=tile.warps, **({"launch_pdl": True} if tile.pdl else {}),
    )  # fmt: skip
    return y, added


def add_norm(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual) * norm, x + residual). x, residual: [M, K] with unit stride along K; norm: [K]."""
    rows, k = x.shape
    y = torch.empty((rows, k), dtype=x.dtype, device=x.device)
    added = torch.empty((rows, k), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(k)
        _add_norm[(rows,)](x, residual, norm, y, added, k, x.stride(0), residual.stride(0), eps, BLOCK=block,
                           num_warps=4 if block <= 2048 else 8)  # fmt: skip
    return y, added


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [M, 2 N], gate columns first, unit stride along N. Returns [M, N]."""
    rows, n = x.shape[0], x.shape[1] // 2
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows:
        _silu_and_mul[(rows, triton.cdiv(n, 1024))](x, y, n, x.stride(0), BLOCK=1024, num_warps=4)
    return y
