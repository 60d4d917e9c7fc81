"""What is done inside vLLM's worker: patches put into force and taken back, and everything that ``clocks.py`` measures.

``Probe`` reaches the worker through vLLM's ``worker_extension_cls``; ``common.py`` calls its methods by collective RPC.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ab_runs.gpu.clocks import GraphEvents, Timers, summarise_trace


class Probe:
    """Methods added to vLLM's worker: what is done and measured inside the engine's process."""

    def probe_choose(self, ids: list[str]) -> dict[str, str]:
        """id -> why the patch is not for this engine, "" where it is: its condition on what really came up."""
        from overlay.catalog import load_catalog
        from overlay.conditions import explain, failures
        from overlay.facts import detect
        from overlay.live_facts import live
        from overlay.verify import _runner_kind

        config = self.vllm_config  # type: ignore[attr-defined]
        runner = _runner_kind(self.model_runner)  # type: ignore[attr-defined]
        facts = live(detect([str(config.model_config.model)], os.environ), self, runner)
        catalog = load_catalog()
        found: dict[str, str] = {}
        for name in ids:
            patch, module = catalog[name].patch, sys.modules[catalog[name].module]
            reason = explain(list(failures(patch.condition, facts, module)))
            if not reason and patch.superseded:
                reason = getattr(module, patch.superseded)(facts) or ""
            needed = [other for other in patch.requires if found.get(other, "it is not asked for")]
            found[name] = reason or ("it requires " + ", ".join(needed) if needed else "")
        return found

    def probe_engine(self) -> dict[str, Any]:
        """What came up: the facts on which the cases of a comparison depend."""
        from overlay.verify import _runner_kind

        runner = self.model_runner  # type: ignore[attr-defined]
        config = self.vllm_config  # type: ignore[attr-defined]
        groups = getattr(getattr(runner, "kv_cache_config", None), "kv_cache_groups", ())
        return {
            "runner": _runner_kind(runner),
            "mrope": bool(config.model_config.uses_mrope),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "speculation": getattr(config.speculative_config, "method", None),
            "layers": config.model_config.hf_text_config.num_hidden_layers,
            "kv_cache_groups": [f"{type(g.kv_cache_spec).__name__} x {len(g.layer_names)}" for g in groups],
            "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
            "capture_sizes": list(config.compilation_config.cudagraph_capture_sizes or ()),
        }

    def probe_recapture(self) -> None:
        """Capture the V1 runner's graphs anew, under the patches now in force. No request may be running."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.config import set_current_vllm_config

        CUDAGraphWrapper.clear_all_graphs()  # as vLLM does itself between estimating the graphs' memory and capturing them
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            self.model_runner.capture_model()  # type: ignore[attr-defined]

    def probe_apply(self, ids: list[str], options: dict[str, dict[str, Any]]) -> dict[str, str]:
        """Put patches into force here, by their real specifications and fingerprints. Returns id -> build."""
        import vllm

        from overlay.apply import apply_entry
        from overlay.catalog import load_catalog
        from overlay.verify import _not_live

        version = vllm.__version__.partition("+")[0]
        catalog = load_catalog()
        self._applied: list[Any] = []
        done = {}
        for name in ids:
            application = apply_entry(catalog[name], version, options.get(name))
            self._applied.append(application)
            for path in application.patch.live:
                reason = _not_live(application, self, path)
                if reason is not None:
                    raise RuntimeError(f"{name} is applied, but not in force: {reason}")
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
            self._timers = Timers()
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

    def probe_events(self, on: bool) -> dict[str, Any] | None:
        """Time the model's graph by events, or stop and return what lies inside and outside of it. {} without a device."""
        import torch

        if not torch.cuda.is_available():
            return None if on else {}
        if on:
            self._graph_events = GraphEvents(lambda: torch.cuda.Event(enable_timing=True))
            self._graph_events.install()
            return None
        self._graph_events.uninstall()
        torch.cuda.synchronize()
        found = self._graph_events.summary()
        alone = self._graph_events.graph_alone(torch.cuda.synchronize)
        return {**found, "graph_alone_us": alone}

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
