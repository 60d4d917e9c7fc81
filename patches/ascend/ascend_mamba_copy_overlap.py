"""Copy Mamba states between blocks beside the rest of the step's preparation.

With ``mamba_cache_mode`` align, ``execute_model`` decides early (``preprocess_mamba``) which states move to a new block
and copies them late, directly before the forward pass, because a KV connector may still be loading states. Without a
connector they can move at once, on the side stream, while the default stream goes on with its metadata. The side stream
first waits for everything already queued (the step that wrote the states); the default stream waits for the copy where
it used to make it. Events are made once.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target

PATCH = Patch(
    id="ascend-mamba-copy-overlap",
    kind=Kind.CODE,
    summary="Copy Mamba states to their new blocks on the side stream, before the forward pass needs them",
    why=(
        "The copy sits on the critical path directly before the forward pass, on steps that cross a block boundary. "
        "Reported for Ascend 910C by others without a number of its own; not measured here."
    ),
    remove_when="vllm-ascend copies beside its preparation",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm.v1.worker.mamba_utils:preprocess_mamba",
            use="preprocess",
            fingerprints={"vllm-ascend 0.23.0": "c2e2da2707fb793c"},
        ),
        # The module that defines what the line above names: the same function under a second name.
        Target(
            at="vllm_ascend.patch.worker.patch_mamba_utils:preprocess_mamba",
            use="preprocess",
            fingerprints={"vllm-ascend 0.23.0": "c2e2da2707fb793c"},
        ),
        Target(
            at="vllm.v1.worker.mamba_utils:do_mamba_copy_block",
            use="copy_block",
            fingerprints={"vllm-ascend 0.23.0": "7b29501b99f14f9f"},
        ),
    ),
    assumes=(
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner.execute_model",
            fingerprints={"vllm-ascend 0.23.0": "fcd04f6a00d78cb1"},
        ),
    ),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        facts={"model.hybrid": True, "serving.kv_transfer": False},
    ),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    default=False,  # ordered by events, seen so in the checker; the gain, on block boundaries only, is unproven
    verified="simulated",
    tests="tests/ascend/test_mamba_copy.py",
)

count = Counters(PATCH.id)


def preprocess(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``preprocess_mamba``: as before, and the copies that it collected start at once."""
    import torch
    from vllm.distributed.kv_transfer import has_kv_transfer_group
    from vllm.v1.worker import mamba_utils
    from vllm_ascend.utils import global_stream

    buffers = kwargs["copy_bufs"] if "copy_bufs" in kwargs else args[8]
    events = getattr(buffers, "_overlay_events", None)
    if events is not None:
        # The host arrays of the last copy are about to be written again: it must have left them.
        events[1].synchronize()
    result = wrapped(*args, **kwargs)
    buffers._overlay_copied = False
    if has_kv_transfer_group():
        count.refuse("KV connector")
        return result
    if buffers.offset == 0:
        return result
    if events is None:
        events = buffers._overlay_events = (torch.npu.Event(), torch.npu.Event())
    ready, done = events
    side = global_stream()
    ready.record(torch.npu.current_stream())
    with torch.npu.stream(side):
        side.wait_event(ready)
        mamba_utils.do_mamba_copy_block(buffers)
        done.record(side)
    buffers._overlay_copied = True
    count.hit()
    return result


def copy_block(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``do_mamba_copy_block``: the wait for a copy already under way, else the copy."""
    import torch

    buffers = kwargs["copy_bufs"] if "copy_bufs" in kwargs else args[0]
    if not getattr(buffers, "_overlay_copied", False):
        return wrapped(*args, **kwargs)
    buffers._overlay_copied = False
    torch.npu.current_stream().wait_event(buffers._overlay_events[1])
    return None
