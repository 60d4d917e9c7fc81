"""gdn-metadata-once against this release's ``GDNAttentionMetadataBuilder``: three groups, eager and with graphs."""

from __future__ import annotations

import copy
import random
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.support import applied
from tests.v1 import lab
from tests.v1.checks.block_table import counted, spent

PATCH = "gdn-metadata-once"
GROUPS, REQUESTS, WIDTH = 3, 8, 4


def applies(release: str) -> bool:
    return tuple(map(int, release.split("."))) < (0, 31, 0)


def builders(graphs: bool) -> list[Any]:
    """One builder a KV cache group, as the runner makes them."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import MambaSpec

    config = lab.make_config(lab.make_checkpoint(Path(tempfile.mkdtemp()) / "model"))
    mode = CUDAGraphMode.FULL_DECODE_ONLY if graphs else CUDAGraphMode.NONE
    config.compilation_config.cudagraph_mode = mode
    config.compilation_config.max_cudagraph_capture_size = REQUESTS
    spec = MambaSpec(block_size=16, shapes=((2, 2), (2, 2)), dtypes=(torch.float32, torch.float32))
    made = [GDNAttentionMetadataBuilder(spec, [f"layer.{i}"], config, torch.device("cpu")) for i in range(GROUPS)]
    for builder in made:  # fresh memory is not equal by chance
        for value in vars(builder).values():
            if isinstance(value, torch.Tensor):
                value.fill_(0)
    return made


class Batches:
    """Seeded common metadata, in persistent buffers as the runner keeps them."""

    def __init__(self, seed: int, release: str) -> None:
        import torch

        # up to 0.23 the builder pads by tokens (the requests are as they are), from 0.26 on by requests
        self.pads_requests = tuple(map(int, release.split("."))) >= (0, 26, 0)
        self.random = random.Random(seed)
        self.starts, self.starts_cpu = (torch.zeros(REQUESTS + 1, dtype=torch.int32) for _ in range(2))
        self.lengths = torch.zeros(REQUESTS, dtype=torch.int32)
        self.tables = [torch.zeros(REQUESTS, WIDTH, dtype=torch.int32) for _ in range(GROUPS)]

    def common(self, query_lens: list[int], padded: int) -> Any:
        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        number = len(query_lens)
        starts = [0]
        for length in query_lens:
            starts.append(starts[-1] + length)
        starts += [starts[-1]] * (REQUESTS - number)
        self.starts_cpu.copy_(torch.tensor(starts, dtype=torch.int32))
        self.starts.copy_(self.starts_cpu)
        self.lengths.zero_()
        for i, length in enumerate(query_lens):
            self.lengths[i] = length + self.random.choice((0, 5, 40))
        for table in self.tables:
            table[:number] = torch.tensor([[self.random.randrange(1, 900) for _ in range(WIDTH)] for _ in range(number)])
            table[number:padded].fill_(0)
        tokens = padded if max(query_lens) == 1 else starts[-1]
        padded = padded if self.pads_requests else number
        values = {
            "query_start_loc": self.starts[: padded + 1],
            "query_start_loc_cpu": self.starts_cpu[: padded + 1],
            "seq_lens": self.lengths[:padded],
            "num_reqs": padded,
            "num_actual_tokens": tokens,
            "max_query_len": max(query_lens),
            "max_seq_len": int(self.lengths.max()),
            "block_table_tensor": self.tables[0][:padded],
            "slot_mapping": torch.zeros(starts[-1], dtype=torch.int64),
            "_seq_lens_cpu": self.lengths[:padded],
            "seq_lens_cpu_upper_bound": self.lengths[:padded],
            "_num_computed_tokens_cpu": torch.zeros(padded, dtype=torch.int32),
        }
        return CommonAttentionMetadata(**lab.known(CommonAttentionMetadata.__init__, values))

    def groups(self, common: Any) -> list[Any]:
        """As the runner: a shallow copy a group, with its own block table."""
        made = []
        for i in range(GROUPS):
            one = copy.copy(common)
            one.block_table_tensor = self.tables[i][: common.num_reqs]
            made.append(one)
        return made

    def next(self, decode: bool) -> list[Any]:
        number = self.random.randrange(1, REQUESTS + 1)
        if decode:
            padded = min(REQUESTS, number + self.random.choice((0, 0, 1, 3)))
            return self.groups(self.common([1] * number, padded))
        lens = sorted(self.random.choice((1, 1, 2, 30, 70)) for _ in range(number))
        lens[-1] = max(lens[-1], 2)
        return self.groups(self.common(lens, number))


def contents(metadata: Any) -> dict[str, Any]:
    import torch

    found = {}
    for field in fields(metadata):
        value = getattr(metadata, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = (str(value.dtype), tuple(value.shape), value.tolist())
        elif isinstance(value, dict):
            found[field.name] = repr(value)
        else:
            found[field.name] = value
    return found


def run(release: str, seed: int, steps: int, graphs: bool, capture: bool) -> list[Any]:
    """What every group's metadata says, and what its captured graphs would read, after every step."""
    import torch

    made, batches = builders(graphs), Batches(seed, release)
    captured: dict[int, list[Any]] = {}
    if capture:
        for size in (8, 4, 2, 1):
            groups = batches.groups(batches.common([1] * size, size))
            captured[size] = [b.build_for_cudagraph_capture(m) for b, m in zip(made, groups, strict=True)]
    seen = []
    for _ in range(steps):
        decode = batches.random.random() < 0.6
        groups = batches.next(decode)
        built = [
            b.build(common_prefix_len=0, common_attn_metadata=m, num_decode_draft_tokens_cpu=None)
            for b, m in zip(made, groups, strict=True)
        ]
        seen.append([contents(metadata) for metadata in built])
        size = groups[0].num_actual_tokens
        if decode and size in captured:  # replay: the graph reads the tensors of its capture
            seen.append(
                [{k: v for k, v in contents(m).items() if isinstance(getattr(m, k), torch.Tensor)} for m in captured[size]]
            )
    return seen


