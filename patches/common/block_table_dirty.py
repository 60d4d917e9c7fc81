"""Copy a block table to the device only when it changed.

The V1 runner copies ``num_reqs`` rows of every KV cache group's block table to the device each step, although in
steady decode a row changes only when a request crosses a block boundary. This patch keeps, per table, the number of
rows that the device is known to hold as the host has them, and skips the copy when that number is asked for again.

What can make the device differ from the host, and what is done about it:

- the host's rows are written by ``append_row``, ``add_row``, ``clear_row``, ``move_row``, ``swap_row`` and ``clear``:
  each forgets what the device holds. So does a write through the host tensor (``preserve_serving_state`` of 0.32,
  elastic EP), which shows in the tensor's version counter;
- building attention metadata overwrites the device rows ``[num_reqs:padded]``: a skip needs the same ``num_reqs``;
- dummy runs (warm-up, profile, capture, the idle rank of a data-parallel group) overwrite device rows below a
  ``num_reqs`` committed before: what the device holds is forgotten when one ends;
- waking up from sleep may hand back device memory without its content: forgotten as well.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target
from patches._lib.v1_fingerprints import own_runner, seen  # noqa: F401 - own_runner is named in the condition

PATCH = Patch(
    id="block-table-dirty",
    kind=Kind.CODE,
    summary="Commit a V1 block table to the device only when it changed",
    why=(
        "Every step copies num_reqs x max_blocks int32 per KV cache group: one launch a group, 8 KB a request at 32k "
        "context and block size 16. In decode the content changes once per block_size tokens."
    ),
    remove_when="vLLM's V1 BlockTable tracks changes itself, or the V1 runner is gone",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            "vllm.v1.worker.block_table:BlockTable.append_row",
            "append_row",
            fingerprints=seen("47d661189c76582c = = = 56fd9aa3f44ae56c ="),
        ),
        Target(
            "vllm.v1.worker.block_table:BlockTable.add_row",
            "forget",
            fingerprints=seen("fea7fe8abd959b27 = = = = ="),
        ),
        Target(
            "vllm.v1.worker.block_table:BlockTable.clear_row",
            "forget",
            fingerprints=seen("- 4ee1f4277d5ef8b6 = = = ="),
            versions=">=0.23.0",
        ),
        Target(
            "vllm.v1.worker.block_table:BlockTable.move_row",
            "forget",
            fingerprints=seen("e1f95c12e39f2772 = = 231e002d9a7c798c = ="),
        ),
        Target(
            "vllm.v1.worker.block_table:BlockTable.swap_row",
            "forget",
            fingerprints=seen("fd7fbd1efcd388f0 = = = = ="),
        ),
        Target(
            "vllm.v1.worker.block_table:BlockTable.clear",
            "forget",
            fingerprints=seen("af8e40ebd8a65005 = = = = ="),
        ),
        Target(
            "vllm.v1.worker.block_table:BlockTable.commit_block_table",
            "commit",
            fingerprints=seen("2cef093ad4d7daea = = = = ="),
        ),
        Target(
            at="vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run",
            use="dummy_run",
            fingerprints=seen("101137f3bf82dc18 22ca57cad1b2cb95 41bb07ba63f01894 eac293d7ea550839 4e60aad0b3f20d3f ="),
        ),
        Target(
            at="vllm.v1.worker.gpu_worker:Worker.wake_up",
            use="wake_up",
            fingerprints=seen(
                "1de47f213841b31d e2fa418ac735f997 2e5760d331c1796f 1911aa9ed3a80c5c 9b39c9098141d105 3b7649d91205bec8"
            ),
        ),
    ),
    condition=Condition(
        vllm=">=0.18.1,<0.34",
        runner="V1",
        platforms=("cuda", "rocm", "dcu", "cpu"),
        also="own_runner",
    ),
    live=("model_runner", "model_runner.input_batch.block_table.block_tables.0"),
    tests="tests/v1/test_block_table_dirty.py",
    measured="ab_runs/results/host/h200_qwen3_0.6b.yaml",
)

count = Counters(PATCH.id)


def _version(buffer: Any) -> int | None:
    """The version counter of the host tensor: it rises with every write that goes through the tensor.

    Where host and device share one tensor (the CPU platform) a copy does nothing and no version matters. None for an
    inference tensor, which keeps no counter.
    """
    if buffer.cpu is buffer.gpu:
        return 0
    try:
        return buffer.cpu._version
    except RuntimeError:
        return None


def forget(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A write to the host's rows."""
    instance._overlay_held = None
    return wrapped(*args, **kwargs)


def append_row(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """As ``forget``; appending nothing changes nothing (groups that need no new block get an empty list each step)."""
    if args[0] if args else kwargs["block_ids"]:
        instance._overlay_held = None
    return wrapped(*args, **kwargs)


def commit(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Copy rows ``[:num_reqs]`` unless the device holds exactly these rows already."""
    num_reqs = args[0] if args else kwargs["num_reqs"]
    version = _version(instance.block_table)
    held = getattr(instance, "_overlay_held", None)
    if held is None:
        count.refuse("changed")
    elif version is None:
        count.refuse("host tensor without a version counter")
    elif held[0] != num_reqs:
        count.refuse("another number of requests")
    elif held[1] != version:
        count.refuse("host tensor written directly")
    else:
        count.hit()
        return None
    instance._overlay_held = None
    result = wrapped(*args, **kwargs)
    instance._overlay_held = (num_reqs, version)
    return result


def _forget_all(runner: Any) -> None:
    batch = getattr(runner, "input_batch", None)
    for table in getattr(getattr(batch, "block_table", None), "block_tables", ()):
        table._overlay_held = None


def dummy_run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A dummy run leaves device rows that belong to no request."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        _forget_all(instance)


def wake_up(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Tables made inside the KV cache's memory pool lose their device content while asleep."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        _forget_all(getattr(instance, "model_runner", None))
