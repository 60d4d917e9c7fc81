"""The V1 runner's input preparation alone, original and patched in turns, every integer compared.

    python ab_runs/gpu/v1_component.py --out FILE [--position 24576] [--max-model-len 32768] [--max-num-seqs 128]

A real ``GPUModelRunner`` without a model is put into steady decode of N requests under asynchronous scheduling (the
tokens of the step before on the device) and ``_prepare_inputs`` is called step by step: A B A, where A is the original and
B has decode-input-prep, block-table-dirty and unchanged-copies. Two clocks: the host's time of the call, and the time until
the device has finished. A shadow run beforehand compares every integer with the original's. The greedy argmax on bf16 and
fp16 rows is compared with the one on float32 as well (ties, infinities and NaN among them).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

PATCHES = ("block-table-dirty", "unchanged-copies", "decode-input-prep")
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


class Applied:
    """Patches in force inside a ``with``, by their real specifications."""

    def __init__(self, **options: dict[str, Any]) -> None:
        self.options = {name.replace("_", "-"): values for name, values in options.items()}

    def __enter__(self) -> Applied:
        import vllm

        from overlay.apply import apply_entry
        from overlay.catalog import load_catalog

        version, catalog = vllm.__version__.partition("+")[0], load_catalog()
        self.applications = []
        for name in PATCHES:
            self.applications.append(apply_entry(catalog[name], version, self.options.get(name)))
        return self

    def __exit__(self, *exception: object) -> None:
        for application in reversed(self.applications):
            application.rollback()


def known(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that this release's ``function`` takes."""
    import inspect

    return {name: value for name, value in values.items() if name in inspect.signature(function).parameters}


def make_runner(args: argparse.Namespace, device: str, mrope: bool) -> Any:
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    folder = tempfile.mkdtemp()
    config = dict(MODEL)
    if mrope:
        section = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        config |= {"rope_scaling": section, "rope_parameters": section}
    Path(folder, "config.json").write_text(json.dumps(config))
    model = ModelConfig(
        model=folder,
        tokenizer=folder,
        skip_tokenizer_init=True,
        max_model_len=args.max_model_len,
        dtype="bfloat16",
        enforce_eager=True,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_tokens,
        max_model_len=args.max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
    )
    vllm_config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=CacheConfig(block_size=args.block_sizes[0]),
        device_config=DeviceConfig(device),
    )
    scheduler.async_scheduling = device != "cpu"
    context = set_current_vllm_config(vllm_config)
    context.__enter__()
    if not torch.distributed.is_initialized():
        with tempfile.NamedTemporaryFile(delete=False) as file:
            backend = "gloo" if device == "cpu" else "nccl"
            parallel_state.init_distributed_environment(1, 0, f"file://{file.name}", 0, backend)
        parallel_state.ensure_model_parallel_initialized(1, 1)
    runner = GPUModelRunner(vllm_config, torch.device(device))
    runner.use_async_scheduling = True
    sizes = list(args.block_sizes)
    runner.input_batch = InputBatch(
        **known(
            InputBatch.__init__,
            {
                "max_num_reqs": args.max_num_seqs,
                "max_model_len": args.max_model_len,
                "max_num_batched_tokens": args.max_num_tokens,
                "device": runner.device,
                "pin_memory": device != "cpu",
                "vocab_size": config["vocab_size"],
                "block_sizes": sizes,
                "kernel_block_sizes": sizes,
                "max_num_blocks_per_req": [args.max_model_len // size for size in sizes],
                "logitsprocs": runner.input_batch.logitsprocs,
            },
        )
    )
    return runner


class Decode:
    """N requests in steady decode; each ``step`` calls ``_prepare_inputs`` once and then advances by a token."""

    def __init__(self, runner: Any, requests: int, position: int, block_sizes: list[int]) -> None:
        import numpy as np
        import torch
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        self.runner, self.number = runner, requests
        self.names = [f"request-{i}" for i in range(requests)]
        block = 1
        for i, name in enumerate(self.names):
            blocks = []
            for size in block_sizes:
                count = runner.max_model_len // size
                blocks.append(list(range(block, block + count)))
                block += count
            start = position + 3 * i
            state = CachedRequestState(
                req_id=name,
                prompt_token_ids=[1 + (i + t) % 97 for t in range(start - 64)],
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=10_000),
                generator=None,
                block_ids=tuple(blocks),
                num_computed_tokens=start,
                output_token_ids=[-1] * 65,
            )
            state.mrope_positions = torch.zeros(3, 1, dtype=torch.int64)  # of the prompt, long behind us
            state.mrope_position_delta = -7 - i
            runner.requests[name] = state
            runner.input_batch.add_request(state)
        runner.input_batch.refresh_metadata()
        runner.input_batch.prev_req_id_to_index = {name: i for i, name in enumerate(self.names)}
        self.tokens = torch.arange(1, 1 + requests, dtype=torch.int32, device=runner.device).unsqueeze(1)
        runner.input_batch.prev_sampled_token_ids = self.tokens
        self.scheduled = np.ones(requests, dtype=np.int32)
        cached = CachedRequestData.make_empty()
        self.output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(self.names, 1),
            total_num_scheduled_tokens=requests,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0] * len(block_sizes),
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )

    def step(self) -> Any:
        return self.runner._prepare_inputs(self.output, self.scheduled)

    def advance(self) -> None:
        batch = self.runner.input_batch
        batch.num_computed_tokens_cpu[: self.number] += 1
        for name in self.names:
            state = self.runner.requests[name]
            state.num_computed_tokens += 1
            state.output_token_ids.append(-1)


