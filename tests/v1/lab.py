"""A real V1 ``GPUModelRunner`` and a real ``AsyncScheduler`` of one vLLM release, on the CPU and without a model.

The runner's "device" buffers are CPU tensors of their own, so that a copy to the device is a copy. Each step does what
``execute_model`` and ``sample_tokens`` do around the model: schedule, ``_update_states``, ``_prepare_inputs``, tokens
drawn from a seeded generator in place of the model's, ``_bookkeeping_sync`` as asynchronous scheduling has it (the tokens
stay on the device as ``prev_sampled_token_ids``), and the scheduler hears of them one step late.

Runs in a process of its own (see ``releases.py``): ``prepare`` must come before vLLM is imported.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

MAX_REQS = 8
MAX_LEN = 256
MAX_TOKENS = 64  # of a step: prompts longer than this come in chunks
BLOCKS = 96


def prepare(root: str | None, version: str) -> None:
    """Make ``import vllm`` find the release under ``root`` as a CPU build with Triton's interpreter.

    A folder with a dist-info that says ``+cpu`` goes on the path: vLLM takes its platform from its version.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a sampler helper is compiled, for which there is no need here
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends.setdefault("cpu", type("Backend", (), {"driver": Driver, "compiler": None}))
    folder = Path(tempfile.mkdtemp(prefix="vllm-dist-"))
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    if root is not None:
        sys.path.insert(0, root)
    sys.path.insert(0, str(folder))
    import vllm.utils.torch_utils

    vllm.utils.torch_utils.PIN_MEMORY = False  # 0.23.0 asks no platform and pins wherever it is not WSL


def make_checkpoint(folder: Path, mrope: bool = False) -> str:
    """A model folder that holds nothing but a small configuration."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if mrope:
        section = {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        config["rope_scaling"] = section
        config["rope_parameters"] = section
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def known(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that this release's ``function`` takes."""
    return {name: value for name, value in values.items() if name in inspect.signature(function).parameters}


def make_config(checkpoint: str) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    model = ModelConfig(
        model=checkpoint,
        tokenizer=checkpoint,
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        dtype="float32",
        enforce_eager=True,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=MAX_REQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
    )
    cache = CacheConfig(block_size=16, enable_prefix_caching=True)
    config = VllmConfig(model_config=model, scheduler_config=scheduler, cache_config=cache, device_config=DeviceConfig("cpu"))
    cache.num_gpu_blocks = BLOCKS
    return config


def make_kv_cache_config(groups: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
    full = FullAttentionSpec(**shape)
    window = SlidingWindowSpec(**shape, sliding_window=48)
    specs = [KVCacheGroupSpec(["layer.0"], full), KVCacheGroupSpec(["layer.1"], window)][:groups]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=specs)


def init_distributed() -> None:
    from vllm.distributed import parallel_state

    with tempfile.NamedTemporaryFile(delete=False) as file:
        parallel_state.init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
    parallel_state.ensure_model_parallel_initialized(1, 1)


