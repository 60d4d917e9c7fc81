"""One small real engine on the V2 runner, driven step by step with seeded random histories. A pytest plugin.

Everything is real: scheduler, KV cache manager, runner, model, CPU attention; only Triton's kernels are interpreted.
Stock and patched histories start from one snapshot of every buffer, block pool and free list, so that they must agree in
every byte the model and the sampler can read, at every step.
"""

from __future__ import annotations

from tests.testbeds import v2_on_cpu  # noqa: F401 # isort: skip - before torch, Triton and vLLM

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from tests.testbeds import grammars

VOCAB = 512
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "eos_token_id": 1,
    "bos_token_id": 0,
}
GEMMA3 = QWEN3 | {  # full and sliding-window layers: two KV cache groups
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_local_base_freq": 10000,
    "tie_word_embeddings": True,
}


@dataclass
class Trace:
    """What a history produced. outputs: request -> what it got. steps: one digest a step of all that could be read.
    preemptions: how often a running request lost its blocks. masks: one entry a step with a grammar: its requests, the
    bitmask's rows, its digest, the digest of the logits under it. deferred: how many of them were sampled only after the tokens
    of the step before were in. grammars: request -> its grammar.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, str]] = field(default_factory=list)
    preemptions: int = 0
    masks: list[tuple[tuple[str, ...], int, str, str]] = field(default_factory=list)
    deferred: int = 0
    grammars: dict[str, dict[str, Any]] = field(default_factory=dict)


@contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Engines started inside schedule a step ahead of its tokens, as on a GPU by default; the CPU platform turns that off."""
    from vllm.platforms import current_platform

    kind = type(current_platform)
    original = vars(kind)["check_and_update_config"]

    def check(cls: Any, config: Any) -> None:
        original.__func__(cls, config)
        config.scheduler_config.async_scheduling = True

    kind.check_and_update_config = classmethod(check)
    try:
        yield
    finally:
        kind.check_and_update_config = original


