"""The MLP of Llama with the activation inside the first product: see ``patches/_lib/gemm/gated_mlp.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.runtime import Counters
from overlay.spec import REPLACE, Condition, Exactness, Kind, Patch, Target
from patches._lib.fingerprints import by_release
from patches._lib.gemm import gated_mlp
from patches._lib.gemm.gated_mlp import no_entry  # noqa: F401 - named in the condition

_AT = "vllm.model_executor.models.llama:LlamaMLP"

PATCH = Patch(
    id="gated-mlp-llama",
    kind=Kind.CODE,
    summary="decode's MLP of Llama models in two launches, the activation inside the first",
    why=gated_mlp.WHY,
    remove_when=gated_mlp.REMOVE_WHEN,
    exactness=Exactness.ROUNDING,
    targets=(
        Target(f"{_AT}.forward", "make", how=REPLACE, fingerprints=by_release("a918f8a597b08dc5 = = = 07a2254bf2af3812 =")),
    ),
    assumes=(
        Target(f"{_AT}.__init__", fingerprints=by_release("6a726f5b349b1daa = = = = =")),
        *gated_mlp.ASSUMES,
    ),
    condition=Condition(
        vllm=">=0.18.1,<0.34",
        platforms=("cuda",),
        architectures=("LlamaForCausalLM",),
        facts={"serving.tensor_parallel": 1},
        also="no_entry",
    ),
    requires=(gated_mlp.TILES,),
    tests="tests/gemm/test_gated_mlp.py",
    measured="ab_runs/results/gemm",
)

count = Counters(PATCH.id)


def make(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of ``LlamaMLP.forward(x)``: x and the result are [tokens, hidden]."""
    return gated_mlp.replacement(original, PATCH.id, count)
