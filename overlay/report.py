"""``python -m overlay report [RUN]``: what every process of a run says of itself."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from overlay import folders
from overlay.ledger import read_run


def latest_run() -> Path | None:
    """The newest run folder of this user, or None."""
    parent = folders.runs()
    runs = sorted(path for path in parent.glob("*-*") if path.is_dir()) if parent.is_dir() else []
    return runs[-1] if runs else None


def render(processes: list[dict[str, Any]], plan: dict[str, Any] | None) -> str:
    """The report as text: verdicts, then each process with its patches and counters."""
    lines = []
    if plan is not None:
        lines.append(f"plan {plan['digest']}  profile {plan['settings']['profile']}  exactness {plan['settings']['exactness']}")
        shown = [patch for patch in plan["patches"] if patch["verdict"] != "inapplicable"]
        lines += [f"  {patch['id']:<28} {patch['verdict']:<12} {patch['reason']}" for patch in shown]
        if rest := len(plan["patches"]) - len(shown):
            lines.append(f"  and {rest} that are not for this build, hardware or model (launch.py --overlay-dry-run says why)")
    for process in processes:
        rank = "" if process.get("rank") is None else f" rank {process['rank']}"
        runner = f"  {process['runner_class']}" if process.get("runner_class") else ""
        who = f"process {process['pid']} on {process['host']}: {process['role']}{rank}"
        lines.append(f"{who}, plan {process['digest']}{runner}")
        counters = process.get("counters", {})
        for patch, state in sorted(process["patches"].items()):
            counts = ", ".join(f"{event} {count}" for event, count in sorted(counters.get(patch, {}).items()))
            reason = f": {state['reason']}" if state.get("reason") else ""
            proof = " (verified on the live worker)" if state.get("verified") else ""
            lines.append(f"  {patch:<28} {state['state']}{proof}{reason}" + (f"  [{counts}]" if counts else ""))
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m overlay report", description=__doc__)
    parser.add_argument("run", nargs="?", type=Path, help="the run's folder (default: the newest)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    folder = args.run or latest_run()
    if folder is None or not folder.is_dir():
        print(f"overlay report: {folder or 'no run on record'}: no such folder", file=sys.stderr)
        return 2
    receipts, counters = read_run(str(folder))
    processes = [{**receipt, "counters": counters.get(receipt["pid"], {})} for receipt in receipts]
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        plan = None
    print(json.dumps({"plan": plan, "processes": processes}, indent=2) if args.json else render(processes, plan))
    return 0 if processes else 1
