"""``running-slots`` on the real KV cache manager: a stock one and a patched one through the same seeded histories."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from patches.common import running_slots as patch
from tests.support import applied

BLOCK = 4


def manager_of(blocks: int, caching: bool = True, block_size: int = BLOCK, window: int | None = None) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs: list[Any] = [FullAttentionSpec(**shape)]
    if window:
        specs.append(SlidingWindowSpec(**shape, sliding_window=window))
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config, max_model_len=64, scheduler_block_size=block_size, hash_block_size=BLOCK, enable_caching=caching
    )


def request_of(name: str, tokens: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(name, tokens, SamplingParams(max_tokens=50), None, block_hasher=get_request_block_hasher(BLOCK, sha256))


def seen(manager: Any) -> Any:
    """Everything that an allocation may change."""
    group = manager.coordinator.single_type_managers[0]
    pool = manager.block_pool
    return (
        {name: [b.block_id for b in blocks] for name, blocks in group.req_to_blocks.items()},
        dict(group.num_cached_block),
        [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
        [(b.ref_cnt, b.block_hash) for b in pool.blocks],
        list(group.new_block_ids),
    )


def blocks_of(answer: Any) -> Any:
    return None if answer is None else [[b.block_id for b in group] for group in answer.blocks]


class Twin:
    """One manager with its own requests; two of them get the same calls."""

    def __init__(self, caching: bool, original: bool) -> None:
        self.manager = manager_of(24, caching)
        self.requests: dict[str, Any] = {}
        self.original = original

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        function = type(self.manager).allocate_slots
        if self.original:
            return function.__wrapped__(self.manager, *args, **kwargs)
        return self.manager.allocate_slots(*args, **kwargs)

    def admit(self, name: str, tokens: list[int], chunk: int) -> Any:
        from vllm.v1.request import RequestStatus

        request = request_of(name, tokens)
        hit, length = self.manager.get_computed_blocks(request)[:2]
        new = min(chunk, len(tokens) - length)
        answer = self.allocate(request, new, num_new_computed_tokens=length, new_computed_blocks=hit, num_lookahead_tokens=0)
        if answer is not None:
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = length + new
            self.requests[name] = request
        return blocks_of(answer)

    def advance(self, name: str, new: int, lookahead: int, token: int, rejected: int) -> Any:
        request = self.requests[name]
        if request.num_computed_tokens >= request.num_tokens:
            request.append_output_token_ids(token)
        answer = self.allocate(request, new, num_lookahead_tokens=lookahead)
        if answer is not None:
            request.num_computed_tokens += new - min(rejected, new - 1)
        return blocks_of(answer)

    def release(self, name: str) -> None:
        self.manager.free(self.requests.pop(name))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_histories_leave_the_managers_as_the_original_does(caching: bool, lookahead: int) -> None:
    """Chunked prefill, decode, drafts with rejections, block boundaries, prefix hits, finishes, exhaustion."""
    rnd = random.Random(11 + lookahead)
    stock, patched = Twin(caching, original=True), Twin(caching, original=False)
    shared = [rnd.randrange(99) for _ in range(30)]
    before = patch.count.all()
    answers = 0
    with applied("running-slots"):
        for step in range(3000):
            names = sorted(stock.requests)
            if len(names) < 5 and rnd.random() < 0.2:
                tokens = shared[: rnd.choice([0, 8, 30])] + [rnd.randrange(99) for _ in range(rnd.randint(1, 12))]
                call = ("admit", f"r{step}", tokens, rnd.randint(1, 16))
            elif names and rnd.random() < 0.04:
                call = ("release", rnd.choice(names))
            elif names:
                name = rnd.choice(names)
                request = stock.requests[name]
                left = request.num_tokens - request.num_computed_tokens
                if request.num_tokens > 55:
                    call = ("release", name)
                else:
                    new = rnd.randint(1, left) if left > 1 else 1 + rnd.randint(0, lookahead)
                    call = ("advance", name, new, lookahead, rnd.randrange(99), rnd.randint(0, lookahead) if left <= 1 else 0)
            else:
                continue
            expected = getattr(stock, call[0])(*call[1:])
            found = getattr(patched, call[0])(*call[1:])
            assert found == expected, (step, call)
            assert seen(patched.manager) == seen(stock.manager), (step, call)
            answers += expected is None
    counts = {k: v - before.get(k, 0) for k, v in patch.count.all().items()}
    assert counts["hit"] > 300 and counts["refused: a new block"] > 100 and answers > 0
    if caching:
        assert counts["refused: a block becomes full"] > 50


@pytest.fixture
def decoding() -> tuple[Any, Any]:
    """A manager and a running request in the middle of its second block."""
    twin = Twin(True, original=False)
    twin.admit("r", [1, 2, 3, 4, 5], 16)
    return twin.manager, twin.requests["r"]


def original(*args: Any, **kwargs: Any) -> str:
    return "original"


def reasons(manager: Any, request: Any, *more: Any, new: int = 1, **kwargs: Any) -> tuple[str, set[str]]:
    before = patch.count.all()
    answer = patch.allocate_slots(original, manager, (request, new, *more), {"num_lookahead_tokens": 0, **kwargs})
    return answer, {k for k, v in patch.count.all().items() if v != before.get(k, 0)}


def test_the_fast_answer_is_the_originals_empty_one(decoding: tuple[Any, Any]) -> None:
    answer, counted = reasons(*decoding)
    assert answer is decoding[0].empty_kv_cache_blocks and counted == {"hit"}


def test_each_condition_broken_once_takes_the_original(decoding: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.request import RequestStatus

    manager, request = decoding
    group = manager.coordinator.single_type_managers[0]
    assert reasons(manager, request, 0) == ("original", {"refused: not the call for a running request"})
    assert reasons(manager, request, reserved_blocks=1) == (
        "original",
        {"refused: not the call for a running request"},
    )
    assert reasons(manager, request, new=9) == ("original", {"refused: a new block"})
    assert reasons(manager, request, new=0) == ("original", {"refused: not running"})
    with monkeypatch.context() as m:
        m.setattr(request, "status", RequestStatus.PREEMPTED)
        assert reasons(manager, request) == ("original", {"refused: not running"})
    with monkeypatch.context() as m:
        m.setattr(group, "_partial_hit_reqs", {"other": (0, None)})
        assert reasons(manager, request) == ("original", {"refused: a partial prefix hit is open"})
    with monkeypatch.context() as m:
        m.setattr(group, "num_cached_block", {})
        assert reasons(manager, request) == ("original", {"refused: not cached yet"})
    with monkeypatch.context() as m:
        m.setattr(group.block_pool, "hash_block_size", 2)
        assert reasons(manager, request) == ("original", {"refused: blocks hashed in parts"})
    with monkeypatch.context() as m:
        m.setattr(group, "num_cached_block", {"r": 0})
        assert reasons(manager, request) == ("original", {"refused: a block becomes full"})
    with monkeypatch.context() as m:
        m.setattr(group, "req_to_blocks", {})
        assert reasons(manager, request) == ("original", {"refused: no blocks yet"})
    with monkeypatch.context() as m:
        m.setattr(manager.coordinator, "single_type_managers", (SimpleNamespace(),))
        assert reasons(manager, request) == ("original", {"refused: not full attention"})


def test_several_groups_take_the_original() -> None:
    manager = manager_of(24, window=8)
    assert len(manager.coordinator.single_type_managers) == 2
    answer, counted = reasons(manager, SimpleNamespace(request_id="r"))
    assert answer == "original" and counted == {"refused: several KV cache groups"}
