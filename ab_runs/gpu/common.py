"""Decode steps of one live engine, stock and patched in turns: TPOT, launches, copies, gaps, host time, token ids.

Shared by ``v1_decode.py`` and ``v2_decode.py``. One engine a model and configuration serves both arms: the patches are put
into force and taken back inside its process between measurements (A B B A ...), through vLLM's own
``worker_extension_cls`` and collective RPC. So both arms share the graphs, the clocks and the memory layout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

PLAIN = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
CONFIGS: dict[str, dict[str, Any]] = {"plain": {"compilation_config": PLAIN}, "default": {}}

# What the host does in a step, timed inclusively: label -> module:qualname. Missing ones are left out.
_V2 = "vllm.v1.worker.gpu"
TIMED = {
    "schedule": "vllm.v1.core.sched.scheduler:Scheduler.schedule",
    "update_from_output": "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    "executor.execute_model": "vllm.v1.executor.uniproc_executor:UniProcExecutor.execute_model",
    "executor.sample_tokens": "vllm.v1.executor.uniproc_executor:UniProcExecutor.sample_tokens",
    "wait for a result": "concurrent.futures:Future.result",
    "encode outputs": "vllm.v1.serial_utils:MsgpackEncoder.encode_into",
    "v2.execute_model": f"{_V2}.model_runner:GPUModelRunner.execute_model",
    "v2.sample_tokens": f"{_V2}.model_runner:GPUModelRunner.sample_tokens",
    "v2.add_requests": f"{_V2}.model_runner:GPUModelRunner.add_requests",
    "v2.update_requests": f"{_V2}.model_runner:GPUModelRunner.update_requests",
    "v2.prepare_inputs": f"{_V2}.model_runner:GPUModelRunner.prepare_inputs",
    "v2.prepare_attn": f"{_V2}.model_runner:GPUModelRunner.prepare_attn",
    "v2.attention metadata": f"{_V2}.model_states.default:DefaultModelState.prepare_attn",
    "v2.replay": f"{_V2}.cudagraph_utils:ModelCudaGraphManager.run_fullgraph",
    "v2.sample": f"{_V2}.model_runner:GPUModelRunner.sample",
    "v2.sampler": f"{_V2}.sample.sampler:Sampler.__call__",
    "v2.postprocess": f"{_V2}.model_runner:GPUModelRunner.postprocess_sampled",
    "v2.AsyncOutput": f"{_V2}.async_utils:AsyncOutput.__init__",
    "v2.get_output": f"{_V2}.async_utils:AsyncOutput.get_output",
    "v1.execute_model": "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
    "v1.sample_tokens": "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
    "v1.update_states": "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
    "v1.prepare_inputs": "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
    "v1.attention metadata": "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
    "v1.model forward": "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward",
    "v1.sample": "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    "v1.bookkeeping": "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
    "v1.get_output": "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.get_output",
}
STEP = ("v2.execute_model", "v1.execute_model")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "hipLaunchKernel")
COPIES = ("cudaMemcpyAsync", "cudaMemcpy", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "hipMemcpyAsync")
SMALL_GRAPH = 16  # nodes
FILLS = ("cudaMemsetAsync", "cuMemsetD8Async", "cuMemsetD32Async")


class Probe:
    """Methods added to vLLM's worker: what is done and measured inside the engine's process."""

    def probe_apply(self, ids: list[str], options: dict[str, dict[str, Any]]) -> dict[str, str]:
        """Put patches into force here, by their real specifications and fingerprints. Returns id -> build."""
        import importlib

        import vllm

        from overlay.apply import Application
        from overlay.catalog import load_catalog
        from overlay.versions import in_range

        version = vllm.__version__.partition("+")[0]
        catalog = load_catalog()
        self._applied: list[Any] = []
        done = {}
        for name in ids:
            entry = catalog[name]
            patch = entry.patch
            targets, assumes = (
                tuple(t for t in side if not t.versions or in_range(version, t.versions))
                for side in (patch.targets, patch.assumes)
            )
            for target in (*targets, *assumes):
                importlib.import_module(target.module)
            application = Application(patch, sys.modules[entry.module], targets, assumes, options.get(name, {}))
            application.apply()
            self._applied.append(application)
            done[name] = ", ".join(sorted(set(application.builds.values())))
        return done

    def probe_rollback(self) -> None:
        """Take them back, and everything that they left on live objects."""
        for application in reversed(getattr(self, "_applied", [])):
            application.rollback()
        self._applied = []
        _forget(self.model_runner)  # type: ignore[attr-defined]

    def probe_counters(self) -> dict[str, dict[str, int]]:
        from overlay.ledger import _store, read_memory

        return read_memory(_store.memory)

    def probe_vary(self, factor: float) -> None:
        """Scale the layers' dummy weights up, so that tokens vary (graphs see the same addresses)."""
        import torch

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        with torch.inference_mode():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "embed" not in name and "lm_head" not in name:
                    parameter.mul_(factor)

    # -- host time

    def probe_timers(self, on: bool) -> dict[str, Any] | None:
        """Start the timers, or stop them and return their sums."""
        if on:
            self._timers = _Timers()
            self._timers.install()
            return None
        return self._timers.finish()

    def probe_profile(self, on: bool, rows: int = 90) -> list[str] | None:
        """cProfile of the engine's thread: its heaviest functions by own time."""
        import cProfile
        import io
        import pstats

        if on:
            self._profile = cProfile.Profile()
            self._profile.enable()
            return None
        self._profile.disable()
        text = io.StringIO()
        pstats.Stats(self._profile, stream=text).sort_stats("tottime").print_stats(rows)
        return text.getvalue().splitlines()

    # -- device time

    def probe_trace(self, on: bool) -> dict[str, Any] | None:
        """Record the device's activity, or stop and return what a step does outside and inside the graph."""
        import torch

        if on:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities = [torch.profiler.ProfilerActivity.CUDA]
            self._trace = torch.profiler.profile(activities=activities)
            self._trace.__enter__()
            return None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._trace.__exit__(None, None, None)
        return summarise_trace(self._trace.profiler.kineto_results.events())


