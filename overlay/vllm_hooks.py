"""The places of vLLM where the overlay itself takes part: who a process is, proof before serving, the cache key, the
endpoint. Checked against 0.18.1 to 0.33.0; ``POINTS`` lists them, and the plan refuses a build that lacks one.
"""

from __future__ import annotations

import functools
from typing import Any

from overlay.hooks import Hooks
from overlay.spec import API, ENGINE, WORKER

POINTS = (
    "vllm.envs:environment_variables",
    "vllm.v1.engine.core:EngineCore.__init__",
    "vllm.v1.engine.core_client:MPClient.__init__",
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker",
    "vllm.entrypoints.serve.instrumentator.metrics:attach_router",
)


def install(hooks: Hooks) -> None:
    """Register every hook point. Each acts when its module is imported."""
    for point in POINTS:
        module = point.partition(":")[0]
        hooks.on_import(module, functools.partial(_INSTALLERS[module], hooks))


def _guarded(hooks: Hooks, name: str, owner: Any) -> Any:
    """The attribute to wrap. A build without it cannot be proven: refuse rather than serve on faith."""
    original = getattr(owner, name, None)
    if original is None:
        raise hooks.refuse(f"{owner.__module__ if hasattr(owner, '__module__') else owner.__name__} has no {name}")
    return original


def _envs(hooks: Hooks, module: Any) -> None:
    """Put the plan's digest into vLLM's compile-cache key: ``compile_factors()`` hashes every known variable.

    A patch that failed in this process after all is part of the key: what is compiled here was traced without it.
    """
    variables = _guarded(hooks, "environment_variables", module)
    variables["OVERLAY_DIGEST"] = lambda: "-without-".join([hooks.orders["digest"], *hooks.failed()])


def _engine(hooks: Hooks, module: Any) -> None:
    core = module.EngineCore
    original = _guarded(hooks, "__init__", core)

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        hooks.start_counting()
        if hooks.receipt.content["role"] == "other":
            hooks.receipt.update(role=ENGINE)
        original(self, *args, **kwargs)
        from overlay.verify import verify_workers

        verify_workers(hooks, self)

    def overlay_report(self: Any) -> list[dict[str, Any]]:
        """Receipts and counters of this engine core and of its workers, for hosts that share no folder."""
        from overlay.verify import own_report

        return [own_report(hooks), *self.model_executor.collective_rpc("overlay_report")]

    core.__init__ = checked
    core.overlay_report = overlay_report


def _worker(hooks: Hooks, module: Any) -> None:
    wrapper = module.WorkerWrapperBase
    original = _guarded(hooks, "init_worker", wrapper)

    @functools.wraps(original)
    def init_worker(self: Any, *args: Any, **kwargs: Any) -> None:
        hooks.start_counting()
        role = "engine+worker" if hooks.receipt.content["role"] == ENGINE else WORKER
        hooks.receipt.update(role=role, rank=getattr(self, "global_rank", getattr(self, "rpc_rank", None)))
        original(self, *args, **kwargs)
        _check_before_capture(hooks, self.worker)

    def overlay_report(self: Any) -> dict[str, Any]:
        from overlay.verify import own_report

        return own_report(hooks)

    wrapper.init_worker = init_worker
    wrapper.overlay_report = overlay_report


def _check_before_capture(hooks: Hooks, worker: Any) -> None:
    """Prove the patches on the live worker before it warms up and captures graphs."""
    original = _guarded(hooks, "compile_or_warm_up_model", worker)

    @functools.wraps(original)
    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        from overlay.verify import verify_worker

        verify_worker(hooks, worker)
        return original(*args, **kwargs)

    # on the instance: whatever class the platform's worker has, this call goes through the check
    worker.compile_or_warm_up_model = compile_or_warm_up_model


def _client(hooks: Hooks, module: Any) -> None:
    client = module.MPClient
    original = _guarded(hooks, "__init__", client)

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        hooks.start_counting()
        if hooks.receipt.content["role"] == "other":
            hooks.receipt.update(role=API)
        original(self, *args, **kwargs)
        from overlay.verify import verify_engines

        verify_engines(hooks, self)

    client.__init__ = checked


def _metrics(hooks: Hooks, module: Any) -> None:
    original = _guarded(hooks, "attach_router", module)

    @functools.wraps(original)
    def attach_router(app: Any, *args: Any, **kwargs: Any) -> Any:
        from overlay.endpoint import attach

        result = original(app, *args, **kwargs)
        attach(app, hooks, module)
        return result

    # the counters must be in the registry that /metrics is built from, which is asked for inside attach_router
    registry = _guarded(hooks, "get_prometheus_registry", module)

    @functools.wraps(registry)
    def get_prometheus_registry() -> Any:
        from overlay.endpoint import collect_counters

        return collect_counters(registry(), hooks)

    module.attach_router = attach_router
    module.get_prometheus_registry = get_prometheus_registry


_INSTALLERS = {
    "vllm.envs": _envs,
    "vllm.v1.engine.core": _engine,
    "vllm.v1.engine.core_client": _client,
    "vllm.v1.worker.worker_base": _worker,
    "vllm.entrypoints.serve.instrumentator.metrics": _metrics,
}


def missing_points(root: str) -> list[str]:
    """The points that a source tree lacks (``root`` holds the package ``vllm``)."""
    from overlay.fingerprint import MissingTarget, module_file

    missing = []
    for point in POINTS:
        module, _, qualname = point.partition(":")
        try:
            text = module_file(root, module).read_text(encoding="utf-8")
        except MissingTarget:
            missing.append(point)
            continue
        *owner, name = qualname.split(".")
        wanted = [f"class {part}" for part in owner] + [f"def {name}(" if name != "environment_variables" else name]
        if not all(part in text for part in wanted):
            missing.append(point)
    return missing