class Lab:
    """One runner and one scheduler under one seed."""

    preemptions = 0  # of all labs of this process

    def __init__(self, seed: int, groups: int = 2, mrope: bool = False) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.v1.worker.cpu_model_runner import _torch_cuda_wrapper
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self.random = random.Random(seed)
        self.config = make_config(make_checkpoint(Path(tempfile.mkdtemp()) / "model", mrope))
        self.context = set_current_vllm_config(self.config)
        self.context.__enter__()
        if not torch.distributed.is_initialized():
            init_distributed()
        self.kv_cache_config = make_kv_cache_config(groups)
        # what vLLM's own CPU runner leaves out: the device's properties (early releases ask for them), streams, events
        asked = vars(GPUModelRunner).get("_init_device_properties")
        if asked is not None:
            GPUModelRunner._init_device_properties = lambda runner: None
        try:
            with _torch_cuda_wrapper():
                self.runner = GPUModelRunner(self.config, torch.device("cpu"))
        finally:
            if asked is not None:
                GPUModelRunner._init_device_properties = asked
        self.runner.use_async_scheduling = True
        self.runner.kv_cache_config = self.kv_cache_config
        self._make_batch(groups)
        if mrope:  # the model computes these, and there is none
            self.runner._init_mrope_positions = self._mrope_positions
        self.scheduler = self._make_scheduler()
        self._count_preemptions()
        self.names = 0
        self.pending: list[tuple[Any, Any]] = []  # steps whose tokens the scheduler has not heard of
        self.running: set[str] = set()

    def _count_preemptions(self) -> None:
        original = self.scheduler._preempt_request

        def preempt(*args: Any, **kwargs: Any) -> Any:
            Lab.preemptions += 1
            return original(*args, **kwargs)

        self.scheduler._preempt_request = preempt

    def _make_batch(self, groups: int) -> None:
        """The runner's ``InputBatch`` for these groups, as ``may_reinitialize_input_batch`` makes it."""
        from vllm.v1.worker.gpu_input_batch import InputBatch

        old = self.runner.input_batch
        values = {
            "max_num_reqs": MAX_REQS,
            "max_model_len": MAX_LEN,
            "max_num_batched_tokens": MAX_TOKENS,
            "device": self.runner.device,
            "pin_memory": False,
            "vocab_size": 512,
            "block_sizes": [16] * groups,
            "kernel_block_sizes": [16, 8][:groups],
            "max_num_blocks_per_req": [MAX_LEN // 16 + 1] * groups,
            "logitsprocs": old.logitsprocs,
        }
        self.runner.input_batch = InputBatch(**known(InputBatch.__init__, values))

    def _mrope_positions(self, request: Any) -> None:
        import torch

        length = request.num_prompt_tokens
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        request.mrope_positions = torch.randint(0, length, (3, length), dtype=torch.int64, generator=generator)
        request.mrope_position_delta = self.random.randrange(-min(length, 9), 1)

    def _make_scheduler(self) -> Any:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self.config.scheduler_config.async_scheduling = True
        values = {
            "vllm_config": self.config,
            "kv_cache_config": self.kv_cache_config,
            "structured_output_manager": StructuredOutputManager(self.config),
            "block_size": 16,
            "hash_block_size": 16,
            "log_stats": False,
        }
        return AsyncScheduler(**known(Scheduler.__init__, values))

    def add(self, length: int | None = None, tokens: int | None = None, **params: Any) -> str:
        """Submit a request: ``length`` prompt tokens, at most ``tokens`` to generate."""
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        if not self.names:
            init_none_hash(sha256)
        self.names += 1
        name = f"request-{self.names}"
        length = length or self.random.choice((1, 5, 15, 16, 17, 40, 100, 150))
        # few different first blocks, so that later requests hit the prefix cache
        start = self.random.randrange(3)
        prompt = [3 + (start + i // 16) % 7 for i in range(min(length, 32))]
        prompt += [self.random.randrange(3, 512) for _ in range(length - len(prompt))]
        params.setdefault("temperature", 0.0)
        values = {
            "request_id": name,
            "prompt_token_ids": prompt,
            "sampling_params": SamplingParams(
                max_tokens=tokens or self.random.choice((1, 2, 20, 60)), ignore_eos=True, **params
            ),
            "pooling_params": None,
            "eos_token_id": 2,
            "block_hasher": get_request_block_hasher(16, sha256),
        }
        self.scheduler.add_request(Request(**known(Request.__init__, values)))
        self.running.add(name)
        return name

    def schedule(self) -> tuple[Any, Any]:
        """The next ``SchedulerOutput`` with the runner's states updated, and its tokens per request (int32 array)."""
        import numpy as np

        output = self.scheduler.schedule()
        runner = self.runner
        later = runner._update_states(output)
        if later is not None:
            later()
        tokens = [output.num_scheduled_tokens[name] for name in runner.input_batch.req_ids]
        return output, np.array(tokens, dtype=np.int32)

    def draw(self, output: Any) -> Any:
        """The tokens of this step: int32 [requests, 1]."""
        import torch

        number = self.runner.input_batch.num_reqs
        return torch.tensor([[self.random.randrange(3, 512)] for _ in range(number)], dtype=torch.int32)

    def sample(self, output: Any) -> None:
        """Draw a token per request, leave them on the device, and tell the scheduler of the step before."""
        import torch
        from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput

        runner = self.runner
        number = runner.input_batch.num_reqs
        drawn = self.draw(output)
        runner.input_batch.prev_sampled_token_ids = None
        names = list(runner.input_batch.req_ids)
        discarded = runner.discard_request_mask.np[:number].copy()
        values = {
            "scheduler_output": output,
            "sampler_output": SamplerOutput(sampled_token_ids=drawn, logprobs_tensors=None),
            "logits": None,
            "hidden_states": torch.zeros(output.total_num_scheduled_tokens, 4),
            "num_scheduled_tokens": output.total_num_scheduled_tokens,
            "spec_decode_metadata": None,
        }
        runner._bookkeeping_sync(**known(runner._bookkeeping_sync, values))
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[] if discarded[i] else [int(drawn[i, 0])] for i in range(number)],
        )
        self.pending.append((output, result))
        if len(self.pending) > 1:
            self.tell()

    def tell(self) -> None:
        output, result = self.pending.pop(0)
        self.scheduler.update_from_output(output, result)
        self.running = {name for name in self.running if name in self.scheduler.requests}

    def abort(self) -> None:
        from vllm.v1.request import RequestStatus

        if self.running:
            name = self.random.choice(sorted(self.running))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.running.discard(name)

    def churn(self) -> None:
        """New requests and aborts, now and then."""
        pick = self.random.random()
        if pick < 0.08 or not self.running:
            for _ in range(self.random.choice((1, 1, 3))):
                self.add()
        elif pick < 0.10:
            self.abort()

    def step(self, churn: bool = True) -> Any | None:
        """One whole step; what ``_prepare_inputs`` returned, or None where nothing was scheduled."""
        if churn:
            self.churn()
        output, tokens = self.schedule()
        if not output.total_num_scheduled_tokens:
            if self.pending:
                self.tell()
            return None
        returned = self.runner._prepare_inputs(output, tokens)
        self.sample(output)
        return returned
