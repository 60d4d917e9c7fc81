"""Llama: add, RMS norm, gate and up projection, SiLU and product in one kernel when one request decodes.

Between the attention's output and the MLP's down projection a decode step runs a normalisation, a product and an
activation. Where the table holds the fused kernel for exactly this shape, one kernel does the three. With more rows the
product goes by the same table between two small kernels, as many as before. Rounding happens at the same places as in
vLLM's own layers, but sums run in another order: exactness ``rounding``.

Counters: as in ``gemm-tiles``, eager calls and graph captures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.facts import Facts
from overlay.runtime import Counters
from overlay.spec import REPLACE, Condition, Exactness, Kind, Option, Patch, Target
from patches._lib.gemm import layer

PATCH = Patch(
    id="llama-norm-gate-up",
    kind=Kind.CODE,
    summary="Llama: one kernel for norm, gate/up projection and activation when one request decodes",
    why=layer.WHY,
    remove_when="vLLM fuses them itself for few rows",
    exactness=Exactness.ROUNDING,
    targets=(Target(at="vllm.model_executor.models.llama:LlamaDecoderLayer.forward", use="fused_layer", how=REPLACE, fingerprints=layer.FORWARD),),
    condition=Condition(
        vllm=">=0.18.1,<0.34",
        platforms=("cuda",),
        architectures=("LlamaForCausalLM", "MistralForCausalLM"),
        facts={"serving.lora": False},
        also="unusable",
    ),
    options={
        "tables": Option("", "a folder with tables of your own, used before the shipped ones"),
        "early": Option(False, "with programmatic launch, load the first weights before the input is ready"),
        "pdl": Option("table", "programmatic dependent launch: as the table says, or off", ("table", "off")),
    },
    requires=("gemm-tiles",),
    tests="tests/gemm",
    measured="ab_runs/results/gemm",
)

count = Counters(PATCH.id)


def unusable(facts: Facts) -> str | None:
    """A reason not to use the patch on these facts."""
    return layer.unusable(facts)


def fused_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of ``LlamaDecoderLayer.forward(positions, hidden_states, residual)``."""
    from vllm.model_executor.models.llama import LlamaMLP

    return layer.fused_layer(original, LlamaMLP, "overlay_llama_norm_gate_up", PATCH.id, count)
