"""Proof before serving: in each worker before it captures graphs, in the engine over its workers, in the API server over
its engines. Whoever finds that something is not in force refuses, and the run ends with exit code 78.
"""

from __future__ import annotations

import os
from typing import Any

from overlay.apply import MARK
from overlay.hooks import APPLIED, FAILED, UNMET, Hooks
from overlay.ledger import read_memory, read_run
from overlay.spec import ENGINE, WORKER

V2_RUNNER = "vllm.v1.worker.gpu."  # the package of the V2 model runner, in every release that has one


def verify_worker(hooks: Hooks, worker: Any) -> None:
    """The live worker: the patches of this process are applied, on the classes really in use, under the expected
    runner. Raises ``Refused``.
    """
    runner = getattr(worker, "model_runner", None)
    live = _runner_kind(runner)
    hooks.receipt.update(worker_class=_name(type(worker)), runner_class=_name(type(runner)), runner=live)
    facts = _live_facts(hooks, worker, live)
    off = []
    for patch, order in hooks.patches.items():  # in order: what a patch requires comes before it
        if order["process"] != WORKER:
            continue
        reason = _not_in_force(hooks, patch)
        if reason is None or reason.startswith(UNMET):  # its own conditions say more than what became of another patch
            reason = _wrong_here(order, facts) or reason or hooks.unmet(patch)
        for path in order["live"] if reason is None else ():
            reason = _not_live(hooks.applications.get(patch), worker, path)
            if reason is not None:
                break
        if reason is not None:
            hooks.receipt.state(patch, state=FAILED, reason=reason)
            off.append((patch, reason))
        else:
            hooks.receipt.state(patch, verified=True)
    for patch, reason in reversed(off):  # from the top: one may be stacked on another
        _settle(hooks, patch, reason)


def verify_workers(hooks: Hooks, core: Any) -> None:
    """Called in the engine core once its workers are up: every one reports the same plan. Raises ``Refused``."""
    for patch, order in hooks.patches.items():
        if order["process"] == ENGINE and (reason := _not_in_force(hooks, patch)) is not None:
            _settle(hooks, patch, reason)
    try:
        reports = core.model_executor.collective_rpc("overlay_report")
    except Exception as error:
        raise hooks.refuse(f"a worker runs without the overlay's bootstrap ({type(error).__name__}: {error})") from error
    for report in reports:
        if report["digest"] != hooks.orders["digest"]:
            who = f"worker {report['rank']} (process {report['pid']} on {report['host']})"
            raise hooks.refuse(f"{who} runs plan {report['digest']}, the engine {hooks.orders['digest']}")
    states = [{patch: state.get("state") for patch, state in report["patches"].items()} for report in reports]
    for report, state in zip(reports, states, strict=True):
        if state != states[0]:
            differ = sorted(patch for patch in state.keys() | states[0].keys() if state.get(patch) != states[0].get(patch))
            raise hooks.refuse(f"workers {reports[0]['pid']} and {report['pid']} disagree on {', '.join(differ)}")
    hooks.receipt.update(workers=[report["pid"] for report in reports])


def verify_engines(hooks: Hooks, client: Any) -> None:
    """Called in the API server once its engine cores are up: each local one left a receipt of this plan. Engine cores on
    other hosts are asked over RPC by ``GET /overlay``. Raises ``Refused``.
    """
    manager = getattr(getattr(client, "resources", None), "engine_manager", None)
    pids = [process.pid for process in getattr(manager, "processes", ()) or ()]
    if hooks.folder is None or not pids:
        return
    receipts = {receipt["pid"]: receipt for receipt in read_run(hooks.folder)[0]}
    for pid in pids:
        receipt = receipts.get(pid)
        if receipt is None:
            raise hooks.refuse(f"engine core {pid} runs without the overlay's bootstrap: it left no receipt")
        if receipt["digest"] != hooks.orders["digest"]:
            raise hooks.refuse(f"engine core {pid} runs plan {receipt['digest']}, not {hooks.orders['digest']}")
    hooks.receipt.update(engines=pids)


def own_report(hooks: Hooks) -> dict[str, Any]:
    """This process's receipt with its counters."""
    from overlay.ledger import _store

    return {**hooks.receipt.content, "counters": read_memory(_store.memory)}


def run_report(hooks: Hooks) -> list[dict[str, Any]]:
    """Receipts with counters of every process that shares this run's folder."""
    if hooks.folder is None:
        return [own_report(hooks)]
    receipts, counters = read_run(hooks.folder)
    return [{**receipt, "counters": counters.get(receipt["pid"], {})} for receipt in receipts]


def _settle(hooks: Hooks, patch: str, reason: str) -> None:
    """A patch is not in force where it should be: stop where it is required, else take back what is left of it."""
    if hooks.patches[patch]["required"]:
        raise hooks.refuse(f"{patch}: not in force in process {os.getpid()}: {reason}")
    application = hooks.applications.pop(patch, None)
    if application is not None:
        application.rollback()
    print(f"overlay: {patch}: off in process {os.getpid()}: {reason}", flush=True)


def _not_in_force(hooks: Hooks, patch: str) -> str | None:
    content = hooks.receipt.content["patches"].get(patch, {})
    if content.get("state") != APPLIED:
        return content.get("reason") or f"its targets were never imported here (state: {content.get('state')})"
    application = hooks.applications.get(patch)
    return application.in_force() if application is not None else None


def _runner_kind(runner: Any) -> str | None:
    if runner is None:
        return None
    modules = {cls.__module__ for cls in type(runner).__mro__}
    return "V2" if any(module.startswith(V2_RUNNER) or ".v2" in module for module in modules) else "V1"


def _live_facts(hooks: Hooks, worker: Any, runner: str | None) -> Any:
    from overlay.live_facts import from_dict, live

    if "facts" not in hooks.orders:
        return None
    return live(from_dict(hooks.orders["facts"]), worker, runner)


def _wrong_here(order: dict[str, Any], facts: Any) -> str | None:
    """Whether the patch's conditions fail on what really came up: the runner, the arguments, the model. None if they hold."""
    if facts is None:
        return None
    from overlay.catalog import import_patch
    from overlay.conditions import explain, failures

    module = import_patch(order["module"], order["file"])
    failed = list(failures(module.PATCH.condition, facts, module))
    return f"what came up is not what it is for: {explain(failed)}" if failed else None


def _not_live(application: Any, worker: Any, path: str) -> str | None:
    """Whether the object at ``path`` below the worker is of a class that carries the patch; None if so."""
    value: Any = worker
    for part in path.split("."):
        try:
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        except (AttributeError, IndexError, KeyError, TypeError):
            return f"the worker has no {path}"
    if application is None:
        return None
    owners = {site.owner for site, _ in application.installed if isinstance(site.owner, type)}
    names = {site.name: site.owner for site, _ in application.installed if isinstance(site.owner, type)}
    if not owners & set(type(value).__mro__):
        patched = ", ".join(sorted(_name(owner) for owner in owners))
        return f"worker.{path} is a {_name(type(value))}; the patch is on {patched}, which it does not derive from"
    for name, owner in names.items():
        if owner not in type(value).__mro__:
            continue
        holder = next(cls for cls in type(value).__mro__ if name in vars(cls))
        if not getattr(vars(holder)[name], MARK, None):
            return f"{_name(holder)}.{name} overrides the patched one in worker.{path}"
    return None


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
