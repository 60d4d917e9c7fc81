"""``decode-tail-graph`` and the graphs of ``decode-input-prep-v2``: whole histories with recorded graphs, and the gate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patches._lib import step_graphs
from patches.common import decode_input_prep_v2 as prep
from patches.common import greedy_tail
from patches.cuda import decode_tail_graph as patch
from tests.support import applied
from tests.testbeds.recorded_graphs import recorded
from tests.v2.cases.engine import Engine, assert_equal, counted, stock_run

BELOW = ("sampler-staged-writes", "decode-input-prep-v2", "greedy-tail")


@contextmanager
def captured_steps(engine: Engine) -> Iterator[torch.Tensor]:
    """Hidden states at one address for every step, as captured model steps leave them."""
    static = torch.zeros(64, engine.runner.model_config.get_hidden_size())

    def keep(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        static[: output.shape[0]] = output
        return static[: output.shape[0]]

    hook = engine.runner.model.register_forward_hook(keep)
    original = patch.captured_hidden_states
    patch.captured_hidden_states = lambda runner: static
    try:
        yield static
    finally:
        patch.captured_hidden_states = original
        hook.remove()


@contextmanager
def all_applied(engine: Engine) -> Iterator[None]:
    """All patches of a captured decode step. Few parts of the vocabulary: each is a program to interpret."""
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(patch, "_PARTS", 2)
        stack.enter_context(recorded())
        stack.enter_context(captured_steps(engine))
        for name in (*BELOW, "decode-tail-graph"):
            stack.enter_context(applied(name))
        yield


@pytest.mark.parametrize(("seed", "kind", "pad_to"), [(1, "mixed", 1), (3, "greedy", 4), (4, "greedy", 1), (8, "mixed", 2)])
def test_histories_leave_every_buffer_as_the_original_does(qwen: Engine, seed: int, kind: str, pad_to: int) -> None:
    stock = stock_run(qwen, seed, kind, pad_to)
    with all_applied(qwen), counted(patch.count) as tail, counted(prep.count) as inputs:
        patched = qwen.run(seed, kind, pad_to)
    assert_equal(stock, patched)
    assert inputs["captured"] > 0 and not [event for event in (*tail, *inputs) if "failed" in event]
    if kind == "greedy":
        assert tail["hit"] > 10 and tail["captured"] > 1
    else:
        assert sum(number for event, number in tail.items() if event.startswith("refused: ")) > 0


def test_a_graph_of_another_batch_would_be_noticed(qwen: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded graphs are no rubber stamp: a batch left where it was turns the histories red."""
    stock = stock_run(qwen, 3, "greedy", 4)
    hold = prep.State.hold

    def forgets(state: Any, runner: Any, idx_np: Any, module: Any) -> None:
        slots = None if state.slots is None else state.slots.clone()
        hold(state, runner, idx_np, module)
        if slots is not None:
            state.slots.copy_(slots)

    monkeypatch.setattr(prep.State, "hold", forgets)
    with all_applied(qwen), pytest.raises((AssertionError, IndexError, RuntimeError)):
        assert_equal(stock, qwen.run(3, "greedy", 4))
    qwen.engine.abort_request(list(qwen.runner.req_states.req_id_to_index))


BROKEN: list[tuple[str, Any, str]] = [
    ("grammar", object(), "structured output"),
    ("runner.lora_config", object(), "LoRA"),
    ("runner.batch_sharder", object(), "logits computed by shards"),
    ("runner.pp_handler", object(), "pipeline parallelism"),
    ("runner.model_state", SimpleNamespace(), "a model state of its own"),
    ("hidden", torch.zeros(4, 64), "not behind a captured model step"),
    ("batch", SimpleNamespace(), "inputs prepared by the original"),
    ("runner.model", SimpleNamespace(), "logits computed in a way of its own"),
    ("sampler.compute_nans", True, "NaN counts wanted"),
    ("few", (0, [None] * 3), "more requests than the graphs are for"),
    ("few", (8, [lambda: SimpleNamespace(read=False)] * 3), "more steps in flight than there are places"),
]


def test_each_condition_broken_once_takes_the_original(qwen: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a history that is otherwise replayed: the step's own arguments, one of them changed at a time."""
    original = object()
    sample = patch.sample
    seen: dict[str, tuple[bool, dict[str, int]]] = {}

    def broken_once(runner: Any, args: tuple, at: str, value: Any) -> bool:
        arguments = dict(zip(("hidden", "batch", "grammar"), args, strict=True))
        owner, _, name = at.partition(".")
        with pytest.MonkeyPatch.context() as broken:
            if owner == "few":
                few = patch._Tail(runner, max(1, value[0]))
                few.sampled, few.unread = few.sampled[: value[0]], value[1]
                broken.setattr(runner, patch._STATE, few, raising=False)
            elif name:
                broken.setattr({"runner": runner, "sampler": runner.sampler}[owner], name, value, raising=False)
            else:
                arguments[owner] = value
            return sample(lambda *a: original, runner, tuple(arguments.values()), {}) is original

    def spy(wrapped: Any, runner: Any, args: tuple, kwargs: dict) -> Any:
        if not seen and patch._refusal(runner, args, kwargs) is None:
            for at, value, reason in BROKEN:
                with counted(patch.count) as counts:
                    taken = broken_once(runner, args, at, value)
                seen[reason] = (taken, counts)
        return sample(wrapped, runner, args, kwargs)

    monkeypatch.setattr(patch, "sample", spy)
    with all_applied(qwen):
        qwen.run(3, "greedy", 1)
    for _, _, reason in BROKEN:
        assert seen[reason] == (True, {f"refused: {reason}": 1}), reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_argmax_by_parts_is_the_argmax(qwen: Engine, dtype: torch.dtype) -> None:
    """Ties within and across parts, rows of equal values, of -inf, with inf, narrower than the parts."""
    generator = torch.Generator().manual_seed(5)
    for width in (5, 64, 8192, 9001):
        logits = torch.randn(5, width, generator=generator).to(dtype)
        logits[0] = 1.5
        logits[1] = float("-inf")
        logits[2] = float("-inf")
        logits[2, [width - 1, width // 2]] = 3.0
        logits[3, [0, width - 1]] = 50.0
        logits[4, width - 1] = float("inf")
        expected, found = torch.zeros(5, 1, dtype=torch.int64), torch.full((5, 1), -1)
        greedy_tail.argmax(logits, expected)
        patch._argmax(logits, torch.zeros(5, patch._PARTS, 2, dtype=torch.float64), found)
        assert torch.equal(found, expected)
        assert torch.equal(found[[0, 2, 3, 4], 0], logits.float().argmax(-1)[[0, 2, 3, 4]])


def test_a_capture_that_fails_is_not_tried_again(qwen: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stock_run(qwen, 3, "greedy", 4)
    tries = []

    def fails(work: Any, place: Any) -> Any:
        tries.append(work)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with all_applied(qwen), counted(patch.count) as tail, counted(prep.count) as inputs:
        monkeypatch.setattr(step_graphs, "capture", fails)
        patched = qwen.run(3, "greedy", 4)
    assert_equal(stock, patched)
    assert len(tries) == 2  # once for each place
    for counts in (tail, inputs):
        assert counts["capture failed: operation not permitted when stream is capturing"] == 1
    assert "hit" not in tail and inputs["hit"] > 0
