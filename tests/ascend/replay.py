"""A seeded serving history, played on the real NPUModelRunner: its own __init__, _update_states and _prepare_inputs.

The scheduler's side is made here: new requests, chunks of a prompt, decode with drafts of which some are rejected,
swaps and condensation (by what leaves the batch), preemption and resumption, finish. In between, what else writes the
device's buffers: metadata of padded batches, dummy runs. ``play`` returns every device buffer after every step; two plays
of one seed differ only by what is in force.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

MAX_REQS, MAX_TOKENS, MAX_LEN, DRAFTS = 8, 64, 480, 3
BLOCKS = (16, 48)  # two KV cache groups; the second one's kernel works on thirds of its blocks
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
}
BUFFERS = (
    "discard_request_indices",
    "discard_request_mask",
    "input_ids",
    "num_accepted_tokens",
    "num_decode_draft_tokens",
    "num_scheduled_tokens",
    "query_pos",
    "query_start_loc",
    "req_indices",
)


def make_config(*, speculation: bool, asynchronous: bool = False) -> Any:
    """A real VllmConfig of a tiny Qwen3, as vllm-ascend's platform leaves it."""
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
    from vllm_ascend import ascend_config

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        config = VllmConfig(
            model_config=ModelConfig(
                model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_LEN
            ),
            cache_config=CacheConfig(block_size=BLOCKS[0]),
            scheduler_config=SchedulerConfig(
                max_num_seqs=MAX_REQS,
                max_num_batched_tokens=MAX_TOKENS,
                max_model_len=MAX_LEN,
                is_encoder_decoder=False,
                async_scheduling=asynchronous,
            ),
        )
        if speculation:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=DRAFTS,
                prompt_lookup_max=2,
                prompt_lookup_min=1,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
            )
    config.additional_config = {}
    ascend_config.init_ascend_config(config)
    return config