def check_every_groups_metadata_equals_the_originals(release: str) -> dict[str, Any]:
    """Prefills, decodes, mixtures and padding; with graphs also what a replay reads out of the captured buffers."""
    if not applies(release):
        return {"inapplicable": True}
    events = {}
    for graphs, capture in ((False, False), (True, True)):
        before = counted(PATCH)
        original = run(release, 31, 40, graphs, capture)
        with applied(PATCH, version=release):
            patched = run(release, 31, 40, graphs, capture)
        assert len(original) == len(patched)
        for step, (mine, theirs) in enumerate(zip(patched, original, strict=True)):
            assert mine == theirs, (graphs, step, _first(mine, theirs))
        events[f"graphs={graphs}"] = spent(PATCH, before)
        assert events[f"graphs={graphs}"]["hit"] >= 2 * 40, events
    return events


def _first(mine: Any, theirs: Any) -> Any:
    for group, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        for key in b:
            if a.get(key) != b[key]:
                return group, key, a.get(key), b[key]
    return None


def check_graphs_captured_without_the_patch_keep_their_own_buffers(release: str) -> dict[str, Any]:
    """Captured by the original, then patched: decode steps go to the original, others are shared."""
    if not applies(release):
        return {"inapplicable": True}
    made, batches = builders(True), Batches(5, release)
    groups = batches.groups(batches.common([1] * 4, 4))
    captured = [b.build_for_cudagraph_capture(m) for b, m in zip(made, groups, strict=True)]
    with applied(PATCH, version=release):
        before = counted(PATCH)
        groups = batches.groups(batches.common([1] * 3, 4))
        for builder, common in zip(made, groups, strict=True):
            builder.build(0, common)
        assert spent(PATCH, before) == {"led": 1, "refused: captured with its own buffers": 2}
        for i, metadata in enumerate(captured):
            assert metadata.non_spec_query_start_loc.tolist() == [0, 1, 2, 3, 3]
            assert metadata.non_spec_state_indices_tensor.tolist()[:3] == batches.tables[i][:3, 0].tolist()
        before = counted(PATCH)
        for builder, common in zip(made, batches.groups(batches.common([1, 30], 2)), strict=True):
            builder.build(0, common)
        events = spent(PATCH, before)
        assert events == {"led": 1, "hit": 2}, events
    return events


def check_another_step_another_builder_and_speculation_are_not_shared(release: str) -> dict[str, Any]:
    if not applies(release):
        return {"inapplicable": True}
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    class Other(GDNAttentionMetadataBuilder):
        pass

    with applied(PATCH, version=release):
        made, batches = builders(False), Batches(6, release)
        first, second, third = batches.groups(batches.common([1, 1, 20], 3))
        before = counted(PATCH)
        made[0].build(0, first)
        batches.lengths[0] += 1  # written in between
        made[1].build(0, second)
        assert spent(PATCH, before) == {"led": 2}
        before = counted(PATCH)
        changed = copy.copy(third)
        changed.num_actual_tokens += 1
        try:
            made[2].build(0, changed)
        except Exception:
            pass
        made[2].build(1, third)  # another prefix length
        again = copy.copy(third)
        again.query_start_loc = third.query_start_loc.clone()  # equal, but not the same tensor
        made[0].build(1, again)
        assert spent(PATCH, before).get("hit") is None
        before = counted(PATCH)
        made[1].use_spec_decode = True
        made[1].build(0, second)
        made[2].__class__ = Other
        made[2].build(0, third)
        events = spent(PATCH, before)
        assert events == {"refused: speculation": 1, "refused: another builder": 1}, events
    return events
