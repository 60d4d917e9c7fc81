"""One copy into pinned memory where vllm-ascend makes two.

``copy_snapshot_to_gpu`` sends a snapshot of a host buffer, so that the host may go on writing the buffer while the copy
to the device is still under way. It clones into pageable memory and then pins the clone: two copies and two allocations.
Writing the snapshot straight into fresh pinned memory is the same snapshot. The caching host allocator keeps that memory
until the copy is done. One staging buffer used over and over would not be a snapshot: the next call overwrites it under
a copy still under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.runtime import Counters
from overlay.spec import REPLACE, Condition, Exactness, Kind, Patch, Target

PATCH = Patch(
    id="ascend-snapshot-copy",
    kind=Kind.CODE,
    summary="Snapshot host buffers straight into pinned memory (copy_snapshot_to_gpu)",
    why=(
        "Two or three buffers a step are cloned into pageable memory and then copied again into pinned memory before "
        "their transfer starts. Read in the source of vllm-ascend 0.23.0; not measured here."
    ),
    remove_when="vllm-ascend has no copy_snapshot_to_gpu (0.25.1rc and later have none)",
    exactness=Exactness.BITWISE,
    # Every module that took the name with a from-import.
    targets=tuple(
        Target(
            at=f"vllm_ascend.{module}:copy_snapshot_to_gpu",
            use="make",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "c881cea6811724cc"},
        )
        for module in (
            "worker.utils",
            "worker.model_runner_v1",
            "worker.pcp_utils",
            "spec_decode.llm_base_proposer",
            "spec_decode.step3p5",
        )
    ),
    condition=Condition(plugins={"vllm_ascend": "==0.23.0"}, platforms=("ascend",), runner="V1"),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    verified="simulated",
    tests="tests/ascend/test_snapshot_copy.py",
)

count = Counters(PATCH.id)


def make(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The replacement: ``buffer`` (a CpuGpuBuffer) -> its device tensor, with the whole host side on its way there."""
    import torch

    def copy_snapshot_to_gpu(buffer: Any) -> Any:
        count.hit()
        snapshot = torch.empty(buffer.cpu.shape, dtype=buffer.cpu.dtype, pin_memory=True)
        snapshot.copy_(buffer.cpu)
        return buffer.gpu.copy_(snapshot, non_blocking=True)

    return copy_snapshot_to_gpu