def make_runner(*, speculation: bool, asynchronous: bool = False) -> Any:
    """The real runner, without its weights."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm_ascend.worker.block_table import MultiGroupBlockTable
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    config = make_config(speculation=speculation, asynchronous=asynchronous)
    with set_current_vllm_config(config):
        runner = NPUModelRunner(config, torch.device("npu:0"))
    runner.input_batch.block_table = MultiGroupBlockTable(
        max_num_reqs=MAX_REQS,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_TOKENS,
        pin_memory=True,
        device=torch.device("npu:0"),
        block_sizes=list(BLOCKS),
        num_speculative_tokens=runner.num_spec_tokens,
        kernel_sizes=[[BLOCKS[0]], [BLOCKS[0]]],
    )
    groups = [
        KVCacheGroupSpec(["layer"], FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=16, dtype=torch.bfloat16))
        for size in BLOCKS
    ]
    runner.kv_cache_config = KVCacheConfig(num_blocks=3000, kv_cache_tensors=[], kv_cache_groups=groups)
    runner.reorder_batch_threshold = 1 + runner.num_spec_tokens  # decodes first: rows are swapped
    return runner


class Request:
    def __init__(self, name: str, prompt: list[int]) -> None:
        self.name, self.prompt, self.output = name, prompt, []
        self.computed, self.blocks, self.drafts = 0, 0, []  # blocks: tokens that its blocks have room for
        self.known = False  # to the runner


class History:
    """One play: ``step`` makes a scheduler output, prepares it on the runner, and books its tokens."""

    def __init__(self, runner: Any, seed: int) -> None:
        self.runner, self.rng = runner, random.Random(seed)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.names = 0
        self.speculation = runner.num_spec_tokens > 0

    def _arrivals(self) -> None:
        rng = self.rng
        while len(self.running) < MAX_REQS and rng.random() < 0.25:
            if self.waiting and rng.random() < 0.6:
                self.running.append(self.waiting.pop())
                continue
            self.names += 1
            length = rng.choice((1, 3, 15, 16, 17, 40, 90))
            self.running.append(Request(f"request-{self.names}", [rng.randrange(256) for _ in range(length)]))

    def _departures(self) -> tuple[set[str], set[str]]:
        rng, finished, preempted = self.rng, set(), set()
        for request in list(self.running):
            tokens = len(request.prompt) + len(request.output)
            if request.known and (tokens > MAX_LEN - 20 or rng.random() < 0.03):
                self.running.remove(request)
                finished.add(request.name)
            elif request.known and rng.random() < 0.03:
                self.running.remove(request)
                request.computed, request.blocks, request.drafts = 0, 0, []
                self.waiting.append(request)
                preempted.add(request.name)
        return finished, preempted

    def step(self) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        rng, runner = self.rng, self.runner
        finished, preempted = self._departures()
        self._arrivals()
        if not self.running:
            self.running.append(Request(f"only-{rng.random()}", [1, 2, 3]))
        output = SchedulerOutput.make_empty()
        output.finished_req_ids, output.preempted_req_ids = finished, preempted
        cached = CachedRequestData.make_empty()
        budget = MAX_TOKENS
        for request in self.running:
            if budget < 1 + DRAFTS:
                break
            tokens = len(request.prompt) + len(request.output)
            left = tokens - request.computed
            chunk = min(left + len(request.drafts), budget, rng.choice((5, 16, 33, 64)) if left > 1 else 64)
            drafts = request.drafts[: max(chunk - left, 0)]
            had = request.blocks
            request.blocks = max(had, request.computed + chunk)
            new = tuple(
                [rng.randrange(1, 3000) for _ in range(-(-request.blocks // size) - -(-had // size))] for size in BLOCKS
            )
            if not request.known:
                output.scheduled_new_reqs.append(
                    NewRequestData(
                        req_id=request.name,
                        prompt_token_ids=request.prompt,
                        mm_features=[],
                        sampling_params=SamplingParams(temperature=0.0),
                        pooling_params=None,
                        block_ids=new,
                        num_computed_tokens=0,
                        lora_request=None,
                    )
                )
                request.known = True
            else:
                cached.req_ids.append(request.name)
                if had == 0:
                    cached.resumed_req_ids.add(request.name)
                    cached.all_token_ids[request.name] = request.prompt + request.output
                cached.new_block_ids.append(new if any(new) or had == 0 else None)
                cached.num_computed_tokens.append(request.computed)
                cached.num_output_tokens.append(len(request.output))
            output.num_scheduled_tokens[request.name] = chunk
            if drafts:
                output.scheduled_spec_decode_tokens[request.name] = drafts
            budget -= chunk
        output.scheduled_cached_reqs = cached
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())

        runner._update_states(output)
        scheduled = np.array([output.num_scheduled_tokens[name] for name in runner.input_batch.req_ids], dtype=np.int32)
        indices, spec, _ = runner._prepare_inputs(output, scheduled)
        seen = self.state()
        seen["return.indices"] = indices.clone()
        for name in ("draft_token_ids", "cu_num_draft_tokens", "cu_num_sampled_tokens"):
            if spec is not None:
                seen[f"return.{name}"] = getattr(spec, name).clone()
        if spec is not None:
            for name in ("target_logits_indices", "bonus_logits_indices", "logits_indices"):
                seen[f"return.{name}"] = getattr(spec, name).clone()
            seen["return.num_draft_tokens"] = list(spec.num_draft_tokens)
        self._metadata(output.total_num_scheduled_tokens)
        self._book(output)
        return seen

    def state(self) -> dict[str, Any]:
        runner = self.runner
        seen = {name: getattr(runner, name).gpu.clone() for name in BUFFERS}
        seen["positions"], seen["seq_lens"] = runner.positions.clone(), runner.seq_lens.clone()
        seen["num_computed_tokens"] = runner.num_computed_tokens.clone()
        for i, table in enumerate(runner.input_batch.block_table.block_tables):
            seen[f"slot_mapping.{i}"] = table.slot_mapping.gpu.clone()
            seen[f"block_table.{i}"] = table.block_table.gpu.clone()
        return seen

    def _metadata(self, tokens: int) -> None:
        """What building attention metadata of a padded batch writes to the device."""
        requests = self.runner.input_batch.num_reqs
        padded = min(requests + self.rng.randrange(3), MAX_REQS)
        for table in self.runner.input_batch.block_table.block_tables:
            table.slot_mapping.gpu[tokens : tokens + 8].fill_(-1)
            table.block_table.gpu[requests:padded].fill_(0)
        if self.rng.random() < 0.05:
            self.dummy_run()

    def dummy_run(self) -> None:
        """Through the class, where a patch may have wrapped it."""
        type(self.runner)._dummy_run(self.runner, MAX_TOKENS)

    def _book(self, output: Any) -> None:
        """Accept some of the drafts, sample one token more, propose new drafts."""
        rng, batch = self.rng, self.runner.input_batch
        for request in self.running:
            chunk = output.num_scheduled_tokens.get(request.name)
            if chunk is None:
                continue
            drafts = output.scheduled_spec_decode_tokens.get(request.name, [])
            tokens = len(request.prompt) + len(request.output)
            end = request.computed + chunk - len(drafts)
            request.drafts = []
            if end < tokens:  # a chunk of the prompt: nothing sampled
                request.computed = end
                continue
            accepted = rng.choice((0, 0, 1, len(drafts))) if drafts else 0
            accepted = min(accepted, len(drafts))
            new = [*drafts[:accepted], rng.randrange(256)]
            request.output += new
            request.computed = end + accepted
            row = batch.req_id_to_index[request.name]
            first = batch.num_tokens_no_spec[row]
            batch.token_ids_cpu[row, first : first + len(new)] = new
            batch.is_token_ids[row, first : first + len(new)] = True
            batch.num_tokens_no_spec[row] = first + len(new)
            self.runner.requests[request.name].output_token_ids.extend(new)
            if self.speculation and rng.random() < 0.9:
                request.drafts = [rng.randrange(256) for _ in range(rng.choice((1, DRAFTS, DRAFTS)))]


def dummy_run(runner: Any, num_tokens: int, *_: Any, **__: Any) -> None:
    """What a dummy run writes, without a model to run: host and device buffers of a full padded batch."""
    rows = np.full(MAX_REQS, num_tokens // MAX_REQS, dtype=np.int32)
    runner._get_cumsum_and_arange(rows, runner.query_pos.np)
    runner.optimistic_seq_lens_cpu[:MAX_REQS] = 8
    runner.seq_lens.copy_(runner.optimistic_seq_lens_cpu, non_blocking=True)
    runner.input_batch.block_table.commit_block_table(MAX_REQS)
    for table in runner.input_batch.block_table.block_tables:
        table.block_table.gpu[2:MAX_REQS].fill_(0)
        table.slot_mapping.gpu.fill_(-1)


def play(seed: int, steps: int, change: Any = None, **options: Any) -> list[dict[str, Any]]:
    """Every device buffer after every step of the history ``seed``. change: called with the runner at first."""
    runner = make_runner(**options)
    if change is not None:
        change(runner)
    history = History(runner, seed)
    return [history.step() for _ in range(steps)]


class FastSlotKernel:
    """What ``_compute_slot_mapping_kernel`` does without context parallelism, in one call instead of interpreted.

    ``test_the_fast_kernel_is_the_real_one`` compares both.
    """

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self.launch

    @staticmethod
    def launch(
        tokens: int, most: int, bounds: Any, positions: Any, table: Any, _: int, size: int, slots: Any, **options: Any
    ) -> None:
        import torch

        assert options["TOTAL_CP_WORLD_SIZE"] == 1
        rows = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff(), output_size=tokens)
        slots[:tokens] = table[rows, positions // size].long() * size + positions % size
        slots[tokens:most] = options["PAD_ID"]


def differences(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, int]:
    """Buffer -> in how many steps two plays differ in it (whole buffers, tails included)."""
    found: dict[str, int] = {}
    for one, other in zip(first, second, strict=True):
        for name in one.keys() | other.keys():
            value, against = one.get(name), other.get(name)
            if value is None or against is None:
                same = False
            else:
                same = value == against if isinstance(value, list) else value.equal(against)
            if not same:
                found[name] = found.get(name, 0) + 1
    return found
