"""L2 norm of q and k inside the recurrent gated delta rule operator, where an image has such an operator.

The operator of vllm-ascend 0.23.0 has no argument for it, and Python cannot give it one. An image built with an operator
that normalises on the chip is known by a boolean argument in its schema whose name says so. Then the two ``l2norm_fwd``
calls before it are left out and the argument is set; where the loaded operator turns out to lack it, the calls stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.runtime import Counters
from overlay.spec import REPLACE, Condition, Exactness, Kind, Patch, Target

_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"

PATCH = Patch(
    id="ascend-norm-in-recurrent-kernel",
    kind=Kind.CODE,
    summary="Normalise q and k inside the recurrent operator, on images whose operator can",
    why=(
        "Two launches per GDN layer and step less: 8.9 to 8.5 ms c1 TPOT on Ascend 910C, with 0.5 ms lost at c8, in a "
        "report by others; not measured here."
    ),
    remove_when="vllm-ascend's own operator takes the argument",
    exactness=Exactness.ROUNDING,
    targets=(
        Target(at=f"{_GDN}._forward_core", use="make", how=REPLACE, fingerprints={"vllm-ascend 0.23.0": "804ec8b41e6a2497"}),
    ),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        facts={"model.hybrid": True},
        also="operator_missing",
    ),
    conflicts=("ascend-gdn-joint-norm",),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    default=False,
    verified="simulated",
    tests="tests/ascend/test_probes.py",
)

count = Counters(PATCH.id)

OPERATOR = "npu_recurrent_gated_delta_rule"


def _norm_argument(name: str) -> bool:
    return "l2norm" in name.lower().replace("_", "")


def operator_missing(facts: Any) -> str | None:
    """A build whose operator has no argument for the norm."""
    import re

    from patches._lib.ascend_build import operator_schemas

    for schema in operator_schemas(facts, OPERATOR):
        if any(_norm_argument(name) for name in re.findall(r"bool\??\s+(\w+)", schema)):
            return None
    return "the build has no such operator"


def loaded_argument() -> str | None:
    """The loaded operator's argument for the norm; None where it has none."""
    import torch

    operator = getattr(torch.ops._C_ascend, OPERATOR, None)
    if operator is None:
        return None
    for argument in operator.default._schema.arguments:
        if _norm_argument(argument.name) and str(argument.type) == "bool":
            return argument.name
    return None


def make(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_forward_core`` whose norms and operator calls go through ``_overlay_norm`` and ``_overlay_rule``."""
    from patches._lib.ascend_edited_source import edited

    norm = original.__globals__["l2norm_fwd"]
    known: list[str | None] = []

    def argument() -> str | None:
        if not known:
            known.append(loaded_argument())
        return known[0]

    def overlay_norm(rows: Any) -> Any:
        if argument() is None:
            count.refuse("the loaded operator has no such argument")
            return norm(rows)
        count.hit()
        return rows

    def overlay_rule(**kwargs: Any) -> Any:
        import torch

        name = argument()
        return getattr(torch.ops._C_ascend, OPERATOR)(**kwargs, **({name: True} if name else {}))

    rule = f"torch.ops._C_ascend.{OPERATOR}"
    expressions = {
        f"l2norm_fwd({part}_{name})": f"_overlay_norm({part}_{name})"
        for name in ("spec", "decode", "non_spec")
        for part in ("query", "key")
    }
    return edited(
        original,
        expressions={**expressions, rule: "_overlay_rule"},
        times={rule: 3},
        names={"_overlay_norm": overlay_norm, "_overlay_rule": overlay_rule},
    )
