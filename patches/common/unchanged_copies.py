"""Skip a copy to the device whose bytes equal what the device holds.

``_prepare_inputs`` of the V1 runner copies the same small arrays to the device every step: the query starts, the discard
mask, request indices, positions within a request, scheduled tokens. In decode most of them do not change. Here every
buffer that only the host writes keeps the bytes that were copied last; a copy whose bytes are already there is left out.
That is a comparison of content, not a rule about counts or phases, so it holds for mixed batches, speculation and dummy
runs alike (they go through the same ``copy_to_gpu``).

Buffers that the device writes (input ids, accepted tokens, positions) stay out. A write by a PyTorch operation shows in
the tensor's version counter.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target
from patches._lib.v1_fingerprints import own_runner, seen  # noqa: F401 - own_runner is named in the condition

PATCH = Patch(
    id="unchanged-copies",
    kind=Kind.CODE,
    summary="Leave out copies of host-only step buffers whose bytes the device already holds (V1)",
    why=(
        "A decode step copies five such buffers (0.18.1: two), about 5 us of host time and one device operation each; "
        "from 0.30 on each copy also stages through fresh pinned memory."
    ),
    remove_when="V1 keeps these buffers on the device, or V1 is gone",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            "vllm.v1.utils:CpuGpuBuffer.copy_to_gpu",
            "copy_to_gpu",
            fingerprints=seen("790d1dc410c0e091 = = = a0a2edc39dd0b603 ="),
        ),
        Target(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
            "step",
            fingerprints=seen("0accf5ed92f272b0 8a6e61db63723f17 261f376c718e817e 11c06a2e5a588670 d80123f907b04423 ="),
        ),
    ),
    assumes=(
        # Which buffers are written by the host alone was read off here.
        Target(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
            fingerprints=seen("58943afcbd9df317 ea372394b199346e 0d90285fdec99a41 90daf506896048b9 01c2078e58d1a486 ="),
        ),
    ),
    condition=Condition(vllm=">=0.18.1,<0.34", runner="V1", platforms=("cuda", "rocm", "dcu", "cpu"), also="own_runner"),
    live=("model_runner", "model_runner.query_start_loc"),
    tests="tests/v1/test_unchanged_copies.py",
    measured="ab_runs/results/host/h200_qwen3_0.6b.yaml",
)

count = Counters(PATCH.id)

# Buffers of the runner that only the host writes, in any of the supported releases.
HOST_ONLY = (
    "query_start_loc",
    "discard_request_mask",
    "req_indices",
    "query_pos",
    "num_scheduled_tokens",
    "num_decode_draft_tokens",
    "prev_positions",
    "prev_num_draft_tokens",
)


def step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``_update_states``, the first thing of every step: enrol the runner's host-only buffers once."""
    if "_overlay_enrolled" not in instance.__dict__:
        from patches._lib.held import enrol

        instance._overlay_enrolled = True
        for name in HOST_ONLY:
            buffer = getattr(instance, name, None)
            if hasattr(buffer, "copy_to_gpu") and not enrol(buffer):
                count.refuse("a buffer without a version counter")
    return wrapped(*args, **kwargs)


def copy_to_gpu(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Copy the first ``n`` rows (all where None) unless the device has them; returns the device's rows."""
    account = instance.__dict__.get("_overlay_held")
    if account is None:
        return wrapped(*args, **kwargs)
    rows = args[0] if args else kwargs.get("n")
    device = instance.gpu
    if device is instance.cpu:  # the CPU platform: one tensor, a copy onto itself
        count.hit()
        return device if rows is None else device[:rows]
    raw = instance.np.tobytes() if rows is None else instance.np[:rows].tobytes()
    if account.has(raw, device):
        count.hit()
        return device if rows is None else device[:rows]
    count.refuse("changed")
    before = device._version
    account.raw, kept = b"", account.raw  # should the copy fail, nothing is known
    result = wrapped(*args, **kwargs)
    account.raw = kept
    account.copied(raw, device, before)
    return result
