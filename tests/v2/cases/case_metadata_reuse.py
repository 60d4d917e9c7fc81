"""``attention-metadata-reuse`` against the real model state, with real FlashAttention metadata builders.

The planner behind the builders is the stand-in of ``tests.v1.checks.flash_schedule``; graphs are recorded ones.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.utils import AttentionGroup

from patches.cuda import attention_metadata_reuse as patch
from tests.support import applied
from tests.testbeds.recorded_graphs import Recorded, recorded
from tests.v1.checks.flash_schedule import _builder, _told
from tests.v2.cases.engine import Engine, counted

ROWS = 16


class World:
    """Decode steps of a model with one attention group of two layers, over one set of buffers."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.rnd = random.Random(seed)
        self.state = engine.runner.model_state
        self.state.__dict__.pop(patch._KEPT, None)
        self.builder = _builder()
        group = AttentionGroup(None, ["layers.0", "layers.1"], None, 0, metadata_builders=[self.builder])
        self.groups = [[group]]
        self.buffers = InputBuffers(ROWS, 64, torch.device("cpu"))
        self.tables = (torch.zeros(ROWS, 8, dtype=torch.int32),)
        self.slots = torch.zeros(1, 64, dtype=torch.int64)
        self.cache = SimpleNamespace(kv_cache_groups=[None])

    def arguments(self, requests: int, padded: int, **changes: Any) -> tuple[Any, ...]:
        batch = InputBatch.make_dummy(padded, padded, self.buffers)
        lengths = np.array([self.rnd.randrange(1, 900) if row < requests else 0 for row in range(padded)], dtype=np.int32)
        self.buffers.seq_lens[:padded] = torch.from_numpy(lengths)
        batch.num_reqs = batch.num_tokens = requests
        batch.num_scheduled_tokens = np.ones(requests, dtype=np.int32)
        batch.seq_lens_cpu_upper_bound = torch.from_numpy(lengths)
        for name, value in changes.items():
            setattr(batch, name, value)
        tables = tuple(table[:padded] for table in self.tables)
        return batch, CUDAGraphMode.FULL, tables, self.slots[:, :padded], self.groups, self.cache

    def history(self, steps: int) -> list[Any]:
        seen = []
        for _ in range(steps):
            requests = self.rnd.choice((1, 2, 3, 5, 7))
            found = self.state.prepare_attn(*self.arguments(requests, -(-requests // 4) * 4), for_capture=False)
            plan = self.builder.scheduler_metadata.clone()
            seen.append((plan, {layer: {n: _told(v) for n, v in vars(m).items()} for layer, m in found.items()}))
        return seen


@pytest.fixture
def patched(qwen: Engine) -> Any:
    with ExitStack() as stack, torch.inference_mode():
        stack.enter_context(recorded())
        stack.enter_context(applied("flash-schedule-graph"))
        stack.enter_context(applied("attention-metadata-reuse"))
        yield


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_metadata_and_plans_equal_the_originals_over_random_steps(qwen: Engine, seed: int, request: Any) -> None:
    with torch.inference_mode():
        expected = World(qwen, seed).history(60)
    request.getfixturevalue("patched")
    with counted(patch.count) as counts:
        found = World(qwen, seed).history(60)
    for step, ((plan, metadata), (other, others)) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(plan, other), f"step {step}: the plan differs"
        assert metadata == others, f"step {step}"
    assert counts["hit"] > 40 and counts["refused: not kept yet"] > 2


def test_shadow_sees_metadata_of_another_step(qwen: Engine, patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(qwen, 1)
    world.history(40)
    fresh = patch._refusal(world.state, world.arguments(3, 4), {})
    assert fresh is None
    arguments = world.arguments(3, 4)
    mine = world.state.prepare_attn(*arguments)
    mine["layers.0"].max_seq_len += 1
    with pytest.raises(AssertionError, match="max_seq_len"):
        patch._shadow(mine, {name: shorter(value, 1) for name, value in mine.items()})
    monkeypatch.setattr(Recorded, "replay", lambda graph: None)
    before = world.builder.scheduler_metadata.clone()
    world.state.prepare_attn(*world.arguments(3, 4))
    assert torch.equal(before, world.builder.scheduler_metadata)  # the plan comes from the replay and nowhere else


def shorter(value: Any, less: int) -> Any:
    """A copy of a metadata object whose longest sequence is ``less`` shorter."""
    other = object.__new__(type(value))
    other.__dict__.update(vars(value))
    other.max_seq_len -= less
    return other


def test_each_condition_broken_once_takes_the_original(qwen: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(qwen, 4)
    original = object()
    plain = world.arguments(3, 4)
    other_group = SimpleNamespace(get_metadata_builder=lambda i: SimpleNamespace())
    mapped = SimpleNamespace(get_metadata_builder=lambda i: world.builder, kernel_block_size=16)
    broken: list[tuple[str, tuple, dict]] = [
        ("called in another way", plain, {"for_capture": True}),
        ("called in another way", plain, {"ubatch_idx": 1}),
        ("called in another way", plain[:5], {}),
        ("not a captured model step", (plain[0], CUDAGraphMode.PIECEWISE, *plain[2:]), {}),
        ("more than one token a request", world.arguments(3, 4, num_tokens=5), {}),
        ("more than one token a request", world.arguments(3, 4, num_draft_tokens=3), {}),
        ("decode context parallelism", world.arguments(3, 4, dcp_local_seq_lens=torch.zeros(4)), {}),
        ("fast prefill", world.arguments(3, 4, fast_prefill=object()), {}),
        ("R-SWA", world.arguments(3, 4, prompt_lens=torch.zeros(4)), {}),
        ("another attention backend", (*plain[:4], [[other_group]], plain[5]), {}),
        ("block tables mapped for the kernel", (*plain[:4], [[mapped]], plain[5]), {}),
    ]
    for reason, arguments, kwargs in broken:
        with counted(patch.count) as counts:
            assert patch.prepare_attn(lambda *a, **k: original, world.state, arguments, kwargs) is original, reason
        assert counts == {f"refused: {reason}": 1}, reason
    with counted(patch.count) as counts:
        assert patch.prepare_attn(lambda *a, **k: original, SimpleNamespace(), plain, {}) is original
        prefix = SimpleNamespace(is_mm_prefix_lm=True)
        monkeypatch.setattr(world.state, "model_config", prefix)
        assert patch.prepare_attn(lambda *a, **k: original, world.state, plain, {}) is original
    assert counts == {"refused: a model state of its own": 1, "refused: bidirectional ranges": 1}