def _forget(root: Any, depth: int = 0, seen: set[int] | None = None) -> None:
    """Delete what patches keep on the runner and the objects below it (their attributes begin with ``_overlay``)."""
    seen = set() if seen is None else seen
    if id(root) in seen or depth > 4 or not type(root).__module__.startswith("vllm.v1."):
        return
    seen.add(id(root))
    for name, value in list(getattr(root, "__dict__", {}).items()):
        if name.startswith(("_overlay", "_ov_")):
            delattr(root, name)
        elif isinstance(value, (list, tuple)):
            for item in value:
                for inner in item if isinstance(item, (list, tuple)) else (item,):
                    _forget(inner, depth + 1, seen)
        else:
            _forget(value, depth + 1, seen)


class _Timers:
    """Wraps the functions of ``TIMED`` in place for as long as it is installed."""

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        self.starts: list[float] = []
        self.modes: Counter[str] = Counter()
        self.undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        import importlib

        for label, at in TIMED.items():
            module, _, qualname = at.partition(":")
            try:
                owner = importlib.import_module(module)
                *path, name = qualname.split(".")
                for part in path:
                    owner = getattr(owner, part)
                self._wrap(owner, name, label)
            except (ImportError, AttributeError):
                continue
        try:
            from vllm.v1.worker.gpu import model_runner

            self._wrap_dispatch(model_runner)
        except (ImportError, AttributeError):
            pass

    def _wrap(self, owner: Any, name: str, label: str) -> None:
        original = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        spent, starts, clock, step = self.spent, self.starts, time.perf_counter, label in STEP

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            if step:
                starts.append(begin)
            try:
                return original(*args, **kwargs)
            finally:
                entry = spent[label, threading.current_thread().name]
                entry[0] += 1
                entry[1] += clock() - begin

        if hasattr(original, "__get__") and not callable(original):
            return
        if type(original).__name__ == "OverlayWrapper":  # binds itself: call it as the method it wraps

            def timed_method(instance: Any, *args: Any, **kwargs: Any) -> Any:
                begin = clock()
                if step:
                    starts.append(begin)
                try:
                    return original.__get__(instance, type(instance))(*args, **kwargs)
                finally:
                    entry = spent[label, threading.current_thread().name]
                    entry[0] += 1
                    entry[1] += clock() - begin

            self._set(owner, name, original, timed_method)
        else:
            self._set(owner, name, original, timed)

    def _wrap_dispatch(self, module: Any) -> None:
        original = module.dispatch_cg_and_sync_dp
        modes = self.modes

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            desc, sync = original(*args, **kwargs)
            modes[f"{desc.cg_mode.name} tokens={desc.num_tokens} requests={desc.num_reqs}"] += 1
            return desc, sync

        self._set(module, "dispatch_cg_and_sync_dp", original, dispatch)

    def _set(self, owner: Any, name: str, original: Any, value: Any) -> None:
        self.undo.append((owner, name, original))
        setattr(owner, name, value)

    def finish(self) -> dict[str, Any]:
        for owner, name, original in reversed(self.undo):
            setattr(owner, name, original)
        steps = max(1, len(self.starts))
        periods = sorted(b - a for a, b in zip(self.starts, self.starts[1:], strict=False))
        return {
            "steps": len(self.starts),
            "period_us": round(1e6 * periods[len(periods) // 2], 1) if periods else None,
            "us_per_step": {
                f"{label} [{thread}]": [round(1e6 * total / steps, 1), count]
                for (label, thread), (count, total) in sorted(self.spent.items(), key=lambda kv: -kv[1][1])
            },
            "dispatch": dict(self.modes.most_common(6)),
        }


def summarise_trace(events: Any) -> dict[str, Any]:
    """Per decode step, delimited by the launches of the model's graph: calls outside it, busy and idle time of the device.

    A graph of few nodes is a patch's: its launch counts as a launch, its copies and fills as such.
    """
    graphs, calls, kernels = [], [], []
    for event in events:
        name = event.name()
        on_device = "CUDA" in str(event.device_type()) or "HIP" in str(event.device_type())
        if on_device:
            kernels.append((event.start_ns(), event.start_ns() + event.duration_ns(), name, event.correlation_id()))
        elif name in ("cudaGraphLaunch", "hipGraphLaunch"):
            graphs.append((event.start_ns(), event.correlation_id()))
        elif name in LAUNCHES or name in COPIES or name in FILLS:
            calls.append((event.start_ns(), name, event.correlation_id()))
    nodes = Counter(correlation for _, _, _, correlation in kernels)
    small = [(at, "small graph", correlation) for at, correlation in graphs if nodes[correlation] <= SMALL_GRAPH]
    graphs = sorted(graph for graph in graphs if nodes[graph[1]] > SMALL_GRAPH)
    if len(graphs) < 12:
        return {"graph_launches": len(graphs), "calls": dict(Counter(n for _, n, _ in calls).most_common(8))}
    inside = graphs[4:-4]  # away from prefill and from the end
    begin, end, steps = inside[0][0], inside[-1][0], len(inside) - 1
    within = [(name, correlation) for at, name, correlation in (*calls, *small) if begin <= at < end]
    outside = {correlation for _, correlation in within}
    in_small = {correlation for name, correlation in within if name == "small graph"}
    of_graph = {correlation for _, correlation in inside[:-1]}
    ours = sorted(k for k in kernels if k[3] in of_graph or k[3] in outside)
    busy, last, gaps = 0, None, []
    for start, stop, _, _ in ours:
        if last is None:
            last = start
            first = start
        if start > last:
            gaps.append(start - last)
            busy += stop - start
            last = stop
        elif stop > last:
            busy += stop - last
            last = stop
    span = (last - first) if ours else 0
    spent: dict[str, list[int]] = defaultdict(list)
    for start, stop, name, correlation in ours:
        if correlation in outside:
            spent[name[:70]].append(stop - start)
    inner = Counter("copy" if "Memcpy" in n else "fill" if "Memset" in n else "kernel" for _, _, n, c in ours if c in in_small)
    return {
        "steps": steps,
        "launches_per_step": round(sum(n in LAUNCHES or n == "small graph" for n, _ in within) / steps, 2),
        "of_these_small_graphs": round(len(in_small) / steps, 2),
        "nodes_of_small_graphs_per_step": {kind: round(number / steps, 2) for kind, number in inner.items()},
        "copies_per_step": round((sum(n in COPIES for n, _ in within) + inner["copy"]) / steps, 2),
        "fills_per_step": round((sum(n in FILLS for n, _ in within) + inner["fill"]) / steps, 2),
        "busy_us": round(busy / steps / 1e3, 1),
        "span_us": round(span / steps / 1e3, 1),
        "idle_us": round((span - busy) / steps / 1e3, 1),
        "largest_gaps_us": [round(g / 1e3, 1) for g in sorted(gaps, reverse=True)[:5]],
        "gaps_over_20us_per_step": round(sum(g > 20_000 for g in gaps) / steps, 2),
        "outside_the_graph": {
            name: {"per_step": round(len(times) / steps, 2), "median_us": round(statistics.median(times) / 1e3, 2)}
            for name, times in sorted(spent.items(), key=lambda item: -len(item[1]))[:24]
        },
    }


# -- the parent


class Bench:
    """One engine: boots it, switches patches, measures."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        from vllm import LLM

        began = time.time()
        self.llm = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            worker_extension_cls="ab_runs.gpu.common.Probe",
            seed=0,
            **settings,
        )
        self.boot_s = round(time.time() - began, 1)

    def rpc(self, method: str, *args: Any) -> Any:
        return self.llm.collective_rpc(method, args=args)[0]

    def generate(self, batch: int, tokens: int) -> tuple[float, list[tuple[int, ...]]]:
        """(seconds, token ids of each request) for ``batch`` equal-sized requests of ``tokens`` output tokens."""
        import random

        from vllm import SamplingParams

        rnd = random.Random(7)
        prompts = [{"prompt_token_ids": [rnd.randrange(10, 500) for _ in range(32)]} for _ in range(batch)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        spent = time.perf_counter() - began
        return spent, [tuple(output.outputs[0].token_ids) for output in outputs]

    def tpot(self, batch: int, tokens: int) -> tuple[float, list[tuple[int, ...]]]:
        """(ms a token, token ids): the difference of a long and a short run, so that prefill and start cancel out."""
        short, _ = self.generate(batch, 8)
        long, ids = self.generate(batch, 8 + tokens)
        return 1e3 * (long - short) / tokens, ids

    def front(self, batch: int, tokens: int) -> dict[str, Any]:
        """Of the front end's loop, us a step: waiting for the engine, and turning its outputs into results."""
        engine, spent = self.llm.llm_engine, {"wait for the engine": 0.0, "process outputs": 0.0}
        steps = 0

        def timed(function: Any, label: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal steps
                began = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    spent[label] += time.perf_counter() - began
                    steps += label.startswith("wait")

            return call

        core, processor = engine.engine_core, engine.output_processor
        core.get_output = timed(core.get_output, "wait for the engine")
        processor.process_outputs = timed(processor.process_outputs, "process outputs")
        try:
            total, _ = self.generate(batch, tokens)
        finally:
            del core.get_output, processor.process_outputs
        return {k: round(1e6 * v / max(steps, 1), 1) for k, v in {**spent, "whole loop": total}.items()} | {"steps": steps}

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


def measure(bench: Bench, patches: list[str], options: dict[str, Any], batches: list[int], args: Any) -> dict[str, Any]:
    """Both arms at every batch size: TPOT in turns with the ids compared, then a trace and the host's timers of each."""
    found: dict[str, Any] = {"boot_s": bench.boot_s, "batches": {}}
    for batch in batches:
        bench.generate(batch, 16)
        times: dict[str, list[float]] = {"stock": [], "patched": []}
        ids: dict[str, Any] = {}
        equal = True
        for turn in range(args.turns):
            for arm in ("stock", "patched") if turn % 2 == 0 else ("patched", "stock"):
                if arm == "patched":
                    found["builds"] = bench.rpc("probe_apply", patches, options)
                    bench.generate(batch, 16)  # compiles what the patches bring
                spent, tokens = bench.tpot(batch, args.tokens)
                times[arm].append(round(spent, 4))
                equal = equal and ids.setdefault("ids", tokens) == tokens
                if arm == "patched":
                    bench.rpc("probe_rollback")
        entry: dict[str, Any] = {"tpot_ms": times, "ids_equal": equal, "distinct_tokens": len(set(ids["ids"][0]))}
        for arm in ("stock", "patched"):
            if arm == "patched":
                bench.rpc("probe_apply", patches, options)
                bench.generate(batch, 16)
            bench.rpc("probe_trace", True)
            bench.generate(batch, args.trace_tokens)
            trace = bench.rpc("probe_trace", False)
            bench.rpc("probe_timers", True)
            bench.generate(batch, args.tokens)
            entry[arm] = {"trace": trace, "host": bench.rpc("probe_timers", False)}
            entry[arm]["front"] = bench.front(batch, args.tokens)
            if args.cprofile:
                bench.rpc("probe_profile", True)
                bench.generate(batch, args.tokens)
                entry[arm]["cprofile"] = bench.rpc("probe_profile", False)
            if arm == "patched":
                entry["counters"] = {k: v for k, v in bench.rpc("probe_counters").items() if k in patches}
                bench.rpc("probe_rollback")
        found["batches"][batch] = entry
    return found


def compare(bench: Bench, patches: list[str], options: dict[str, Any], batches: list[int], args: Any) -> dict[str, Any]:
    """Token ids of both arms, stock first and last, in one process where requests are admitted together: with an engine
    process of its own, who shares a prefill depends on when requests arrive, and stock does not repeat itself.
    """
    found: dict[str, Any] = {"boot_s": bench.boot_s, "batches": {}}
    for batch in batches:
        bench.generate(batch, 16)
        ids = {}
        for arm in ("stock", "patched", "stock again"):
            if arm == "patched":
                found["builds"] = bench.rpc("probe_apply", patches, options)
            _, ids[arm] = bench.generate(batch, args.tokens)
            if arm == "patched":
                counters = {k: v for k, v in bench.rpc("probe_counters").items() if k in patches}
                bench.rpc("probe_rollback")
        found["batches"][batch] = {
            "stock_repeats": ids["stock"] == ids["stock again"],
            "ids_equal": ids["stock"] == ids["patched"],
            "distinct_tokens": [len(set(tokens)) for tokens in ids["stock"]],
            "counters": counters,
        }
    return found


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, help="folder that holds the models' folders")
    parser.add_argument("--out", required=True, help="file for the figures (JSON), rewritten after each engine")
    parser.add_argument("--plan", nargs="+", default=["qwen3-0.6b:plain", "qwen3-0.6b:default"], help="model:config")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--trace-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=450, help="start no further engine after this long")
    parser.add_argument("--boot-seconds", type=float, default=110, help="time to allow for one engine's start")
    parser.add_argument("--exact", action="store_true", help="compare token ids only, in one process, nothing timed")
    parser.add_argument("--shadow", action="store_true", help="patches compare with the original at every step where they can")
    parser.add_argument("--no-cprofile", dest="cprofile", action="store_false")
    parser.add_argument("--setting", action="append", default=[], help="further LLM setting, name=JSON")
    return parser.parse_args()


def main(description: str | None, runner: str, patches: list[str]) -> None:
    """Everything of one script: ``runner`` is V1 or V2, ``patches`` those of the patched arm, in order."""
    from overlay.catalog import load_catalog

    args = arguments(description)
    catalog = load_catalog()
    shadowed = [name for name in patches if args.shadow and "shadow" in catalog[name].patch.options]
    options: dict[str, Any] = {name: {"shadow": True} for name in shadowed}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "V2" else "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if args.exact:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    began = time.time()
    result: dict[str, Any] = {"runner": runner, "patches": patches, "machine": machine(), "engines": {}}
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    extra = {name: json.loads(value) for name, _, value in (s.partition("=") for s in args.setting)}
    for item in args.plan:
        model, _, config = item.partition(":")
        if time.time() - began + args.boot_seconds > args.seconds:
            result["engines"][item] = {"skipped": "out of time"}
            continue
        settings = {"max_model_len": 4096, "gpu_memory_utilization": 0.4, **CONFIGS[config], **extra}
        try:
            bench = Bench(str(Path(args.models) / model), settings)
            bench.rpc("probe_vary", 40.0)
            run = compare if args.exact else measure
            result["engines"][item] = run(bench, patches, options, args.batches, args)
            bench.close()
        except Exception as error:  # keep what the other engines gave
            import traceback

            traceback.print_exc()
            result["engines"][item] = {"failed": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.time() - began, 1)
        out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result["engines"], indent=1)) if args.exact else table(result)