class Engine:
    """The engine of one model, with the means to run a history from a known state."""

    def __init__(self, folder: Any, config: dict[str, Any], *, asynchronous: bool = False, **options: Any) -> None:
        import json

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        self.tokenizer = grammars.save_tokenizer(folder)
        settings = {
            "load_format": "dummy",
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
            "enforce_eager": True,
            "max_model_len": 160,
            "max_num_seqs": 4,  # fewer than the requests: whoever waits gets a freed slot in the very next step
            "max_num_batched_tokens": 64,
            "block_size": 32,
            "num_gpu_blocks_override": 7,  # six to use, fewer than four requests need: preemption
            "dtype": "float32",
            "seed": 0,
            "disable_log_stats": True,
        }
        with asynchronous_scheduling() if asynchronous else nullcontext():
            self.llm = LLM(str(folder), **settings | options)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        self._spread_weights()
        self.pad_to = 1
        self._pad_decode_batches()
        self._count_preemptions()
        self._note_masks()
        # Compiled in another thread, a grammar would be ready at a step that depends on the machine's load.
        self.core.structured_output_manager._use_async_grammar_compilation = False
        self.trace: Trace | None = None
        self.runner.model.register_forward_pre_hook(self._before_forward)
        self.snapshot = {name: value.clone() for name, value in self.tensors()}
        self.arrays = {name: value.copy() for name, value in self.host_arrays()}

    def _spread_weights(self) -> None:
        """Dummy weights make every token the same; larger random ones make them vary."""
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in self.runner.model.named_parameters():
                if parameter.dim() > 1:
                    scale = 1.0 if "embed" in name else 0.35
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    def _pad_decode_batches(self) -> None:
        """What CUDA graphs do to a decode batch: more tokens than requests, up to a multiple of ``pad_to``."""
        from vllm.v1.worker.gpu import model_runner

        original = model_runner.dispatch_cg_and_sync_dp

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            desc, sync = original(*args, **kwargs)
            if self.pad_to > 1 and self.trace is not None and desc.num_tokens == desc.num_reqs:
                padded = -(-desc.num_tokens // self.pad_to) * self.pad_to
                desc = replace(desc, num_tokens=padded, num_reqs=min(padded, self.runner.max_num_reqs))
            return desc, sync

        model_runner.dispatch_cg_and_sync_dp = dispatch

    def _count_preemptions(self) -> None:
        scheduler = self.core.scheduler
        original = scheduler._preempt_request

        def preempt(*args: Any, **kwargs: Any) -> Any:
            if self.trace is not None:
                self.trace.preemptions += 1
            return original(*args, **kwargs)

        scheduler._preempt_request = preempt

    def _note_masks(self) -> None:
        """What the runner's own worker for structured outputs was given, and the logits that it left."""
        worker = self.runner.structured_outputs_worker
        original = worker.apply_grammar_bitmask

        def apply(logits: torch.Tensor, batch: Any, names: list[str], bitmask: np.ndarray) -> None:
            original(logits, batch, names, bitmask)
            if self.trace is not None:
                self.trace.masks.append((tuple(map(external, names)), len(bitmask), _digest(bitmask), _digest(logits)))

        def bitmask_of(output: Any) -> Any:
            if self.trace is not None:
                self.trace.deferred += output.pending_structured_output_tokens
            return asked(output)

        asked = self.core.scheduler.get_grammar_bitmask
        worker.apply_grammar_bitmask, self.core.scheduler.get_grammar_bitmask = apply, bitmask_of

    # -- state

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every buffer of the runner by name, the pools behind host-backed tensors included."""
        runner = self.runner
        roots = {
            "input": runner.input_buffers,
            "tables": runner.block_tables,
            "requests": runner.req_states,
            "sampler": runner.sampler,
            "grammar": runner.structured_outputs_worker,
        }
        seen: set[int] = set()
        for name, root in roots.items():
            yield from _walk(name, root, torch.Tensor, seen)

    def host_arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        seen: set[int] = set()
        yield from _walk("requests", self.runner.req_states, np.ndarray, seen)
        yield from _walk("sampler", self.runner.sampler, np.ndarray, seen)
        yield from _walk("tables", self.runner.block_tables, np.ndarray, seen)

    def reset(self) -> None:
        """Back to the state after start: buffers, slots, block pool, caches, and nothing of an earlier patch."""
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

        runner, scheduler = self.runner, self.core.scheduler
        assert not self.engine.has_unfinished_requests()
        for _ in range(2):  # finished requests reach the runner with the next step
            self.engine.step()
        assert not runner.req_states.req_id_to_index or self._flush()
        with torch.inference_mode():
            for name, value in self.tensors():
                value.copy_(self.snapshot[name])
        for name, value in self.host_arrays():
            value[...] = self.arrays[name]
        seen: set[int] = set()
        for root in (runner.req_states, runner.sampler, runner.block_tables):
            for _, backed in _walk("", root, UvaBackedTensor, seen):
                for _ in range(backed.pool.max_concurrency):  # whichever buffer is the current one
                    backed.copy_to_uva()
        runner.req_states.free_indices = list(range(runner.max_num_reqs))
        scheduler.reset_prefix_cache()
        pool = scheduler.kv_cache_manager.block_pool
        for block in pool.blocks:
            block.prev_free_block = block.next_free_block = None
        pool.free_block_queue = FreeKVCacheBlockQueue(pool.blocks)
        assert pool.free_block_queue.popleft() is pool.null_block
        for owner in (runner, runner.sampler, runner.block_tables, *vars(runner.sampler).values()):
            for attribute in [a for a in getattr(owner, "__dict__", {}) if a.startswith("_overlay_")]:
                delattr(owner, attribute)
        torch.manual_seed(0)
        np.random.seed(0)

    def _flush(self) -> bool:
        """Tell the runner about requests that finished in the last step of a history."""
        from vllm.v1.core.sched.output import SchedulerOutput

        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(self.runner.req_states.req_id_to_index)
        self.runner.finish_requests(output)
        return True

    def _before_forward(self, module: Any, args: Any) -> None:
        if self.trace is not None:
            runner = self.runner
            parts = {
                "input": runner.input_buffers,
                "tables": [*runner.block_tables.input_block_tables, runner.block_tables.slot_mappings],
                "lengths": runner.block_tables.num_blocks,
                "requests": runner.req_states,
                "sampler": runner.sampler,
                "grammar": runner.structured_outputs_worker,
            }
            self.trace.steps.append({name: _digest(part) for name, part in parts.items()})

    # -- histories

    def run(self, seed: int, kind: str = "mixed", pad_to: int = 1) -> Trace:
        """One seeded history: arrivals over time, aborts, preemption where blocks run out, until all is done."""
        self.reset()
        self.trace, self.pad_to = Trace(), pad_to
        rnd = random.Random(seed)
        waiting = list(requests(rnd, kind))
        live: set[str] = set()
        aborted: set[str] = set()
        shared = [rnd.randrange(2, VOCAB) for _ in range(70)]
        try:
            step = 0
            while waiting or self.engine.has_unfinished_requests():
                while waiting and waiting[0][0] <= step:
                    _, name, length, prefix, params = waiting.pop(0)
                    tokens = shared[:prefix] + [rnd.randrange(2, VOCAB) for _ in range(length)]
                    self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
                    if params.structured_outputs is not None:
                        self.trace.grammars[name] = grammars.KINDS[int(params.extra_args["kind"])]
                    live.add(name)
                if live and rnd.random() < 0.03:
                    victim = rnd.choice(sorted(live))
                    self.engine.abort_request([victim])
                    live.discard(victim)
                    aborted.add(victim)
                if rnd.random() < 0.08:  # an idle data-parallel rank, a warm-up: writes the same buffers
                    self.runner._dummy_run(rnd.randint(1, 4), uniform_decode=True)
                for output in self.engine.step():
                    if output.finished:
                        live.discard(output.request_id)
                        self.trace.outputs[output.request_id] = [_seen(o) for o in output.outputs]
                step += 1
                assert step < 2000, "the history does not end"
            return self.trace
        finally:
            self.trace, self.pad_to = None, 1


PROCESSING: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 0.9, "min_p": 0.1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"frequency_penalty": 0.6, "temperature": 0.8},
    {"logit_bias": {7: 4.0, 11: -100.0}},
    {"allowed_token_ids": list(range(2, 200))},
    {"min_tokens": 5, "stop_token_ids": [3, 4, 5, 6, 7, 8, 9]},
    {"logprobs": 3},
    {"logprobs": 0, "prompt_logprobs": 1},
]


def external(name: str) -> str:
    """The name under which a request was submitted (the engine makes it unique with a random end)."""
    return name.partition("-")[0]


def requests(rnd: random.Random, kind: str) -> Iterator[tuple[int, str, int, int, SamplingParams]]:
    """(step of arrival, name, tokens of its own, tokens of the shared prefix, parameters)."""
    if kind.startswith("structured"):
        yield from structured_requests(rnd, kind)
        return
    at = 0
    for i in range(7):
        base: dict[str, Any] = {"max_tokens": rnd.randint(5, 40), "temperature": 0.0, "detokenize": False, "seed": i}
        base["ignore_eos"] = rnd.random() < 0.8
        if kind != "greedy" and (kind == "processed" or rnd.random() < 0.4):
            base |= rnd.choice([p for p in PROCESSING if kind != "speculative" or not {"min_p", "logit_bias"} & set(p)])
        params = SamplingParams(**base)
        if kind != "greedy" and rnd.random() < 0.15:
            params._bad_words_token_ids = [[rnd.randrange(VOCAB)], [rnd.randrange(VOCAB), rnd.randrange(VOCAB)]]
        yield at, f"r{i}", rnd.randint(1, 60), rnd.choice([0, 0, 40, 70]), params
        at += rnd.choice([0, 0, 0, 2, 6])


def structured_requests(rnd: random.Random, kind: str) -> Iterator[tuple[int, str, int, int, SamplingParams]]:
    """As ``requests``: one request under each kind of grammar, the others without, and the last without for a while.

    "structured greedy" is all greedy; otherwise some sample, are penalised or want logprobs, with and without a grammar.
    """
    at = 0
    processing = [{"temperature": 0.8}, {"logprobs": 3}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.6}]
    short = kind == "structured speculative"  # its steps are slow: a rejection sampler of many kernels
    for i, which in enumerate((0, 1, None, 2) if short else (0, None, 1, 2, None, 3, None)):
        base: dict[str, Any] = {"max_tokens": rnd.randint(12, 36) // (1 + short), "temperature": 0.0, "detokenize": False}
        base["seed"] = i
        if kind != "structured greedy" and rnd.random() < 0.5:
            base |= rnd.choice(processing)
        if which is None:
            params = SamplingParams(**base, ignore_eos=True)
        else:
            grammar = StructuredOutputsParams(**grammars.KINDS[which])
            params = SamplingParams(**base, structured_outputs=grammar, extra_args={"kind": which})
        yield at, f"r{i}", rnd.randint(1, 40), rnd.choice([0, 0, 40]), params
        at += rnd.choice([0, 0, 2, 6])


def _seen(output: Any) -> Any:
    logprobs = None
    if output.logprobs is not None:
        logprobs = [{token: (lp.logprob, lp.rank) for token, lp in position.items()} for position in output.logprobs]
    return list(output.token_ids), logprobs, output.finish_reason


def _walk(name: str, value: Any, kind: type, seen: set[int], depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, kind):
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _walk(f"{name}.{i}", item, kind, seen, depth)
    elif _is_state(value) and depth < 5 and id(value) not in seen:
        seen.add(id(value))
        for key, item in vars(value).items():
            if not key.startswith("_overlay_"):
                yield from _walk(f"{name}.{key}", item, kind, seen, depth + 1)


def _is_state(value: Any) -> bool:
    return hasattr(value, "__dict__") and type(value).__module__.startswith("vllm.v1.worker")


def _digest(part: Any) -> str:
    """Of what the device would read: for a host-backed tensor its view, not the host's copy nor the spare buffers."""
    digest = hashlib.blake2b(digest_size=8)

    def feed(value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(value.contiguous().numpy().tobytes())
        elif isinstance(value, np.ndarray):
            digest.update(value.tobytes())
        elif isinstance(value, (list, tuple)):
            for item in value:
                feed(item, depth)
        elif hasattr(value, "gpu") and hasattr(value, "pool"):
            feed(value.gpu)
        elif _is_state(value) and depth < 4:
            for key, item in sorted(vars(value).items()):
                if not key.startswith("_overlay_") and not key.startswith("write_"):
                    feed(item, depth + 1)

    feed(part)
    return digest.hexdigest()


def assert_equal(stock: Trace, patched: Trace) -> None:
    """Every output equal, and at every step every byte that could be read."""
    assert len(stock.steps) == len(patched.steps), "another number of steps"
    for i, (one, other) in enumerate(zip(stock.steps, patched.steps, strict=True)):
        assert one == other, f"step {i}: {[name for name in one if one[name] != other[name]]} differ"
    assert stock.outputs == patched.outputs
    assert stock.preemptions == patched.preemptions
    assert stock.masks == patched.masks


_engines: dict[str, Engine] = {}


def engine_of(name: str, factory: pytest.TempPathFactory) -> Engine:
    """The engine of that name, started once for all cases."""
    if name not in _engines:
        folder = factory.getbasetemp() / f"model-{name}"
        if name == "one-group":
            _engines[name] = Engine(folder, QWEN3)
        elif name == "asynchronous":
            _engines[name] = Engine(folder, QWEN3, asynchronous=True)
        elif name == "two-groups":
            _engines[name] = Engine(folder, GEMMA3, num_gpu_blocks_override=40)
        elif name == "speculating":
            ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
            _engines[name] = Engine(folder, QWEN3, speculative_config=ngram)
        else:
            raise KeyError(name)
    return _engines[name]


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_of("one-group", tmp_path_factory)


@pytest.fixture(scope="session")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_of("asynchronous", tmp_path_factory)


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_of("two-groups", tmp_path_factory)


@pytest.fixture(scope="session")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_of("speculating", tmp_path_factory)


_stock: dict[tuple[int, str, int, int], Trace] = {}


def stock_run(engine: Engine, seed: int, kind: str, pad_to: int = 1) -> Trace:
    """The unpatched history, run once for all patches."""
    key = (id(engine), seed, kind, pad_to)
    if key not in _stock:
        _stock[key] = engine.run(seed, kind, pad_to)
    return _stock[key]


@contextmanager
def counted(counters: Any) -> Iterator[dict[str, int]]:
    """What a patch counted inside the block (filled in at its end)."""
    before = counters.all()
    found: dict[str, int] = {}
    yield found
    found.update({k: v - before.get(k, 0) for k, v in counters.all().items() if v != before.get(k, 0)})
