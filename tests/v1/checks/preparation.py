"""What the patches around ``_prepare_inputs`` leave behind, against a stock twin under the same scheduler history."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from tests.support import applied
from tests.v1 import lab
from tests.v1.checks.block_table import counted, spent

STEPS = 80
TOGETHER = ("block-table-dirty", "unchanged-copies", "mrope-pinned-copy", "decode-input-prep")


def before_0_28(release: str) -> bool:
    return tuple(map(int, release.split("."))) < (0, 28, 0)


def history(seed: int, steps: int, patches: tuple[str, ...], release: str, **settings: Any) -> list[dict[str, Any]]:
    """Every buffer of every step. ``settings`` go to the lab."""
    from patches._lib.v1_decode_shadow import snapshot

    options = settings.pop("options", {})
    touch = settings.pop("touch", None)
    load = settings.pop("load", ())  # (prompt tokens, tokens to generate) of all requests, in place of random ones
    seen = []
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(applied(patch, version=release, **options.get(patch, {})))
        world = lab.Lab(seed, **settings)
        for length, tokens in load:
            world.add(length, tokens)
        for step in range(steps):
            if touch is not None:
                touch(world, step)
            returned = world.step(churn=not load)
            if returned is not None:
                seen.append(snapshot(world.runner, returned))
    return seen


def assert_twins(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    from patches._lib.v1_decode_shadow import differences

    assert len(ours) == len(theirs)
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        different = differences(mine, other)
        assert not different, f"step {step}: {different}"


def check_every_buffer_equals_the_stock_twins_after_every_step(release: str) -> dict[str, Any]:
    """All patches together: chunked prefill, decode of N, new, finished, aborted, prefix hits."""
    patches = tuple(p for p in TOGETHER if p != "mrope-pinned-copy")
    before = {p: counted(p) for p in patches}
    assert_twins(history(11, STEPS, patches, release), history(11, STEPS, (), release))
    events = {p: spent(p, before[p]) for p in patches}
    assert events["decode-input-prep"]["hit"] > 30, events
    assert events["block-table-dirty"]["hit"] > 20, events
    assert events["unchanged-copies"].get("hit", 0) > 5, events
    return events


def check_preempted_and_resumed_requests_leave_what_the_stock_twin_leaves(release: str) -> dict[str, Any]:
    """Four requests that want twice the blocks there are: who loses them starts again when others have finished."""
    patches = tuple(p for p in TOGETHER if p != "mrope-pinned-copy")
    before = {p: counted(p) for p in patches}
    load = [(40, 60), (33, 60), (50, 50), (20, 60)]
    blocks, lab.BLOCKS = lab.BLOCKS, 30
    try:
        preempted = lab.Lab.preemptions
        ours = history(17, 110, patches, release, load=load)
        mine = lab.Lab.preemptions - preempted
        assert_twins(ours, history(17, 110, (), release, load=load))
    finally:
        lab.BLOCKS = blocks
    assert mine > 0 and lab.Lab.preemptions == preempted + 2 * mine, "other preemptions than the stock twin's, or none"
    events = {p: spent(p, before[p]) for p in patches}
    assert events["decode-input-prep"]["hit"] > 30, events
    return events | {"preemptions": {"hit": mine}}


def check_every_buffer_equals_the_stock_twins_with_mrope(release: str) -> dict[str, Any]:
    patches = tuple(p for p in TOGETHER if before_0_28(release) or p != "mrope-pinned-copy")
    before = {p: counted(p) for p in patches}
    world = {"groups": 1, "mrope": True}
    assert_twins(history(12, 40, patches, release, **world), history(12, 40, (), release, **world))
    events = {p: spent(p, before[p]) for p in patches}
    assert events["decode-input-prep"]["hit"] > 10, events
    if before_0_28(release):
        assert events["mrope-pinned-copy"]["hit"] > 5, events
    return events


def check_the_shadow_finds_every_integer_equal(release: str) -> dict[str, Any]:
    before = counted("decode-input-prep")
    history(13, 30, ("decode-input-prep",), release, options={"decode-input-prep": {"shadow": True}})
    events = spent("decode-input-prep", before)
    assert events["shadow equal"] == events["hit"] > 10 and "shadow different" not in events, events
    return events


def check_positions_are_copied_only_where_the_batch_changed(release: str) -> dict[str, Any]:
    """Three requests that decode side by side, a fourth that comes later, a step that the original takes: a copy behind each
    of these, not one a step.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copies(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sources: list[int] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.overloadpacket.__name__ == "copy_":
                self.sources.append(args[1].data_ptr())
            return function(*args, **(kwargs or {}))

    def run(patches: tuple[str, ...]) -> tuple[list[Any], int]:
        worlds: list[lab.Lab] = []

        def touch(world: lab.Lab, step: int) -> None:
            worlds[:] = [world]
            if step == 15:
                world.add(9, 40)
            if step == 30 and patches:
                world.runner._overlay_decode.rest = None  # the original takes this step, with the same requests

        with Copies() as copies:
            seen = history(18, 45, patches, release, touch=touch, load=[(5, 60), (7, 60), (6, 60)])
        if not patches:
            return seen, 0
        # the original copies from there too, once in each step that it is left with
        return seen, copies.sources.count(worlds[0].runner.input_batch.num_computed_tokens_cpu_tensor.data_ptr())

    before = counted("decode-input-prep")
    ours, copies = run(("decode-input-prep",))
    assert_twins(ours, run(())[0])
    events = spent("decode-input-prep", before)
    assert events["hit"] > 30 and 3 <= copies <= 7, (events, copies)
    return events | {"copies": copies}


def check_what_a_dummy_run_leaves_behind_is_overwritten(release: str) -> dict[str, Any]:
    """Tails and constants hold another batch's values before a step, on the device and the host."""

    def touch(world: lab.Lab, step: int) -> None:
        runner = world.runner
        number = runner.input_batch.num_reqs
        for name in ("query_start_loc", "num_accepted_tokens", "discard_request_mask"):
            buffer = getattr(runner, name)
            buffer.gpu.fill_(1 if name == "discard_request_mask" else 77)
            if name == "query_start_loc":
                buffer.np[:] = 78
        if hasattr(runner, "optimistic_seq_lens_cpu"):
            runner.optimistic_seq_lens_cpu[number:] = 79
            runner.num_accepted_tokens.np[:] = 80
            runner.seq_lens.fill_(81)
        else:
            runner.seq_lens.np[number:] = 79
            runner.seq_lens.gpu.fill_(81)
        for table in runner.input_batch.block_table.block_tables:
            table.slot_mapping.gpu.fill_(82)

    before = counted("decode-input-prep")
    patch = ("decode-input-prep",)
    assert_twins(history(16, 30, patch, release, touch=touch), history(16, 30, (), release, touch=touch))
    events = spent("decode-input-prep", before)
    assert events["hit"] > 10, events
    return events


def check_copies_are_left_out_only_where_the_bytes_are_there(release: str) -> dict[str, Any]:
    """unchanged-copies alone, with writes to the device in between: PyTorch's are seen, an announced kernel's too."""
    import torch

    from patches._lib.held import forget

    def touch(world: lab.Lab, step: int) -> None:
        buffer = world.runner.query_start_loc
        if step % 7 == 3:
            buffer.gpu.fill_(-9)
        if step % 7 == 5:
            buffer.gpu.numpy()[:] = -8  # past the version counter, as a kernel would
            forget(buffer)
        if step % 11 == 4:
            world.runner.discard_request_mask.gpu[:2] |= True

    before = counted("unchanged-copies")
    ours = history(14, 45, ("unchanged-copies",), release, touch=touch)
    assert_twins(ours, history(14, 45, (), release, touch=touch))
    events = spent("unchanged-copies", before)
    assert events["hit"] > 30 and events["refused: changed"] > 30, events
    with applied("unchanged-copies", version=release):
        world = lab.Lab(1)
        world.add(3, 50)
        while world.runner.input_batch.num_reqs == 0 or world.step(churn=False) is None:
            world.step(churn=False)
        buffer = world.runner.query_start_loc
        buffer.np[:] = 5
        buffer.copy_to_gpu()
        buffer.np[3:] = 6
        assert buffer.copy_to_gpu(3).shape == (3,)  # a shorter copy of what is there
        assert (buffer.gpu == 5).all()
        buffer.copy_to_gpu()
        assert torch.equal(buffer.gpu, buffer.cpu)
        buffer.gpu = buffer.gpu.clone()  # another tensor in its place
        buffer.gpu.fill_(0)
        buffer.copy_to_gpu()
        assert torch.equal(buffer.gpu, buffer.cpu)
        plain = type(buffer)(4, dtype=torch.int32, device=torch.device("cpu"), pin_memory=False)
        plain.np[:] = 7
        assert plain.copy_to_gpu().tolist() == [7] * 4  # never enrolled
    return events


def check_mrope_rows_are_copied_and_the_buffer_is_back_in_its_place(release: str) -> dict[str, Any]:
    """Up to 0.27: also where asynchronous speculation corrects the positions after the copy."""
    if not before_0_28(release):
        return {"superseded": True}
    world = {"groups": 1, "mrope": True}

    def touch(one: lab.Lab, step: int) -> None:
        one.runner.use_async_spec_decode = step % 3 == 0

    patch = ("mrope-pinned-copy",)
    before = counted("mrope-pinned-copy")
    ours = history(15, 25, patch, release, touch=touch, **world)
    assert_twins(ours, history(15, 25, (), release, touch=touch, **world))
    events = spent("mrope-pinned-copy", before)
    assert events["hit"] == len(ours)
    with applied("mrope-pinned-copy", version=release):
        one = lab.Lab(1, **world)
        one.add(5, 5)
        buffer = one.runner.mrope_positions
        one.step(churn=False)
        assert one.runner.mrope_positions is buffer
        from patches.common.mrope_pinned_copy import OneCopy

        for wrong in (lambda: OneCopy(one.runner, buffer).np, lambda: OneCopy(one.runner, buffer).gpu.shape):
            try:
                wrong()
            except AttributeError:
                continue
            raise AssertionError("the stand-in answered something else")
    with applied("mrope-pinned-copy", version=release):
        one = lab.Lab(1)
        one.add(5, 5)
        one.step(churn=False)
        assert spent("mrope-pinned-copy", before)["hit"] == len(ours) + 1  # not without M-RoPE
    return events