def machine() -> dict[str, Any]:
    import torch
    import vllm

    found = {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    try:
        found["cpu"] = next(
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass
    return found


def table(result: dict[str, Any]) -> None:
    """The figures in short, last on standard output."""
    print("\nengine | batch | arm | TPOT ms | launches | copies | fills | busy us | idle us | period us | ids equal")
    for item, engine in result["engines"].items():
        if "batches" not in engine:
            print(item, engine)
            continue
        for batch, entry in engine["batches"].items():
            for arm in ("stock", "patched"):
                trace, host = entry[arm]["trace"], entry[arm]["host"]
                cells = [trace.get(k, "-") for k in ("launches_per_step", "copies_per_step", "fills_per_step")]
                cells += [trace.get(k, "-") for k in ("busy_us", "idle_us")]
                tpot = statistics.median(entry["tpot_ms"][arm])
                print(item, batch, arm, f"{tpot:.3f}", *cells, host["period_us"], entry["ids_equal"], sep=" | ")
            print("   dispatch:", entry["stock"]["host"]["dispatch"], "distinct tokens:", entry["distinct_tokens"])
            print("   front end, us/step:", entry["stock"]["front"], "->", entry["patched"]["front"])
            rows = list(entry["stock"]["host"]["us_per_step"].items())[:16]
            patched = entry["patched"]["host"]["us_per_step"]
            print("   us/step:", "; ".join(f"{k} {v[0]}->{patched.get(k, ['-'])[0]}" for k, v in rows))
