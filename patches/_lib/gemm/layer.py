"""A decoder layer whose MLP begins with the fused kernel: what the ``norm-gate-up`` patches of the models share.

Checked per layer, when it is traced: exactly vLLM's own classes (RMSNorm with a weight, the model's MLP, an unquantised
merged projection without bias, SiluAndMul). LoRA, quantised and subclassed layers stay with the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.facts import Facts
from overlay.ledger import Counters

WHY = (
    "In a decode step with one row, normalisation and activation are kernels of about 2.5 us each next to a product of 4 to "
    "25 us, nearly all of it launch and drain (one NVIDIA H200, graphs and inductor on)."
)
RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")
FORWARD = {f"vllm {release}": "cc0cd576b9d843c3" for release in RELEASES}  # the same text in both models


def fused_layer(original: Callable[..., Any], mlp_class: type, op_name: str, patch: str, count: Counters) -> Callable[..., Any]:
    """In place of a decoder layer's ``forward(positions, hidden_states, residual)``.

    mlp_class: the only class of ``self.mlp`` that is fused. op_name: the custom op to register under ``vllm::``.
    """
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, UnquantizedLinearMethod

    from patches._lib.gemm import dispatch

    op = dispatch.norm_gate_up_op(op_name, dispatch.Chooser(patch, count))

    def forward(self: Any, positions: Any, hidden_states: Any, residual: Any) -> Any:
        norm, mlp = self.post_attention_layernorm, self.mlp
        projection = getattr(mlp, "gate_up_proj", None)
        plain = (
            type(norm) is RMSNorm
            and norm.variance_size_override is None
            and type(mlp) is mlp_class
            and type(mlp.act_fn) is SiluAndMul
            and type(projection) is MergedColumnParallelLinear
            and type(projection.quant_method) is UnquantizedLinearMethod
            and projection.bias is None
            and hidden_states.is_cuda
            and hidden_states.dtype in (torch.bfloat16, torch.float16)
            and hidden_states.dtype == norm.weight.dtype
            and hidden_states.dtype == projection.weight.dtype
        )
        if not plain:
            return original(self, positions, hidden_states, residual)
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = op(hidden_states, residual, norm.weight, norm.variance_epsilon, projection.weight)
        hidden_states, _ = mlp.down_proj(hidden_states)
        return hidden_states, residual

    return forward


def unusable(facts: Facts) -> str | None:
    """A reason not to fuse on these facts: batch invariance, or no table of this device."""
    from patches._lib.gemm import summary

    return summary.batch_invariant(facts) or summary.no_table(facts)
