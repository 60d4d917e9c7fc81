"""Do not copy a small host buffer to the device when the device holds the same content already.

``NPUModelRunner._prepare_inputs`` copies about ten small buffers a step. In steady decode most of them hold what they
held a step before. Each of these buffers is compared here with what was last sent, element by element: neither the
number of requests nor of tokens decides, since batches of equal counts differ ([1, 3] against [2, 2] scheduled tokens).

Only buffers whose device side nobody but this copy writes take part. ``num_accepted_tokens``, ``query_start_loc``,
``seq_lens``, ``positions``, the block table and the slot mapping are written on the device too, and stay out.
"""

from __future__ import annotations

import functools
from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target

PATCH = Patch(
    id="ascend-unchanged-copies",
    kind=Kind.CODE,
    summary="Skip host-to-device copies of small step buffers whose content did not change",
    why=(
        "_prepare_inputs issues up to ten small copies a step, each a launch, although the content of many repeats in "
        "decode. In a seeded replay of the real _prepare_inputs, with much coming and going, 27% of these copies were "
        "redundant with speculation and 69% without; time not measured."
    ),
    remove_when="vllm-ascend sends its step buffers in one copy",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner.__init__",
            use="init",
            fingerprints={"vllm-ascend 0.23.0": "24a7ce9c8bd2878b"},
        ),
    ),
    assumes=(
        Target(at="vllm.v1.utils:CpuGpuBuffer.copy_to_gpu", fingerprints={"vllm-ascend 0.23.0": "790d1dc410c0e091"}),
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner._prepare_inputs",
            fingerprints={"vllm-ascend 0.23.0": "87fb5f2108f253d0"},
        ),
    ),
    condition=Condition(plugins={"vllm_ascend": "==0.23.0"}, platforms=("ascend",), runner="V1"),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    live=("model_runner",),
    verified="simulated",
    tests="tests/ascend/test_prepare_inputs.py",
)

count = Counters(PATCH.id)

# Attributes of the runner. In 0.23.0 their device side is written by copy_to_gpu alone (every use of .gpu was read).
BUFFERS = (
    "discard_request_indices",
    "discard_request_mask",
    "num_decode_draft_tokens",
    "num_scheduled_tokens",
    "prev_num_draft_tokens",
    "prev_positions",
    "query_pos",
    "req_indices",
)


@functools.cache
def _compared_class() -> type:
    from vllm.v1.utils import CpuGpuBuffer

    class ComparedBuffer(CpuGpuBuffer):
        """A CpuGpuBuffer that remembers what it sent: ``_sent[:_known]`` is what the device holds."""

        def copy_to_gpu(self, n: int | None = None) -> Any:
            host = self.np if n is None else self.np[:n]
            rows = host.shape[0]
            if rows <= self._known and (host == self._sent[:rows]).all():
                count.hit()
                return self.gpu if n is None else self.gpu[:n]
            count.add("sent")
            self._sent[:rows] = host
            self._known = max(self._known, rows)
            return super().copy_to_gpu(n)

    return ComparedBuffer


def compare(buffer: Any) -> bool:
    """Turn ``buffer`` into one that compares; False where it is not a plain CpuGpuBuffer of integers or booleans."""
    from vllm.v1.utils import CpuGpuBuffer

    if type(buffer) is not CpuGpuBuffer or not hasattr(buffer, "np") or buffer.np.dtype.kind not in "iub":
        return False
    buffer._sent, buffer._known = buffer.np.copy(), 0
    buffer.__class__ = _compared_class()
    return True


def init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """After the runner has made its buffers."""
    result = wrapped(*args, **kwargs)
    for name in BUFFERS:
        buffer = getattr(instance, name, None)
        if buffer is not None and not compare(buffer):
            count.refuse("a buffer of another kind")
    return result
