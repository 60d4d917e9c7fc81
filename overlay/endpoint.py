"""``GET /overlay`` on the server, and the counters in ``/metrics``. Reads files: the engine is not disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from overlay.hooks import Hooks
from overlay.verify import run_report


def attach(app: Any, hooks: Hooks, module: Any) -> None:
    """Add the route to the server's FastAPI application."""
    from fastapi.responses import JSONResponse

    async def overlay() -> Any:
        processes = run_report(hooks)
        known = {(process["host"], process["pid"]) for process in processes}
        processes += [p for p in await _remote(app, hooks) if (p["host"], p["pid"]) not in known]
        return JSONResponse(
            {
                "digest": hooks.orders["digest"],
                "run": hooks.folder,
                "profile": hooks.orders.get("profile"),
                "exactness": hooks.orders.get("exactness"),
                "patches": hooks.orders.get("verdicts", []),
                "processes": processes,
            }
        )

    app.add_api_route("/overlay", overlay, methods=["GET"], include_in_schema=False)


async def _remote(app: Any, hooks: Hooks) -> list[dict[str, Any]]:
    """Reports of engine cores and workers on hosts that share no folder with us: asked only where there are such."""
    client = getattr(getattr(app.state, "engine_client", None), "engine_core", None)
    config = getattr(getattr(app.state, "vllm_config", None), "parallel_config", None)
    if client is None or not hasattr(client, "call_utility_async"):
        return []
    if hooks.folder is not None and getattr(config, "distributed_executor_backend", None) != "ray":
        return []
    try:
        return list(await client.call_utility_async("overlay_report"))
    except Exception as error:
        return [{"host": "?", "pid": 0, "role": "unreachable", "error": f"{type(error).__name__}: {error}"}]


class _Collector:
    """Prometheus samples made from the counter files at each scrape."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        events = CounterMetricFamily(
            "vllm_overlay_events",
            "Calls of patched functions, by what became of them",
            labels=["patch", "event", "role", "pid"],
        )
        applied = GaugeMetricFamily(
            "vllm_overlay_applied", "1 where a patch is in force in a process", labels=["patch", "role", "pid", "digest"]
        )
        for process in run_report(self.hooks):
            who = [process["role"], str(process["pid"])]
            for patch, counts in process["counters"].items():
                for event, count in counts.items():
                    events.add_metric([patch, event, *who], count)
            for patch, state in process["patches"].items():
                applied.add_metric([patch, *who, process["digest"]], float(state.get("state") == "applied"))
        yield events
        yield applied

    def describe(self) -> list[Any]:
        return []  # nothing to read at registration


def collect_counters(registry: Any, hooks: Hooks) -> Any:
    """Register our collector, once a registry."""
    if not getattr(registry, "_overlay_collector", False):
        registry.register(_Collector(hooks))
        registry._overlay_collector = True
    return registry
