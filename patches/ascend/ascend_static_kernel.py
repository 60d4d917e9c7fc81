"""Compile operators for the shapes of the captured decode graphs (vllm-ascend's static kernels).

vllm-ascend 0.23.0 limits that compilation to the capture sizes by itself. With MTP the draft model's graph ran out of
bounds on the device unless SuperKernel was on as well (reported by others for Ascend 910C): with speculation this patch
adds the option only where the installed compiler knows SuperKernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay.spec import Condition, Contribution, Exactness, Kind, Patch

PATCH = Patch(
    id="ascend-static-kernel",
    kind=Kind.CONFIG,
    summary="Compile operators for the captured decode shapes (enable_static_kernel)",
    why="18.7% of c1 TPOT on Ascend 910C in a report by others; not measured here. Start-up takes longer.",
    remove_when="vllm-ascend compiles static kernels by default",
    exactness=Exactness.ROUNDING,  # another tiling may sum in another order
    condition=Condition(plugins={"vllm_ascend": "==0.23.0"}, platforms=("ascend",), archs=("ascend910b", "ascend910_93")),
    config="contribute",
    default=False,
    verified="simulated",
    tests="tests/ascend/test_config.py",
)

OPTION = "additional_config.ascend_compilation_config.enable_static_kernel"


def contribute(facts: Any, options: Mapping[str, Any]) -> Contribution:
    """The option, or why not."""
    from patches._lib.ascend_build import SUPER_KERNEL, compiler_knows

    serving = facts.serving
    if serving.enforce_eager or (serving.cudagraph_mode or "").upper() == "NONE":
        return Contribution(nothing="no graphs are captured, so that there are no fixed shapes")
    if serving.speculative_method and not compiler_knows(facts, SUPER_KERNEL):
        return Contribution(
            nothing="static kernels with MTP need SuperKernel, which the installed compiler does not know "
            "(the draft's graph runs out of bounds without it)"
        )
    return Contribution(
        args={OPTION: True},
        notes=("static kernels are compiled for the captured sizes only; the first start takes longer",),
    )
