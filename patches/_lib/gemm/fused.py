"""The small kernels around a gated MLP's first product in decode, as links of a chain of dependent launches.

Between the attention's output and the MLP's down projection a decode step runs add and RMS norm, the gate and up product,
SiLU and product. As kernels that say early "the next one may start" (programmatic dependent launch), the products after
them load their first weights while these still run. The mathematics and the places of rounding are those of vLLM's own
definitions (``RMSNorm.forward_native`` with a residual, ``SiluAndMul.forward_native``): sum and new residual in fp32 and
the model's dtype, the normalised row rounded once before and once after its weight, the activation before its product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_norm(x, residual, norm, y, added, K, x_m, r_m, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    weight = tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(x + m * x_m + k, mask=inside, other=0.0).to(tl.float32)
    row += tl.load(residual + m * r_m + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(added + m * K + k, row.to(added.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(row * row, 0) / K + eps)
    normed = (row * scale).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + m * K + k, (normed * weight).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _silu_and_mul(x, y, N, x_m, BLOCK: tl.constexpr, PDL: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(x + m * x_m + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + m * x_m + N + n, mask=inside, other=0.0).to(tl.float32)
    activation = (gate * tl.sigmoid(gate)).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + m * N + n, (activation * up).to(y.dtype.element_ty), mask=inside)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual) * norm, x + residual). x, residual: [M, K] with unit stride along K; norm: [K]."""
    rows, k = x.shape
    y = torch.empty((rows, k), dtype=x.dtype, device=x.device)
    added = torch.empty((rows, k), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(k)
        _add_norm[(rows,)](x, residual, norm, y, added, k, x.stride(0), residual.stride(0), eps, BLOCK=block,
                           PDL=pdl, num_warps=4 if block <= 2048 else 8, **_launch(pdl))  # fmt: skip
    return y, added


def silu_and_mul(x: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """silu(gate) * up of x [M, 2 N], gate columns first, unit stride along N. Returns [M, N]."""
    rows, n = x.shape[0], x.shape[1] // 2
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows:
        _silu_and_mul[(rows, triton.cdiv(n, 1024))](x, y, n, x.stride(0), BLOCK=1024, PDL=pdl, num_warps=4, **_launch(pdl))
    return y


def _launch(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}
