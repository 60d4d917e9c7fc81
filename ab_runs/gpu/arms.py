"""Arms of a GPU comparison as the product starts them: ``launch.py --overlay-exec -- PROGRAM``; ``stock`` is the program alone.

Afterwards ``proof`` reads what the arm's processes said of themselves (plan, receipts, counters) and names every patch that
should have been in force and was not: such an arm's figures say nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

TILES = "gemm-tiles"
# arm -> the loosest class allowed, and the patches that may be in force (None: all that are on by default). None: no launcher.
ARMS: dict[str, tuple[str, tuple[str, ...] | None] | None] = {
    "stock": None,
    "again": None,  # the control: stock once more
    "host": ("bitwise", None),
    "tiles": ("rounding", (TILES,)),
    "all": ("rounding", None),
}
# What an arm is about: it must be in force and its fast path must have run.
NEEDED = {"tiles": (TILES,), "all": (TILES,)}
# How the overlay says that a patch is not for the engine that came up: no fault of the arm.
ELSEWHERE = ("what came up is not what it is for", "its targets were never imported here")


def settings(arm: str, tables: Path | None = None) -> dict[str, Any] | None:
    """The arm's settings for ``--overlay-config``; None for an arm without the launcher.

    No patch is named to be on, so that one that cannot apply is left out and reported rather than ending the launch; only a
    folder of tables has to be given under the patch's name.
    """
    if ARMS[arm] is None:
        return None
    from overlay.catalog import load_catalog

    exactness, only = ARMS[arm]  # type: ignore[misc]
    patches: dict[str, Any] = {} if only is None else {name: False for name in load_catalog() if name not in only}
    if tables is not None and exactness == "rounding":
        patches[TILES] = {"tables": str(tables.resolve())}
    return {"profile": "auto", "exactness": exactness, "patches": patches}


def command(arm: str, program: list[str], run: Path, tables: Path | None = None) -> list[str]:
    """The command that starts ``program`` (the words behind the interpreter) as this arm.

    run: the folder for the receipts, emptied here. The settings are written beside it.
    """
    shutil.rmtree(run, ignore_errors=True)
    chosen = settings(arm, tables)
    if chosen is None:
        return [sys.executable, *program]
    run.mkdir(parents=True)
    file = run.with_name(f"{run.name}.yaml")
    file.write_text(json.dumps(chosen, indent=1))  # JSON is YAML
    launch = [sys.executable, str(ROOT / "launch.py"), "--overlay-config", str(file), "--overlay-run-dir", str(run)]
    return [*launch, "--overlay-exec", "--", sys.executable, *program]


def environment(**added: str) -> dict[str, str]:
    """This process's environment without what an outer launch put there, and with ``added``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OVERLAY_") or name == "OVERLAY_CACHE"}
    return {**own, **added}


def proof(arm: str, run: Path) -> dict[str, Any]:
    """What the arm's processes say of themselves, and under ``problems`` what makes the arm's figures worthless.

    Keys: ``digest``, ``runner``, ``processes`` (role of each), ``in_force`` (id -> ``{"builds", "counters"}``), ``elsewhere``
    (id -> why it is not for this engine), ``not_in_force`` (id -> reason), ``problems``.
    """
    found: dict[str, Any] = {"in_force": {}, "elsewhere": {}, "not_in_force": {}, "problems": []}
    problems: list[str] = found["problems"]
    if ARMS[arm] is None:
        if run.exists():
            problems.append("a stock process left receipts of the overlay")
        return found
    try:
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        problems.append("the launcher kept no plan: it ended before it started the program")
        return found
    from overlay.catalog import load_catalog
    from overlay.ledger import read_run
    from overlay.spec import ENGINE, WORKER

    receipts, counters = read_run(str(run))
    workers = [receipt for receipt in receipts if "worker" in receipt["role"]]
    engines = [receipt for receipt in receipts if "engine" in receipt["role"]]
    found["digest"] = plan["digest"]
    found["runner"] = workers[0].get("runner") if workers else None
    found["processes"] = sorted(receipt["role"] for receipt in receipts)
    if not workers:
        problems.append("no worker process left a receipt")
    if len({receipt["digest"] for receipt in receipts} | {plan["digest"]}) > 1:
        problems.append("the processes do not run one plan")
    catalog = load_catalog()
    for entry in plan["patches"]:
        name = entry["id"]
        if entry["verdict"] != "apply":
            if name in NEEDED.get(arm, ()):
                found["not_in_force"][name] = f"{entry['verdict']}: {entry['reason']}"
            continue
        process = catalog[name].patch.process
        where = {WORKER: workers, ENGINE: engines}.get(process, receipts)
        reason = None
        if entry["kind"] != "config":
            reason = _missing(name, where, verified=process == WORKER)
        if reason is None:
            builds = {build for receipt in where for build in receipt["patches"].get(name, {}).get("builds", {}).values()}
            found["in_force"][name] = {"builds": sorted(builds), "counters": _sum(counters, name)}
        elif reason.startswith(ELSEWHERE) and name not in NEEDED.get(arm, ()):
            found["elsewhere"][name] = reason
        else:
            found["not_in_force"][name] = reason
    problems += [f"{name} NOT IN FORCE: {reason}" for name, reason in found["not_in_force"].items()]
    if not found["in_force"]:
        problems.append("no patch is in force")
    for name in NEEDED.get(arm, ()):
        if name in found["in_force"] and not found["in_force"][name]["counters"].get("hit"):
            problems.append(f"{name} is in force and its fast path never ran")
    return found


def _missing(name: str, receipts: list[dict[str, Any]], verified: bool) -> str | None:
    """Why a patch is not in force in one of these processes; None where it is in all of them.

    verified: it must have been proven on the live worker too.
    """
    for receipt in receipts:
        state = receipt["patches"].get(name, {})
        if state.get("state") != "applied":
            return state.get("reason") or f"its targets were never imported here (state: {state.get('state')})"
        if verified and not state.get("verified"):
            return "applied, but never verified on the live worker"
    return None if receipts else "the process it belongs to left no receipt"


def _sum(counters: dict[int, dict[str, dict[str, int]]], name: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for patches in counters.values():
        for event, count in patches.get(name, {}).items():
            total[event] = total.get(event, 0) + count
    return dict(sorted(total.items()))


def describe(said: dict[str, Any]) -> str:
    """One line of a proof for a person: what is in force with its hits, what is not for this engine, and problems."""
    force = [f"{name} ({entry['counters'].get('hit', 0)} hits)" for name, entry in said["in_force"].items()]
    line = f"in force: {', '.join(force) or 'none'}"
    if said["elsewhere"]:
        line += f"; not for this engine: {', '.join(said['elsewhere'])}"
    return line


def warn(name: str, problems: Iterable[str]) -> None:
    """Problems of an arm, where nobody overlooks them."""
    for problem in problems:
        print(f"!!! {name}: {problem}", flush=True)
