"""Arms of a GPU comparison as the product starts them: ``launch.py --overlay-exec -- PROGRAM``; ``stock`` is the program alone.

Afterwards ``proof`` reads what the arm's processes said of themselves (plan, receipts, counters) and names every patch that
should have been in force and was not: such an arm's figures say nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

TILES = "gemm-tiles"
FUSED = ("gated-mlp-llama", "gated-mlp-qwen2", "gated-mlp-qwen3-5")
NORMED = ("normed-layer-qwen3",)


@dataclass(frozen=True)
class Arm:
    """The loosest class allowed; the patches that may be in force (None: all that are on by default), that may not, and that
    are on besides.
    """

    exactness: str
    only: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    besides: tuple[str, ...] = ()


ARMS: dict[str, Arm | None] = {  # None: no launcher
    "stock": None,
    "again": None,  # the control: stock once more
    "host": Arm("bitwise"),
    "tiles": Arm("rounding", (TILES,)),
    "kernels": Arm("rounding", (TILES, *FUSED)),
    "unfused": Arm("rounding", without=FUSED),
    "all": Arm("rounding"),
    "normed": Arm("rounding", besides=NORMED),
}
# What an arm is about: it must be in force and its fast path must have run.
NEEDED = dict.fromkeys(("tiles", "kernels", "unfused", "all"), (TILES,)) | {"normed": (TILES, *NORMED)}
# Where an engine has several ranks. Nothing may use NVLink multicast: on a host whose GPUs others share, a program that does
# can put them out of service. NCCL, PyTorch's symmetric memory and NVSHMEM have switches of their own; vLLM's own
# all-reduce works through CUDA IPC and stays on. FlashInfer's, which vLLM fuses with the norm by default on Hopper, takes
# multicast by itself (backend "mnnvl", which "auto" means): it is off, and ``without_multicast`` leaves out the fusion.
SEVERAL_RANKS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}
# How the overlay says that a patch is not for the engine that came up: no fault of the arm.
ELSEWHERE = ("what came up is not what it is for", "its targets were never imported here")


def settings(arm: str, tables: Path | None = None) -> dict[str, Any] | None:
    """The arm's settings for ``--overlay-config``; None for an arm without the launcher.

    No patch that is on by default is named to be on, so that one that cannot apply is left out and reported rather than ending
    the launch; only a folder of tables has to be given under the patch's name.
    """
    made = ARMS[arm]
    if made is None:
        return None
    from overlay.catalog import load_catalog

    others = load_catalog() if made.only is not None else ()
    patches: dict[str, Any] = {name: False for name in (*others, *made.without) if name not in (made.only or ())}
    patches |= dict.fromkeys(made.besides, True)
    if tables is not None and made.exactness == "rounding":
        patches[TILES] = {"tables": str(tables.resolve())}
    return {"profile": "auto", "exactness": made.exactness, "patches": patches}


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


def environment(ranks: int = 1, **added: str) -> dict[str, str]:
    """This process's environment without what an outer launch put there, and with ``added``; ranks: of the engine."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OVERLAY_") or name == "OVERLAY_CACHE"}
    return {**own, **(SEVERAL_RANKS if ranks > 1 else {}), **added}


def ranks_of(settings: Mapping[str, Any]) -> int:
    """The worker processes of an engine with these settings of vLLM's ``LLM``."""
    return int(settings.get("tensor_parallel_size", 1)) * int(settings.get("pipeline_parallel_size", 1))


def without_multicast(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` of vLLM's ``LLM`` without what the environment cannot switch off where there are several ranks."""
    if ranks_of(settings) == 1:
        return dict(settings)
    given = settings.get("compilation_config") or {}
    passes = {**given.get("pass_config", {}), "fuse_allreduce_rms": False}
    return {**settings, "compilation_config": {**given, "pass_config": passes}}


def proof(arm: str, run: Path, ranks: int = 1) -> dict[str, Any]:
    """What the arm's processes say of themselves, and under ``problems`` what makes the arm's figures worthless.

    ranks: worker processes that the engine must have, each with its own proof. Counters are sums over processes.
    Keys: ``digest``, ``runner``, ``processes`` (role of each), ``in_force`` (id -> ``{"builds", "counters"}``), ``elsewhere``
    (id -> why it, or what it requires, is not for this engine), ``not_in_force`` (id -> reason), ``problems``.
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
    elif len({receipt.get("rank") for receipt in workers}) != ranks or len(workers) != ranks:
        said = ", ".join(str(receipt.get("rank")) for receipt in workers)
        problems.append(f"{ranks} workers were expected, the receipts are of ranks {said}")
    if len({receipt.get("runner") for receipt in workers}) > 1:
        problems.append("the workers do not have one runner")
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
        elif _elsewhere(reason) and name not in NEEDED.get(arm, ()):
            found["elsewhere"][name] = reason
        else:
            found["not_in_force"][name] = reason
    problems += [f"{name} NOT IN FORCE: {reason}" for name, reason in found["not_in_force"].items()]
    if not found["in_force"]:
        problems.append("no patch is in force")
    for name in NEEDED.get(arm, ()):
        idle = [receipt for receipt in workers if not counters.get(receipt["pid"], {}).get(name, {}).get("hit")]
        if name in found["in_force"] and idle:
            where = "" if ranks == 1 else f" on rank {', '.join(str(receipt.get('rank')) for receipt in idle)}"
            problems.append(f"{name} is in force and its fast path never ran{where}")
    return found


def _elsewhere(reason: str) -> bool:
    """Whether a patch is off because the engine is not one for it, or not one for a patch that it requires."""
    from overlay.hooks import UNMET

    while reason.startswith(UNMET):
        reason = reason.partition(": ")[2]  # what is said of the other patch
    return reason.startswith(ELSEWHERE) and "is unknown" not in reason  # what nobody knows excuses nothing


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
