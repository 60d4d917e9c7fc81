"""How a decode step is timed inside vLLM's worker: timers of the host's functions, events around the model's graph, a trace."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

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


class Timers:
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


def _busy(kernels: list[tuple[int, int, str, int]]) -> tuple[int, list[int]]:
    """(ns in which at least one of them runs, the pauses between); kernels: (start, stop, ...) in ns, sorted."""
    busy, last, gaps = 0, None, []
    for start, stop, *_ in kernels:
        if last is None:
            last = start
        if start > last:
            gaps.append(start - last)
            busy += stop - start
            last = stop
        elif stop > last:
            busy += stop - last
            last = stop
    return busy, gaps


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
    busy, gaps = _busy(ours)
    alone, _ = _busy([k for k in ours if k[3] in of_graph])
    copied, _ = _busy([k for k in ours if k[3] in of_graph or "DtoH" in k[2] or "Device -> Host" in k[2]])
    span = max(k[1] for k in ours) - ours[0][0] if ours else 0
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
        # not beside the graph: what runs on another stream meanwhile costs the step nothing
        "busy_outside_us": round((busy - alone) / steps / 1e3, 2),
        "busy_outside_without_copies_to_host_us": round((busy - copied) / steps / 1e3, 2),
        "span_us": round(span / steps / 1e3, 1),
        "idle_us": round((span - busy) / steps / 1e3, 1),
        "largest_gaps_us": [round(g / 1e3, 1) for g in sorted(gaps, reverse=True)[:5]],
        "gaps_over_20us_per_step": round(sum(g > 20_000 for g in gaps) / steps, 2),
        "outside_the_graph": {
            name: {"per_step": round(len(times) / steps, 2), "median_us": round(statistics.median(times) / 1e3, 2)}
            for name, times in sorted(spent.items(), key=lambda item: -len(item[1]))[:24]
        },
    }


class GraphEvents:
    """Timing events in the stream right before and right after each replay of the model's full graph.

    make: makes an event with ``record()`` and ``elapsed_time(later)`` in ms. room: steps beyond it are not timed.

    An event before a replay fires once everything launched until then is done. Where the device waits for the host, the
    launch of the graph itself is therefore inside; ``graph_alone_us`` tells how much of that is the graph. Two records cost the
    host a few microseconds a step.
    """

    def __init__(self, make: Callable[[], Any], room: int = 2048) -> None:
        self.made = [(make(), make()) for _ in range(room)]  # ahead of the steps: making one costs host time
        self.used = 0
        self.last: Callable[[], None] | None = None  # replays the graph of the last step
        self.make = make
        self.undo: list[tuple[type, str, Any]] = []

    def around(self, replay: Callable[[], Any], again: Callable[[], None]) -> Any:
        """Call ``replay`` between two events. again: replays the same graph and nothing else."""
        if self.used == len(self.made):
            return replay()
        before, after = self.made[self.used]
        before.record()
        result = replay()
        after.record()
        self.used += 1
        self.last = again
        return result

    def install(self) -> None:
        """Put the events around the replays of both runners, where this release has them."""
        for put in (self._in_v1, self._in_v2):
            try:
                put()
            except (ImportError, AttributeError):
                continue

    def _in_v2(self) -> None:
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

        original = ModelCudaGraphManager.run_fullgraph

        def run_fullgraph(manager: Any, desc: Any) -> Any:
            return self.around(lambda: original(manager, desc), manager.graphs[desc].replay)

        self._set(ModelCudaGraphManager, "run_fullgraph", run_fullgraph)

    def _in_v1(self) -> None:
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context, is_forward_context_available

        original = CUDAGraphWrapper.__call__
        full = CUDAGraphMode.FULL

        def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            if wrapper.runtime_mode == full and is_forward_context_available():
                context = get_forward_context()
                entry = wrapper.concrete_cudagraph_entries.get(context.batch_descriptor)
                if context.cudagraph_runtime_mode == full and entry is not None and entry.cudagraph is not None:
                    return self.around(lambda: original(wrapper, *args, **kwargs), entry.cudagraph.replay)
            return original(wrapper, *args, **kwargs)

        self._set(CUDAGraphWrapper, "__call__", call)

    def _set(self, owner: type, name: str, value: Any) -> None:
        self.undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def uninstall(self) -> None:
        for owner, name, original in reversed(self.undo):
            setattr(owner, name, original)
        self.undo.clear()

    def summary(self) -> dict[str, Any]:
        """Medians over the steps; the device has to be done."""
        pairs = self.made[: self.used]
        inside = [1e3 * before.elapsed_time(after) for before, after in pairs]
        outside = [1e3 * a.elapsed_time(b) for (_, a), (b, _) in zip(pairs, pairs[1:], strict=False)]
        return summarise_events(inside, outside)

    def graph_alone(self, synchronize: Callable[[], None], times: int = 9) -> float | None:
        """us of one replay of the last step's graph with nothing before it to wait for: the same inputs once more.

        Replays follow each other without a pause, so that only the first waits for the host.
        """
        if self.last is None:
            return None
        marks = [self.make() for _ in range(times)]
        for mark in marks:
            self.last()
            mark.record()
        synchronize()
        spans = [1e3 * a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
        return round(statistics.median(spans), 1)


EDGE = 6  # steps at either end that are not steady: prefill, the first replays, requests that end


def summarise_events(inside: list[float], outside: list[float]) -> dict[str, Any]:
    """inside: us of each step between its two events. outside: us from a step's end to the next one's begin, one fewer."""
    inside, outside = inside[EDGE:-EDGE], outside[EDGE:-EDGE]
    if len(inside) < 8:
        return {"steps": len(inside)}
    tenths = statistics.quantiles(outside, n=10)
    return {
        "steps": len(inside),
        "inside_us": round(statistics.median(inside), 1),
        "outside_us": round(statistics.median(outside), 1),
        "outside_us_tenth_and_ninth_decile": [round(tenths[0], 1), round(tenths[-1], 1)],
        "period_us": round(statistics.median([a + b for a, b in zip(inside, outside, strict=False)]), 1),
    }


def host_gaps(events: dict[str, Any] | None, trace: dict[str, Any]) -> dict[str, Any]:
    """``events`` and what of it the device spends waiting for the host, given the device's work outside the graph.

    ``host_gap_us``: outside the events around the graph. ``launch_wait_us``: inside them, beyond the graph alone.
    ``gap_of_step_us``: both, a step's period without the graph alone and without the work outside of it.
    """
    found = dict(events or {})
    busy = trace.get("busy_outside_us")
    if "outside_us" not in found or busy is None:
        return found
    found["busy_outside_us"] = busy
    found["host_gap_us"] = round(found["outside_us"] - busy, 1)
    if found.get("graph_alone_us") is not None:
        found["launch_wait_us"] = round(found["inside_us"] - found["graph_alone_us"], 1)
        found["gap_of_step_us"] = round(found["period_us"] - found["graph_alone_us"] - busy, 1)
    return found
