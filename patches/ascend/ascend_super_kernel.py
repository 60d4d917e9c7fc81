"""Ask npugraph_ex for SuperKernel, and keep its compile cache apart.

vllm-ascend builds the compiler's options without ``super_kernel_optimize``, and its cache key does not name it. Both are
added here, and only where the installed compiler's configuration has the option: an unknown one is an error there.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target

PATCH = Patch(
    id="ascend-super-kernel",
    kind=Kind.CODE,
    summary="Compile with SuperKernel beside static kernels, in a cache of its own",
    why=(
        "Small kernels are merged into one launch: 8.5 to 8.2 ms c1 TPOT on Ascend 910C in a report by others; not "
        "measured here. In 0.23.0 vLLM captures the graphs itself, so that only the static compilation sees the option."
    ),
    remove_when="vllm-ascend passes super_kernel_optimize itself",
    exactness=Exactness.ROUNDING,
    targets=(
        Target(
            at="vllm_ascend.compilation.compiler_interface:_configure_backend",
            use="configure",
            fingerprints={"vllm-ascend 0.23.0": "5e32a574f2014146"},
        ),
        Target(
            at="vllm_ascend.compilation.compiler_interface:AscendCompiler.compute_hash",
            use="compute_hash",
            fingerprints={"vllm-ascend 0.23.0": "dfd9fa558dc20cfc"},
        ),
    ),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        archs=("ascend910b", "ascend910_93"),
        also="compiler_without_it",
    ),
    requires=("ascend-static-kernel",),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    default=False,
    verified="simulated",
    tests="tests/ascend/test_config.py",
)

count = Counters(PATCH.id)


def compiler_without_it(facts: Any) -> str | None:
    """An installed compiler that does not know the option."""
    from patches._lib.ascend_build import SUPER_KERNEL, compiler_knows

    if not compiler_knows(facts, SUPER_KERNEL):
        return f"the installed npugraph_ex has no option {SUPER_KERNEL}"
    return None


def configure(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``_configure_backend``: as before, and the option through the same door as the others."""
    names = ("config", "ascend_compilation_config", "vllm_config", "process_kwargs_options")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    result = wrapped(*args, **kwargs)
    config, process = given["config"], given.get("process_kwargs_options")
    if not given["ascend_compilation_config"].enable_static_kernel:
        count.refuse("no static kernels")
    elif process is None or not hasattr(config, "super_kernel_optimize"):
        count.refuse("the compiler has no such option")
    else:
        process(config, {"options": {"super_kernel_optimize": True}})
        count.hit()
    return result


def compute_hash(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> str:
    """A cache key of its own."""
    from hashlib import sha256

    stock = wrapped(*args, **kwargs)
    return sha256(f"{stock} super_kernel_optimize".encode(), usedforsecurity=False).hexdigest()[:10]
