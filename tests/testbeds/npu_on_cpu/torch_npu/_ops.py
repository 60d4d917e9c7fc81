"""torch_npu's operators that have a meaning on the CPU, from their documentation."""

from __future__ import annotations

import torch

__all__ = [
    "get_npu_format",
    "npu_add_rms_norm",
    "npu_format_cast",
    "npu_gemma_rms_norm",
    "npu_prefetch",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
    "npu_top_k_top_p",
]


def npu_format_cast(tensor: torch.Tensor, format_id: int, *_: object, **__: object) -> torch.Tensor:
    return tensor


def get_npu_format(tensor: torch.Tensor) -> int:
    return 2  # ND


def npu_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / rms(x) * weight, 1 / rms(x)), the mean over the last dimension in fp32."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight, scale


def npu_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x + residual
    normed, scale = npu_rms_norm(total, weight, eps)
    return normed, scale, total


def npu_gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    return npu_rms_norm(x, 1.0 + weight, eps)


def npu_top_k_top_p(logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None) -> torch.Tensor:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits, k, p)


def npu_rotary_mul(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_mode: str = "half") -> torch.Tensor:
    if rotary_mode == "interleave":
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return (x * cos + turned * sin).to(x.dtype)


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def npu_prefetch(tensor: torch.Tensor, *_: object, **__: object) -> None:
    """A hint to the L2 cache: no effect on values."""
