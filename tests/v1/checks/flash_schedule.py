"""flash-schedule-graph against this release's own metadata builder: real ``build``, a stand-in for FlashAttention's planner.

FlashAttention 3 does not run here. The stand-in plans with operations on the lengths and starts that it is given, so that a
plan made from other memory, or from what the host knew at capture, is another plan. Graphs are recorded ones.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from tests.support import applied
from tests.v1.checks.block_table import counted, spent

NAME = "flash-schedule-graph"

ROWS, TOKENS = 16, 64


def _planner(**given: Any) -> Any:
    """int32 [1 + 12 or 16]: two vectors of one entry a request padded to four, and a counter, all from the device."""
    import torch

    batch = given["batch_size"]
    padded = -(-batch // 4) * 4
    plan = torch.zeros(1 + 2 * padded, dtype=torch.int32)
    plan[:batch] = given["cache_seqlens"][:batch] // given["page_size"] + given["num_splits"]
    plan[padded : padded + batch] = given["cu_seqlens_q"][1 : batch + 1] * 3 + given["num_heads_q"]
    plan[-1:] = given["cache_seqlens"][:batch].sum().to(torch.int32)
    return plan


def _builder() -> Any:
    """A builder with what ``build`` reads, as ``__init__`` leaves it for FlashAttention 3 and full graphs."""
    import torch
    from vllm.v1.attention.backends import flash_attn

    flash_attn.get_scheduler_metadata = _planner
    builder = object.__new__(flash_attn.FlashAttentionMetadataBuilder)
    values = {
        "vllm_config": SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={})),
        "cache_config": SimpleNamespace(cache_dtype="auto"), "kv_cache_spec": SimpleNamespace(sliding_window=None),
        "device": torch.device("cpu"), "num_heads_q": 16, "num_heads_kv": 8, "kv_cache_dtype": torch.bfloat16, "headdim": 128,
        "block_size": 16, "aot_schedule": True, "aot_sliding_window": None, "use_full_cuda_graph": True,
        "max_cudagraph_size": 32, "max_num_splits": 32, "dcp_world_size": 1, "dcp_rank": 0, "cp_kv_cache_interleave_size": 1,
        "scheduler_metadata": torch.zeros(1 + 4 * ROWS, dtype=torch.int32), "rswa_window": None,
        "mm_prefix_query_ranges_np": None, "persistent_rswa_prefix_lens": None,
    }  # fmt: skip
    builder.__dict__.update(values)
    return builder


class Steps:
    """Seeded decode and prefill steps over one set of buffers."""

    def __init__(self, seed: int) -> None:
        import torch

        self.rnd = random.Random(seed)
        self.starts = torch.zeros(ROWS + 1, dtype=torch.int32)
        self.lengths = torch.zeros(ROWS, dtype=torch.int32)
        self.tables = torch.arange(ROWS * 8, dtype=torch.int32).view(ROWS, 8)
        self.slots = torch.arange(TOKENS, dtype=torch.int64)

    def common(self, requests: int, query: int, **changes: Any) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        rnd = self.rnd
        for row in range(ROWS):
            self.lengths[row] = rnd.randrange(1, 900) if row < requests else 0
            self.starts[row + 1] = min(row + 1, requests) * query
        values = {
            "query_start_loc": self.starts[: requests + 1], "query_start_loc_cpu": self.starts[: requests + 1].clone(),
            "seq_lens": self.lengths[:requests], "num_reqs": requests, "num_actual_tokens": requests * query,
            "max_query_len": query, "max_seq_len": int(self.lengths.max()), "block_table_tensor": self.tables[:requests],
            "slot_mapping": self.slots[: requests * query], "causal": True,
        }  # fmt: skip
        return CommonAttentionMetadata(**values | changes)

    def history(self, builder: Any, steps: int) -> list[Any]:
        """What captured steps could read after each ``build``, and every field of what it returned."""
        seen = []
        for _ in range(steps):
            query = self.rnd.choice((1, 1, 1, 1, 1, 4))
            metadata = builder.build(0, self.common(self.rnd.choice((1, 3, 4, 7)), query))
            seen.append((builder.scheduler_metadata.clone(), {name: _told(v) for name, v in vars(metadata).items()}))
        return seen


def _told(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.tolist(), tuple(value.shape), tuple(value.stride()), str(value.dtype)
    return value


def check_plans_equal_the_originals_over_random_steps(release: str) -> None:
    import torch

    from tests.testbeds.recorded_graphs import recorded

    with torch.inference_mode():
        for seed in range(3):
            expected = Steps(seed).history(_builder(), 60)
            before = counted(NAME)
            with recorded(), applied(NAME, version=release):
                found = Steps(seed).history(_builder(), 60)
            counts = spent(NAME, before)
            for step, ((plan, fields), (other, others)) in enumerate(zip(expected, found, strict=True)):
                assert torch.equal(plan, other), f"step {step}: the plan differs"
                assert fields == others, f"step {step}: {[n for n in fields if fields[n] != others[n]]}"
            assert counts["hit"] > 30 and counts["captured"] == 4, counts
            assert counts["refused: more than one token a request"] > 3 and counts["refused: first call"] == 1


def check_shadow_sees_a_plan_from_elsewhere(release: str) -> None:
    """The comparison that a device run uses is no rubber stamp."""
    import torch

    from tests.testbeds.recorded_graphs import Recorded, recorded

    replay = Recorded.replay
    with torch.inference_mode(), recorded(), applied(NAME, version=release, shadow=True):
        builder, steps = _builder(), Steps(1)
        steps.history(builder, 40)
        Recorded.replay = lambda graph: None  # a graph that does nothing: the plan of the step before stays
        try:
            for _ in range(40):
                builder.build(0, steps.common(3, 1))
        except AssertionError as error:
            assert "the plan differs" in str(error)
        else:
            raise AssertionError("nothing was noticed")
        finally:
            Recorded.replay = replay


def check_each_condition_broken_once_takes_the_original(release: str) -> None:
    import torch

    from patches.cuda import flash_schedule_graph as patch

    steps = Steps(2)
    original = object()
    odd = steps.tables.t()[0, :8]
    broken: list[tuple[str, dict[str, Any], dict[str, Any], tuple]] = [
        ("called in another way", {}, {}, (0, None)),
        ("called in another way", {}, {}, (0, steps.common(3, 1), True)),
        ("no plan ahead of the step", {"aot_schedule": False}, {}, ()),
        ("no plan ahead of the step", {"use_full_cuda_graph": False}, {}, ()),
        ("first call", {"aot_sliding_window": None}, {}, ()),
        ("sliding window", {"aot_sliding_window": (127, 0)}, {}, ()),
        ("cascade attention", {}, {}, (32, steps.common(3, 1))),
        ("decode context parallelism", {"dcp_world_size": 2}, {}, ()),
        ("more than one token a request", {}, {"max_query_len": 2}, ()),
        ("not causal", {}, {"causal": False}, ()),
        ("not causal", {}, {"causal": torch.ones(3)}, ()),
        ("R-SWA", {"rswa_window": 64}, {}, ()),
        ("lengths in pieces", {}, {"seq_lens": odd.to(torch.int32)[::2]}, ()),
    ]
    for reason, of_builder, of_step, arguments in broken:
        builder = _builder()
        builder.__dict__.update({"aot_sliding_window": (-1, -1)} | of_builder)
        arguments = arguments or (0, steps.common(3, 1, **of_step))
        before = counted(NAME)
        assert patch.build(lambda *a, **k: original, builder, arguments, {}) is original, reason
        assert spent(NAME, before) == {f"refused: {reason}": 1}, reason
    common = steps.common(3, 1)
    common.mm_req_doc_ranges = {0: [(1, 2)]}
    builder = _builder()
    builder.aot_sliding_window = (-1, -1)
    before = counted(NAME)
    assert patch.build(lambda *a, **k: original, builder, (0, common), {}) is original
    assert patch.build(lambda *a, **k: original, SimpleNamespace(), (0, common), {}) is original
    assert spent(NAME, before) == {"refused: bidirectional ranges": 1, "refused: a builder class of its own": 1}
