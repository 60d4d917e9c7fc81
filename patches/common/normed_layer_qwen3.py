"""The norms of Qwen3's layers inside the products behind them.

A Qwen3 layer normalises twice, each time the sum of what came in and the residual, and each time a product follows: the
query, key and value projection, and the MLP's gate and up projection. For one or two rows the norm is a kernel of about two
microseconds that the product waits for. Here the product's own programs add up the squares while they read x
(``patches/_lib/gemm/kernels.py``, NORMED), and the norm's kernel is gone.

The first layer, which has no residual yet, and every layer that is not vLLM's plain one on one rank take the original.
Where the table has no entry for a number of rows the op makes the norm by a kernel of its own and the rest as without
this patch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.facts import Facts
from overlay.runtime import Counters
from overlay.spec import REPLACE, Condition, Exactness, Kind, Patch, Target
from patches._lib.fingerprints import by_release
from patches._lib.gemm import gated_mlp

_AT = "vllm.model_executor.models.qwen3"

PATCH = Patch(
    id="normed-layer-qwen3",
    kind=Kind.CODE,
    summary="decode's norms of Qwen3 inside the products behind them",
    why=(
        "On one NVIDIA H200 (bf16, one row, graph replay) norm and query-key-value product of Qwen3-4B took 11.5 us apart "
        "and 10.2 as one kernel, of Qwen3-0.6B 5.7 and 4.4; norm and MLP of Qwen3-0.6B 8.9 and 8.0. Served at batch 1 that "
        "gave 2.83 -> 2.81 ms and 1.02 -> 0.97, on one boot. Not on by default: at 4 and 8 rows, where nothing is fused and "
        "the op makes the norm by a kernel of its own, that boot was up to 5% slower, no more than boots differ by: undecided."
    ),
    remove_when="vLLM fuses the norm into the product, or gemm-tiles is gone",
    exactness=Exactness.ROUNDING,
    targets=(
        Target(
            f"{_AT}:Qwen3DecoderLayer.forward", "make", how=REPLACE, fingerprints=by_release("cc0cd576b9d843c3 = = = = =")
        ),
    ),
    assumes=(
        Target(
            f"{_AT}:Qwen3DecoderLayer.__init__",
            fingerprints=by_release("1ea874ccadbaf8f0 = be8b60f9fe97a205 = 61970f656b3e3b76 ="),
        ),
        Target(f"{_AT}:Qwen3Attention.forward", fingerprints=by_release("dafa877dd57ac368 = = = = =")),
        Target(
            "vllm.model_executor.layers.layernorm:RMSNorm.__init__",
            fingerprints=by_release("0260100836c889e0 0dd3100ceb47b53c 48b726bbd7c26a3a = = af05d17fc98f1d1c"),
        ),
        Target(
            "vllm.model_executor.layers.layernorm:RMSNorm.forward_native",
            fingerprints=by_release("680fec54c674382d 259bffdf3b1431f9 = = = ="),
        ),
    ),
    condition=Condition(
        vllm=">=0.18.1,<0.34",
        platforms=("cuda",),
        architectures=("Qwen3ForCausalLM",),
        facts={"serving.tensor_parallel": 1},
        also="no_entry",
    ),
    requires=(gated_mlp.TILES, "gated-mlp-qwen2"),
    default=False,
    tests="tests/gemm/test_normed_layer.py",
    measured="ab_runs/results/gemm",
)

count = Counters(PATCH.id)


def no_entry(facts: Facts) -> str | None:
    """Why no table has a product of this model with its norm, or None. Unknown sizes are left to the process."""
    from patches._lib.gemm import summary, table

    hidden = facts.model.hidden_size
    if hidden is None:
        return None
    found = table.choose(summary.device(facts), table.folders(summary.own_tables()))
    if any(k == hidden for _, _, _, k in (*found.normed, *found.normed_mlps)):
        return None
    return f"no table has a product of {hidden} with its norm for this device. To make one: python -m overlay tune MODEL"


def make(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of ``Qwen3DecoderLayer.forward(positions, hidden_states, residual)``: [tokens, hidden] each."""
    import torch
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm.model_executor.models.qwen3 import Qwen3Attention, Qwen3MLP

    from patches._lib.gemm import dispatch

    dtypes = tuple(dispatch.DTYPES)
    plain, plain_mlp = gated_mlp.plain(), gated_mlp.plain_mlp()

    def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return torch.ops.vllm.overlay_gated_mlp(x, gate_up, down)

    def chooser(kind: str) -> Any:
        return dispatch.Chooser(PATCH.id, count, kind, gated_mlp.TILES)

    normed = dispatch.normed_op("overlay_normed", chooser("normed"), gated_mlp.linear)
    normed_mlp = dispatch.normed_mlp_op("overlay_normed_mlp", chooser("normed_mlps"), gated_mlp.linear, mlp)

    def plain_norm(norm: Any, x: torch.Tensor) -> bool:
        return (
            type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None and norm.weight.dtype == x.dtype
        )

    def forward(self: Any, positions: Any, hidden_states: Any, residual: Any) -> Any:
        attention = self.self_attn
        fits = (
            residual is not None
            and type(attention) is Qwen3Attention
            and type(attention.qkv_proj) is QKVParallelLinear
            and type(self.mlp) is Qwen3MLP
            and plain(attention.qkv_proj)
            and plain_mlp(self.mlp)
            and attention.qkv_proj.weight.dtype == self.mlp.gate_up_proj.weight.dtype == hidden_states.dtype
            and hidden_states.is_cuda
            and hidden_states.dtype in dtypes
            and residual.dtype == hidden_states.dtype
            and plain_norm(self.input_layernorm, hidden_states)
            and plain_norm(self.post_attention_layernorm, hidden_states)
        )
        if not fits:
            if residual is not None and not torch.compiler.is_compiling():  # traced code cannot count
                count.refuse("not a plain layer of one rank")
            return original(self, positions, hidden_states, residual)
        norm = self.input_layernorm
        qkv, residual = normed(hidden_states, residual, norm.weight, norm.variance_epsilon, attention.qkv_proj.weight)
        # what Qwen3Attention.forward does behind its product
        q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        by_head = (*q.shape[:-1], q.shape[-1] // attention.head_dim, attention.head_dim)
        q = attention.q_norm(q.view(*by_head)).view(q.shape)
        by_head = (*k.shape[:-1], k.shape[-1] // attention.head_dim, attention.head_dim)
        k = attention.k_norm(k.view(*by_head)).view(k.shape)
        q, k = attention.rotary_emb(positions, q, k)
        hidden_states, _ = attention.o_proj(attention.attn(q, k, v))
        norm, up, down = self.post_attention_layernorm, self.mlp.gate_up_proj, self.mlp.down_proj
        return normed_mlp(hidden_states, residual, norm.weight, norm.variance_epsilon, up.weight, down.weight)

    return forward
