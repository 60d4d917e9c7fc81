"""Copy M-RoPE positions to the device row by row, from pinned memory.

Up to 0.27.1 the V1 runner copies ``mrope_positions[:, :n]`` in one statement. That view of a pinned buffer is strided,
and PyTorch gathers a strided source into a temporary first, which is pageable: the copy waits until the device has
worked off its queue. Each row is contiguous, so one copy a row stays asynchronous. vLLM 0.28 does the same.

The statement stands at the end of ``_prepare_inputs``, right after ``_prepare_input_ids`` returned. That is where a
stand-in takes the place of the buffer: it answers the one statement with row copies and puts the buffer back.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target
from patches._lib.v1_fingerprints import own_runner, seen  # noqa: F401 - own_runner is named in the condition

PATCH = Patch(
    id="mrope-pinned-copy",
    kind=Kind.CODE,
    summary="Copy M-RoPE positions row by row from pinned memory (V1 before 0.28)",
    why=(
        "The strided copy goes through pageable memory and waits for the device's queue every step of an M-RoPE model; "
        "vllm-ascend measured 2-3% of TPOT for its own fix (its pull request 7014)."
    ),
    remove_when="vLLM before 0.28 is no longer supported",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids",
            "ids",
            fingerprints=seen("2e4a560932c984cb 7eec1205b160d962 e1a43e355d8c10c6"),
        ),
    ),
    assumes=(
        # The copy must be the first use of mrope_positions after _prepare_input_ids.
        Target(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
            fingerprints=seen("58943afcbd9df317 ea372394b199346e 0d90285fdec99a41"),
        ),
    ),
    condition=Condition(
        vllm=">=0.18.1,<0.34", runner="V1", platforms=("cuda", "rocm", "dcu"), facts={"model.mrope": True}, also="own_runner"
    ),
    superseded="row_by_row_upstream",
    live=("model_runner",),
    tests="tests/v1/test_mrope_pinned_copy.py",
    measured="ab_runs/results/host/h200_exactness.yaml",
)

count = Counters(PATCH.id)


def row_by_row_upstream(facts: Any) -> str | None:
    """vLLM 0.28 copies row by row itself (its pull request 51841)."""
    from overlay.versions import in_range

    if facts.build.public and in_range(facts.build.public, ">=0.28.0"):
        return "vLLM copies M-RoPE positions row by row itself since 0.28.0"
    return None


class OneCopy:
    """Stands in for ``runner.mrope_positions`` in ``buffer.gpu[:, :n].copy_(buffer.cpu[:, :n], ...)``.

    Any other use raises AttributeError or TypeError rather than answering wrongly.
    """

    __slots__ = ("buffer", "index", "runner")

    def __init__(self, runner: Any, buffer: Any) -> None:
        self.runner, self.buffer, self.index = runner, buffer, None

    @property
    def cpu(self) -> Any:
        return self.buffer.cpu

    @property
    def gpu(self) -> OneCopy:
        return self

    def __getitem__(self, index: Any) -> OneCopy:
        self.index = index
        return self

    def copy_(self, source: Any, non_blocking: bool = False) -> None:
        """Copy ``source`` (int64 [rows, n], rows contiguous, pinned) row by row and leave the stage."""
        self.runner.mrope_positions = self.buffer
        target = self.buffer.gpu[self.index]
        for row in range(target.shape[0]):
            target[row].copy_(source[row], non_blocking=non_blocking)


def ids(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """After ``_prepare_input_ids``: let the stand-in answer the copy that follows."""
    result = wrapped(*args, **kwargs)
    if instance.uses_mrope:
        count.hit()
        instance.mrope_positions = OneCopy(instance, instance.mrope_positions)
    return result
