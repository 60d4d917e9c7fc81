"""All input buffers of a pure decode step of the V2 runner in one launch.

For a step in which every request decodes one token and nothing is drafted, ``GPUModelRunner.prepare_inputs`` and
``prepare_attn`` issue two copies and seven to ten small kernels. Everything they write follows from what the device
holds already: number of computed tokens, last sampled token, block tables. One kernel writes all of it: token ids,
positions, sequence lengths, ``query_start_loc``, padding marks, the gathered block tables and the slot mapping of every
KV cache group, each with its tail.

Nothing that another writer could have touched is trusted: the kernel writes every entry that the original writes, every
step. Only four small tensors are kept between steps, which nobody but this patch holds and nobody writes: the batch's
``idx_mapping`` (compared by content) and three constants of the number of requests. So there is no staleness rule, and
dummy runs, capture and profile need none.

Positions come from the device's own count of computed tokens, as in the original: the host's copy is never used for them.

Where ``sample`` then picks the rows of the last tokens, they are the first rows: a view in place of an index kernel.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters, options
from overlay.spec import Condition, Exactness, Kind, Option, Patch, Target
from patches._lib.step_graphs import StepGraphs
from patches._lib.v2_decode_state import STATE, State
from patches._lib.v2_fingerprints import seen

_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_TABLES = "vllm.v1.worker.gpu.block_table:BlockTables"
_BATCH = "vllm.v1.worker.gpu.input_batch"

PATCH = Patch(
    id="decode-input-prep-v2",
    kind=Kind.CODE,
    summary="V2 runner: the input buffers of a pure decode step in one launch",
    why=(
        "A decode step of one token a request issues 9 to 12 small device operations before the model: two copies, "
        "fills, and four Triton kernels, each about 10 us of host time and 2 us of device time in series. "
        "prepare_inputs took 474 to 665 us a step on the host of an H200 (vLLM 0.26.0, Qwen3-0.6B, batch 1 and 8)."
    ),
    remove_when="vLLM's V2 runner prepares a decode step with one kernel itself",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at=f"{_RUNNER}.prepare_inputs",
            use="prepare_inputs",
            fingerprints=seen("d291ee8557c27d74 841f27f28a5ad693 63d23b5a26f58b08 3967550f7427922e 8181bb62c70d2ee4"),
        ),
        Target(
            at=f"{_RUNNER}.sample",
            use="sample",
            fingerprints=seen("29931dd63ee7b381 edbb074d0561ac37 = 8aa62d77bd2a7373 ="),
        ),
        Target(
            at=f"{_TABLES}.gather_block_tables",
            use="gather_block_tables",
            fingerprints=seen("1f34ba57d38570a1 1bf4c20e00c6549f 12824dfdb4140809 = e3b162269adc52fc"),
        ),
        Target(
            at=f"{_TABLES}.compute_slot_mappings",
            use="compute_slot_mappings",
            fingerprints=seen("50df631c24920d75 7d3c7c6d997caf30 9b2c9c5dc1188239 917962531bcb967e ="),
        ),
    ),
    assumes=(
        Target(
            at=f"{_RUNNER}.execute_model",
            fingerprints=seen("46c46f7601916519 62b6f3e551aa7e58 85f40ff032539f3d abad0b583aef94d3 0fcd46fee104f02b"),
        ),
        Target(
            at=f"{_RUNNER}.prepare_attn",
            fingerprints=seen("136370c58ce3451f b099ddcc5d882bb2 = = c5ab3d35f17c81fd"),
        ),
        Target(
            at=f"{_RUNNER}.gather_batch_req_state",
            fingerprints=seen("- - 0c993075533f44dc 63ea526101586228 ="),
            versions=">=0.28.0",
        ),
        Target(
            at=f"{_BATCH}:InputBatch",
            fingerprints=seen("1226886041f625b2 2b024b92cef668fc cc58a7406ced22ab 5b53f4f8f29c272f 2ab4a5d5e8bfed5b"),
        ),
        Target(at=f"{_BATCH}:InputBuffers", fingerprints=seen("27443c859778f242 f85c242be6fc834c = = =")),
        Target(at=f"{_BATCH}:_prepare_pos_seq_lens_kernel", fingerprints=seen("7ec1187eae6ecf8c = = = =")),
        Target(
            at=f"{_BATCH}:_combine_sampled_and_draft_tokens_kernel",
            fingerprints=seen("42bbf66408ee7098 626a38e4c43987fd = = ="),
        ),
        Target(
            at="vllm.v1.worker.gpu.block_table:_gather_block_tables_kernel",
            fingerprints=seen("539c4e59543f11e6 = = = ad4c2077b431570f"),
        ),
        Target(
            at="vllm.v1.worker.gpu.block_table:_compute_slot_mappings_kernel",
            fingerprints=seen("eb8f638255f8a19e = = 8ab8be0f8cea7f52 ="),
        ),
    ),
    condition=Condition(
        vllm=">=0.23.0,<0.34",
        runner="V2",
        platforms=("cuda", "rocm", "dcu"),
        facts={
            "serving.num_speculative_tokens": 0,
            "serving.pipeline_parallel": 1,
            "serving.decode_context_parallel": 1,
            "serving.prefill_context_parallel": 1,
            "model.encoder_decoder": False,
        },
    ),
    options={"shadow": Option(False, "run the original too, and stop at the first difference (slow: for testing)")},
    live=("model_runner", "model_runner.block_tables"),
    tests="tests/v2/cases/case_decode_prep.py",
    measured="ab_runs/results/host/h200_qwen3_0.6b.yaml",
)

count = Counters(PATCH.id)


def state_of(runner: Any) -> State:
    state = runner.__dict__.get(STATE)
    if state is None or not state.fits(runner):
        state = runner.__dict__[STATE] = State(runner, StepGraphs(count, limit=256))
    return state


def prepared(runner: Any, batch: Any) -> State | None:
    """The state behind ``batch`` if the kernel prepared it, as the last one of ``runner``."""
    state = runner.__dict__.get(STATE)
    return state if state is not None and state.batch is not None and state.batch is batch else None


def prepare_inputs(wrapped: Any, runner: Any, args: tuple, kwargs: dict) -> Any:
    state = state_of(runner)
    state.batch = None
    runner.block_tables.__dict__[STATE] = None
    scheduled = args[0] if args else kwargs["scheduler_output"]
    reason = _refusal(runner, scheduled)
    if reason is None:
        batch_state = next((a for a in args if type(a).__name__ == "BatchReqState"), kwargs.get("batch_req_state"))
        desc = next((a for a in args if type(a).__name__ == "BatchExecutionDescriptor"), kwargs.get("batch_desc"))
        batch = _prepare(runner, state, scheduled, batch_state, desc)
        if batch is not None:
            count.hit()
            if options(PATCH.id).get("shadow"):
                _shadow(runner, batch, wrapped, args, kwargs)
            state.batch = batch
            return batch
        reason = "prefill in the batch"
    count.refuse(reason)
    return wrapped(*args, **kwargs)


def _refusal(runner: Any, scheduled: Any) -> str | None:
    """Why this step takes the original, as far as it shows without looking at each request."""
    if scheduled.total_num_scheduled_tokens != len(scheduled.num_scheduled_tokens):
        return "more than one token a request"
    if scheduled.scheduled_spec_decode_tokens:
        return "draft tokens"
    if scheduled.scheduled_new_reqs:
        return "new request"
    if runner.speculator is not None or runner.num_speculative_steps:
        return "speculation configured"
    if runner.use_pp:
        return "pipeline parallelism"
    if getattr(runner, "pcp_manager", None) is not None:
        return "prefill context parallelism"
    tables = runner.block_tables
    if tables.cp_size != 1:
        return "decode context parallelism"
    if not tables.num_kv_cache_groups:
        return "no KV cache"
    if getattr(tables, "has_sliding_window_groups", False):
        return "sliding window masked block tables"
    if runner.is_encoder_decoder:
        return "encoder-decoder"
    if getattr(runner.model_state, "num_new_sampled_tokens_per_step", 1) != 1:
        return "more than one token sampled a step"
    if getattr(runner, "fast_prefill", None) is not None:
        return "fast prefill"
    if getattr(runner, "ubatch_runner", None) is not None:
        return "microbatches"
    if getattr(runner.model_config, "rswa_window", None) is not None:
        return "R-SWA"
    return None


def _prepare(runner: Any, state: State, scheduled: Any, given: Any, desc: Any) -> Any:
    """The batch of a pure decode step with its buffers written, or None where a request is still in its prompt.

    given: ``BatchReqState`` (0.28 on); earlier releases gather the same from the request states here.
    """
    import numpy as np
    import torch
    from vllm.v1.worker.gpu import model_runner as module

    requests = runner.req_states
    n = len(scheduled.num_scheduled_tokens)
    if given is not None:
        if given.has_prefill:
            return None
        req_ids, idx_np, ones = given.req_ids, given.idx_mapping_np, given.num_scheduled_tokens
        prefill_len, computed_prefill = given.prefill_len_np, given.num_computed_prefill_tokens_np
        is_prefilling = given.is_prefilling_np
    else:
        # One token each: both of the original's sort keys are equal for all, and the sort is stable.
        req_ids = list(scheduled.num_scheduled_tokens)
        idx_np = np.fromiter(map(requests.req_id_to_index.__getitem__, req_ids), dtype=np.int32, count=n)
        prefill_len = requests.prefill_len.np[idx_np]
        computed_prefill = requests.num_computed_prefill_tokens[idx_np]
        is_prefilling = computed_prefill < prefill_len
        if is_prefilling.any():
            return None
        ones = np.ones(n, dtype=np.int32)

    state.hold(runner, idx_np, module)
    constants = state.constants.get(n)
    if constants is None:
        constants = state.constants[n] = (
            torch.arange(n + 1, device=runner.device, dtype=torch.int32),  # cu_num_logits
            torch.zeros(n, dtype=torch.int32, device=runner.device),  # expanded_local_pos
            torch.arange(n, device=runner.device, dtype=torch.int64),  # logits_indices
        )

    tokens = max(n, desc.num_tokens)
    rows = desc.num_reqs or n
    marks_padding = hasattr(runner.input_buffers, "is_padding") and bool(module.envs.VLLM_MOE_SKIP_PADDING)
    state.launch(n, rows, tokens, marks_padding)

    if state.counting is None:
        state.counting = np.arange(runner.max_num_reqs + 1, dtype=np.int32)
    starts = state.counting[: rows + 1].copy()
    starts[n + 1 :] = n
    computed = requests.num_computed_tokens_np[idx_np]
    upper = np.zeros(rows, dtype=np.int32)
    np.add(computed, ones, out=upper[:n])
    views = state.views_of(rows, tokens)
    values = {
        "req_ids": req_ids,
        "num_reqs": n,
        "num_reqs_after_padding": rows,
        "idx_mapping": state.idx_mapping,
        "idx_mapping_np": idx_np,
        "expanded_idx_mapping": state.idx_mapping,
        "expanded_local_pos": constants[1],
        "num_scheduled_tokens": ones,
        "num_tokens": n,
        "num_tokens_after_padding": tokens,
        "num_draft_tokens": 0,
        "num_draft_tokens_per_req": None,
        "query_start_loc": views["query_start_loc"],
        "query_start_loc_np": starts,
        "seq_lens": views["seq_lens"],
        "seq_lens_cpu_upper_bound": torch.from_numpy(upper),
        "dcp_local_seq_lens": None,
        "num_computed_tokens_np": computed,
        "prefill_len_np": prefill_len,
        "num_computed_prefill_tokens_np": computed_prefill,
        "is_prefilling_np": is_prefilling,
        "max_seq_len_np": None,
        "input_ids": views["input_ids"],
        "positions": views["positions"],
        "logits_indices": constants[2],
        "cu_num_logits": constants[0],
        "cu_num_logits_np": state.counting[: n + 1].copy(),
        "has_structured_output_reqs": scheduled.has_structured_output_requests,
    }
    fields = module.InputBatch.__dataclass_fields__
    if "is_padding" in fields:
        values.update(is_padding=views["is_padding"], prompt_lens=None)
    if given is not None:
        values.update(has_prefill=False, max_query_len=None)
        for name in ("prefill_runs_as_decode_np", "decode_graph_eligible"):
            if name in fields:
                values[name] = getattr(given, name)
    runner.block_tables.__dict__[STATE] = state
    state.pending = (state.idx_mapping, rows, tokens, views)
    return module.InputBatch(**values)


def _pending(tables: Any, idx_mapping: Any, size: int, which: int) -> bool:
    """Whether the kernel has just written what is asked for: the same batch object, padded to the same ``size``."""
    state = tables.__dict__.get(STATE)
    return state is not None and state.pending is not None and state.pending[0] is idx_mapping and state.pending[which] == size


def gather_block_tables(wrapped: Any, tables: Any, args: tuple, kwargs: dict) -> Any:
    idx_mapping = args[0] if args else kwargs.get("idx_mapping")
    rows = args[1] if len(args) > 1 else kwargs.get("num_reqs_padded")
    if len(args) <= 2 and kwargs.get("out") is None and _pending(tables, idx_mapping, rows, 1):
        return tables.__dict__[STATE].pending[3]["block_tables"]
    return wrapped(*args, **kwargs)


def compute_slot_mappings(wrapped: Any, tables: Any, args: tuple, kwargs: dict) -> Any:
    idx_mapping = args[0] if args else kwargs.get("idx_mapping")
    tokens = args[3] if len(args) > 3 else kwargs.get("num_tokens_padded")
    if len(args) <= 4 and kwargs.get("out") is None and _pending(tables, idx_mapping, tokens, 2):
        views = tables.__dict__[STATE].pending[3]
        tables.__dict__[STATE] = None  # asked for once a step, after the gather
        return views["slot_mappings"]
    return wrapped(*args, **kwargs)


class _FirstRows:
    """Stands for the hidden states in ``sample``: whatever picks the logits rows gets the first rows, as a view."""

    def __init__(self, hidden_states: Any, rows: int) -> None:
        self.rows = hidden_states[:rows]

    def __getitem__(self, indices: Any) -> Any:
        return self.rows


def sample(wrapped: Any, runner: Any, args: tuple, kwargs: dict) -> Any:
    batch = args[1] if len(args) == 3 else None
    if prepared(runner, batch) is None or getattr(runner, "batch_sharder", None) is not None:
        return wrapped(*args, **kwargs)
    return wrapped(_FirstRows(args[0], batch.num_reqs), *args[1:])


def _shadow(runner: Any, batch: Any, wrapped: Any, args: tuple, kwargs: dict) -> None:
    """Run the original on the same state and compare every value that the model or the sampler can read.

    Raises AssertionError naming the first difference. The original leaves the same buffers, so the step goes on.
    """
    import numpy as np
    import torch

    buffers, tables = runner.input_buffers, runner.block_tables

    def seen() -> dict[str, Any]:
        names = ("input_ids", "positions", "seq_lens", "query_start_loc", "is_padding")
        found = {name: getattr(buffers, name) for name in names if hasattr(buffers, name)}
        found["slot_mappings"] = tables.slot_mappings
        found.update({f"block_table.{i}": table for i, table in enumerate(tables.input_block_tables)})
        return {name: value.clone() for name, value in found.items()}

    mine = seen()
    pending, tables.__dict__[STATE] = tables.__dict__[STATE], None
    lengths = tables.num_blocks.np
    # Spoil what the kernel wrote, so that the comparison sees the original's own values.
    for value in (tables.slot_mappings, buffers.positions[: batch.num_reqs], buffers.seq_lens, buffers.query_start_loc):
        value.fill_(-7)
    for group, table in enumerate(tables.input_block_tables):
        for row, slot in enumerate(batch.idx_mapping_np):
            table[row, : lengths[group, slot]] = -7
    original = wrapped(*args, **kwargs)
    tables.gather_block_tables(original.idx_mapping, num_reqs_padded=original.num_reqs_after_padding)
    tables.compute_slot_mappings(
        original.idx_mapping,
        original.query_start_loc,
        original.positions,
        num_tokens_padded=original.num_tokens_after_padding,
    )
    tables.__dict__[STATE] = pending
    theirs = seen()
    for name, value in mine.items():
        expected = theirs[name]
        if name.startswith("block_table."):
            group = int(name.rpartition(".")[2])
            for row, slot in enumerate(original.idx_mapping_np):
                used = lengths[group, slot]
                assert torch.equal(value[row, :used], expected[row, :used]), f"{PATCH.id}: {name} row {row}"
            value, expected = value[original.num_reqs :], expected[original.num_reqs :]
        elif name in ("input_ids", "positions"):
            value, expected = value[: original.num_tokens], expected[: original.num_tokens]
        assert torch.equal(value, expected), f"{PATCH.id}: {name} differs from the original"
    for name in type(original).__dataclass_fields__:
        value, expected = getattr(batch, name), getattr(original, name)
        if isinstance(expected, torch.Tensor):
            same = value.dtype == expected.dtype and torch.equal(value, expected)
        elif isinstance(expected, np.ndarray):
            same = value.dtype == expected.dtype and np.array_equal(value, expected)
        else:
            same = value == expected
        assert same, f"{PATCH.id}: InputBatch.{name} is {value}, the original's {expected}"
    count.add("shadow: equal")
