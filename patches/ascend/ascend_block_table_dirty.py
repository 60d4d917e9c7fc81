"""Copy vllm-ascend's block tables to the device only when they changed, and then in one copy less.

``commit_block_table`` clones and pins ``num_reqs`` rows of every KV cache group's table each step, Mamba groups
included. In steady decode a row changes only when a request crosses a block boundary. A table remembers here for which
number of rows the device is known to hold what the host has, and skips the commit only when that number comes again.

What makes it forget: the host's writers (``append_row``, ``add_row``, ``clear_row``, ``move_row``, ``swap_row``,
``clear``), a write through the host tensor (its version counter), a dummy run (it commits padded rows and builds
metadata), waking up. Building metadata zeroes the device rows ``[num_reqs:padded]``: they lie above the number last
committed, and a larger number later is another number.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target

_TABLE = "vllm_ascend.worker.block_table:BlockTable"

PATCH = Patch(
    id="ascend-block-table-dirty",
    kind=Kind.CODE,
    summary="Commit vllm-ascend's block tables only when they changed",
    why=(
        "Every step clones, pins and copies num_reqs x max_blocks int32 per KV cache group. In decode the content "
        "changes once per block_size tokens. Read in the source of vllm-ascend 0.23.0; not measured here."
    ),
    remove_when="vllm-ascend's BlockTable tracks changes itself",
    exactness=Exactness.BITWISE,
    targets=(
        Target(at=f"{_TABLE}.append_row", use="append_row", fingerprints={"vllm-ascend 0.23.0": "e18fbe98ec930628"}),
        Target(at=f"{_TABLE}.add_row", use="forget", fingerprints={"vllm-ascend 0.23.0": "fea7fe8abd959b27"}),
        Target(at=f"{_TABLE}.clear_row", use="forget", fingerprints={"vllm-ascend 0.23.0": "4ee1f4277d5ef8b6"}),
        Target(at=f"{_TABLE}.move_row", use="forget", fingerprints={"vllm-ascend 0.23.0": "87d02e48d1ebe5df"}),
        Target(at=f"{_TABLE}.swap_row", use="forget", fingerprints={"vllm-ascend 0.23.0": "c3f15575185cfc90"}),
        Target(at=f"{_TABLE}.clear", use="forget", fingerprints={"vllm-ascend 0.23.0": "6a565afece850dc0"}),
        Target(at=f"{_TABLE}.commit_block_table", use="commit", fingerprints={"vllm-ascend 0.23.0": "c0e110cb9af0e768"}),
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner._dummy_run",
            use="dummy_run",
            fingerprints={"vllm-ascend 0.23.0": "772d096d07e85b77"},
        ),
        Target(
            at="vllm_ascend.worker.worker:NPUWorker.wake_up",
            use="wake_up",
            fingerprints={"vllm-ascend 0.23.0": "15b050ab3e164091"},
        ),
    ),
    condition=Condition(plugins={"vllm_ascend": "==0.23.0"}, platforms=("ascend",), runner="V1"),
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    live=("model_runner", "model_runner.input_batch.block_table.block_tables.0"),
    verified="simulated",
    tests="tests/ascend/test_block_table.py",
)

count = Counters(PATCH.id)


def _version(tensor: Any) -> int | None:
    """The host tensor's version counter; None for an inference tensor, which keeps none."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def forget(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A write to the host's rows."""
    instance._overlay_held = None
    return wrapped(*args, **kwargs)


def append_row(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """As ``forget``; appending nothing writes nothing (groups that need no block get an empty list each step)."""
    if args[0] if args else kwargs["block_ids"]:
        instance._overlay_held = None
    return wrapped(*args, **kwargs)


def commit(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Send rows ``[:num_reqs]`` unless the device holds exactly these already."""
    import torch

    num_reqs = args[0] if args else kwargs["num_reqs"]
    host = instance.block_table.cpu
    version = _version(host)
    held = getattr(instance, "_overlay_held", None)
    if held is None:
        count.refuse("changed")
    elif version is None:
        count.refuse("host tensor without a version counter")
    elif held != (num_reqs, version):
        count.refuse("another number of rows" if held[0] != num_reqs else "host tensor written directly")
    else:
        count.hit()
        return
    instance._overlay_held = None
    rows = host[:num_reqs]
    snapshot = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    snapshot.copy_(rows)
    instance.block_table.gpu[:num_reqs].copy_(snapshot, non_blocking=True)
    instance._overlay_held = (num_reqs, version)


def _forget_all(runner: Any) -> None:
    batch = getattr(runner, "input_batch", None)
    for table in getattr(getattr(batch, "block_table", None), "block_tables", ()):
        table._overlay_held = None


def dummy_run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A dummy run writes device rows that belong to no request."""
    _forget_all(instance)
    try:
        return wrapped(*args, **kwargs)
    finally:
        _forget_all(instance)


def wake_up(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """What was allocated in the KV cache's pool comes back without its content."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        _forget_all(getattr(instance, "model_runner", None))