def clock(decode: Decode, steps: int, synchronize: Any) -> dict[str, float]:
    """Median host time of the call, and median time from before it until the device is done, in microseconds."""
    host, whole = [], []
    for _ in range(steps):
        synchronize()
        begin = time.perf_counter_ns()
        decode.step()
        middle = time.perf_counter_ns()
        synchronize()
        whole.append(time.perf_counter_ns() - begin)
        host.append(middle - begin)
        decode.advance()
    return {"host_us": round(statistics.median(host) / 1e3, 2), "whole_us": round(statistics.median(whole) / 1e3, 2)}


def rate(decode: Decode, steps: int, synchronize: Any) -> float:
    """Microseconds a step where the host does not wait for the device between steps."""
    synchronize()
    begin = time.perf_counter_ns()
    for _ in range(steps):
        decode.step()
        decode.advance()
    synchronize()
    return round((time.perf_counter_ns() - begin) / steps / 1e3, 2)


def compare(args: argparse.Namespace, device: str, mrope: bool, requests: int, synchronize: Any) -> dict[str, Any]:
    """Shadow first, then A B A, on one runner."""
    from overlay.ledger import _store, read_memory

    runner = make_runner(args, device, mrope)
    decode = Decode(runner, requests, args.position, list(args.block_sizes))
    before = read_memory(_store.memory).get("decode-input-prep", {})
    with Applied(decode_input_prep={"shadow": True}):
        for _ in range(40):
            decode.step()
            decode.advance()
    after = read_memory(_store.memory)["decode-input-prep"]
    shadow = {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}
    forget(runner)
    found: dict[str, Any] = {"shadow": shadow, "integers_equal": "shadow different" not in shadow, "arms": []}
    for arm in ("A", "B", "A"):
        if arm == "B":
            with Applied():
                clock(decode, args.warmup, synchronize)
                found["arms"].append({"arm": arm, **clock(decode, args.iters, synchronize)})
                found["arms"][-1]["back_to_back_us"] = rate(decode, args.iters // 2, synchronize)
            forget(runner)
        else:
            clock(decode, args.warmup, synchronize)
            found["arms"].append({"arm": arm, **clock(decode, args.iters, synchronize)})
            found["arms"][-1]["back_to_back_us"] = rate(decode, args.iters // 2, synchronize)
    first, patched, last = found["arms"]
    for key in ("host_us", "whole_us", "back_to_back_us"):
        faster = min(first[key], last[key])
        found[f"speedup_{key}"] = round(faster / patched[key], 3)
        found[f"drift_{key}"] = round(abs(first[key] - last[key]) / faster, 4)
    return found


def forget(runner: Any) -> None:
    """Take away what the patches left on live objects, so that the original runs as if they had never been there."""
    owners = [runner, *vars(runner).values(), *runner.input_batch.block_table.block_tables]
    for owner in owners:
        for name in [n for n in getattr(owner, "__dict__", {}) if n.startswith("_overlay")]:
            delattr(owner, name)


def greedy(device: str, vocabulary: int, repeats: int, synchronize: Any) -> dict[str, Any]:
    """The argmax of rows in their own dtype against the one of their float32 copies, and the time of both."""
    import torch

    found: dict[str, Any] = {"rows": 0, "different": 0, "us": {}}
    generator = torch.Generator(device=device).manual_seed(1)
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (1, 2, 8, 64):
            for kind in ("normal", "ties", "equal", "special"):
                logits = torch.randn(rows, vocabulary, generator=generator, device=device).to(dtype)
                if kind == "ties":
                    logits = (logits * 2).round() / 2
                elif kind == "equal":
                    logits.zero_()
                    logits[:, ::3] = -0.0
                elif kind == "special":
                    at = torch.randint(0, vocabulary, (rows, 6), generator=generator, device=device)
                    logits.scatter_(1, at[:, :2], float("inf"))
                    logits.scatter_(1, at[:, 2:4], float("-inf"))
                    if rows > 1:
                        logits[::2].scatter_(1, at[::2, 4:], float("nan"))
                mine, theirs = logits.argmax(dim=-1), logits.to(torch.float32).argmax(dim=-1)
                found["rows"] += rows
                found["different"] += int((mine != theirs).sum())
    for rows in (1, 8, 64):
        logits = torch.randn(rows, vocabulary, generator=generator, device=device).to(torch.bfloat16)
        for name, call in (
            ("native", lambda x=logits: x.argmax(dim=-1)),
            ("float32", lambda x=logits: x.to(torch.float32).argmax(dim=-1)),
        ):
            call()
            synchronize()
            begin = time.perf_counter_ns()
            for _ in range(repeats):
                call()
            synchronize()
            found["us"][f"{name} x {rows}"] = round((time.perf_counter_ns() - begin) / repeats / 1e3, 2)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="file for the figures (JSON)")
    parser.add_argument("--position", type=int, default=24576)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-tokens", type=int, default=4096)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 16])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--iters", type=int, default=600)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def main() -> None:
    import torch
    import vllm

    args = arguments()
    synchronize = torch.cuda.synchronize if args.device == "cuda" else (lambda: None)
    result: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__, "settings": vars(args), "cases": {}}
    result["device"] = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    with torch.inference_mode():
        for mrope in (False, True):
            for requests in args.requests:
                name = f"{requests} requests{', M-RoPE' if mrope else ''}"
                try:
                    result["cases"][name] = compare(args, args.device, mrope, requests, synchronize)
                except Exception as error:
                    import traceback

                    traceback.print_exc()
                    result["cases"][name] = {"failed": f"{type(error).__name__}: {error}"}
        vocabulary, repeats = (151936, 200) if args.device == "cuda" else (4096, 3)
        result["greedy"] = greedy(args.device, vocabulary, repeats, synchronize)
    Path(args.out).write_text(json.dumps(result, indent=1))
    print("case | A us | B us | A us | speedup whole, host, back to back | integers equal | shadow")
    for name, case in result["cases"].items():
        if "arms" not in case:
            print(name, case)
            continue
        cells = [arm["whole_us"] for arm in case["arms"]]
        cells += [case[f"speedup_{k}"] for k in ("whole_us", "host_us", "back_to_back_us")]
        print(name, *cells, case["integers_equal"], case["shadow"], sep=" | ")
    print("greedy:", result["greedy"])


if __name__ == "__main__":
    main()
