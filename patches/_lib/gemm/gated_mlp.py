"""A model's gated MLP as one custom op: what the ``gated-mlp-*`` patches share.

The layers that vLLM calls in turn (merged gate and up projection, SiluAndMul, down projection) become one op wherever they are
vLLM's own plain ones on one rank. Inside, the op looks at the rows: with an entry of the table the activation is part of
the first product's kernel, and the second product's starts while the first one ends; without, the same three steps run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay.spec import Target
from patches._lib.fingerprints import by_release
from patches._lib.gemm.summary import TILES

if TYPE_CHECKING:
    import torch

    from overlay.facts import Facts
    from overlay.ledger import Counters

WHY = (
    "The activation between the two products of an MLP is a kernel of its own, and the second product's weights wait for it. "
    "On one NVIDIA H200 (bf16, one row, weights from memory, graph replay) the MLP of Qwen3-0.6B took 9.1 us by tiles and 7.5 "
    "fused, that of Qwen3-4B 38.7 and 37.4 (cuBLAS: 13.3 and 45.9)."
)
REMOVE_WHEN = "vLLM fuses the activation into the product, or gemm-tiles is gone"
_LINEAR = "vllm.model_executor.layers.linear"
ASSUMES = (
    Target(
        "vllm.model_executor.layers.activation:SiluAndMul",
        fingerprints=by_release("c2e3186f6eb10ded = c8d43369444fad26 = e38aec851897f1f2 ="),
    ),
    Target(f"{_LINEAR}:ColumnParallelLinear.forward", fingerprints=by_release("0fc49893316a799a 4f527e14bae831e5 = = = =")),
    Target(f"{_LINEAR}:RowParallelLinear.forward", fingerprints=by_release("d595f2c77bb9ce9e 64f0e730c598e328 = = = =")),
    Target(
        f"{_LINEAR}:UnquantizedLinearMethod.apply",
        fingerprints=by_release("e7931c43259368f6 72608398f0e41597 = = 93fb11e5c97f43ed ="),
    ),
)


def no_entry(facts: Facts) -> str | None:
    """Why the shipped and the user's tables have no MLP of this model, or None. Unknown sizes are left to the process."""
    from patches._lib.gemm import summary, table

    sizes = (facts.model.hidden_size, facts.model.intermediate_size)
    if None in sizes:
        return None
    found = table.choose(summary.device(facts), table.folders(summary.own_tables())).mlps
    if any((hidden, inner) == sizes for _, _, hidden, inner in found):
        return None
    return f"no table has an MLP of {sizes[0]} and {sizes[1]} for this device. To make one: python -m overlay tune MODEL"


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product by gemm-tiles' op, registered where that patch is in force."""
    import torch

    return torch.ops.vllm.overlay_gemm(x, weight, bias)


def plain() -> Callable[[Any], bool]:
    """A test of linear layers: of this rank alone, without bias, their product ``default_unquantized_gemm``."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def test(layer: Any) -> bool:
        method = layer.quant_method
        return (
            type(method) is UnquantizedLinearMethod
            # from 0.32 on kept by the method, before it is asked for at every call
            and getattr(method, "_gemm_impl", utils.default_unquantized_gemm) is utils.default_unquantized_gemm
            and layer.tp_size == 1
            and layer.bias is None
            and layer.return_bias
        )

    return test


def plain_mlp() -> Callable[[Any], bool]:
    """A test of MLPs with gate_up_proj, act_fn and down_proj: vLLM's own plain layers, of one dtype."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

    layer = plain()

    def test(mlp: Any) -> bool:
        up, down = mlp.gate_up_proj, mlp.down_proj
        return (
            type(up) is MergedColumnParallelLinear  # not LoRA's
            and type(down) is RowParallelLinear
            and type(mlp.act_fn) is SiluAndMul
            and getattr(mlp, "expert_gate", None) is None
            and layer(up)
            and layer(down)
            and up.weight.dtype == down.weight.dtype
        )

    return test


def replacement(original: Callable[..., Any], patch: str, count: Counters) -> Callable[..., Any]:
    """A ``forward(self, x)`` of an MLP with gate_up_proj, act_fn and down_proj; ``original`` where any is not plain."""
    import torch

    from patches._lib.gemm import dispatch

    dtypes, fits = tuple(dispatch.DTYPES), plain_mlp()

    def activation(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        torch.ops._C.silu_and_mul(out, x)
        return out

    op = dispatch.mlp_op("overlay_gated_mlp", dispatch.Chooser(patch, count, "mlps", TILES), linear, activation)

    def forward(self: Any, x: Any) -> Any:
        if not (fits(self) and x.is_cuda and x.dtype in dtypes and self.gate_up_proj.weight.dtype == x.dtype):
            if not torch.compiler.is_compiling():  # traced code cannot count
                count.refuse("not a plain MLP of one rank")
            return original(self, x)
        return op(x, self.gate_up_proj.weight, self.down_proj.weight)

    return forward
