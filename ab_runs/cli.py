"""``python -m ab_runs``: the command line.

Exit codes: 0 done (whatever the verdict says), 1 done but the comparison is not valid, 2 wrong command line, spec or
folder, 130 stopped (the folder can be resumed).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ab_runs.presets import PRESETS
from ab_runs.spec import Spec, SpecError, load, shipped

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
RESULTS = HERE / "results"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m ab_runs", description="Compare patch sets of one server.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def spec_flags(command: argparse.ArgumentParser) -> None:
        command.add_argument("spec", type=Path, help=f"a spec file, or one of: {', '.join(shipped())}")
        command.add_argument("--model", help="the model, in place of the spec's")
        command.add_argument("--workload", choices=list(PRESETS), metavar="PRESET", help="a preset (see `presets`)")
        command.add_argument("--boots", type=int, help="boots per arm, in place of the spec's")
        command.add_argument("--python", help="the interpreter that has vLLM (default: this one)")
        command.add_argument(
            "--out",
            type=Path,
            help="the run's folder (default: the first of ab_runs/out/NAME, NAME-2, … that is not finished)",
        )
        command.add_argument("--results", type=Path, default=RESULTS, help="where the record of the verdict goes")
        command.add_argument("--no-record", action="store_true", help="keep no record of the verdict")
        command.add_argument("--retry-failed", action="store_true", help="measure boots again whose server failed")

    run = commands.add_parser("run", help="measure, judge, report; resumes a run that was interrupted")
    spec_flags(run)
    run.add_argument("--dry-run", action="store_true", help="print the schedule and its length, start nothing")

    judge = commands.add_parser("judge", help="recompute the verdict from the files alone and print it as JSON")
    judge.add_argument("folder", type=Path)

    report = commands.add_parser(
        "report", help="write report.md and report.html again; closes a run measured elsewhere"
    )
    report.add_argument("folder", type=Path)
    report.add_argument("--results", type=Path, default=RESULTS, help="where the record of a run closed by this goes")
    report.add_argument("--no-record", action="store_true", help="keep no record of the verdict")

    diff = commands.add_parser("diff", help="what two patch sets (launcher YAML) differ in")
    diff.add_argument("first", type=Path)
    diff.add_argument("second", type=Path)
    diff.add_argument("--model", help="compare the resolved plans for this model as well")
    diff.add_argument("--flags", default="", help="vllm serve flags for the plans, one string")
    diff.add_argument("--json", action="store_true")

    leave = commands.add_parser("leave-one-out", help="what each patch of an arm contributes to it")
    spec_flags(leave)
    leave.add_argument("--arm", help="the arm to take apart (default: the last one)")
    leave.add_argument("--dry-run", action="store_true", help="print the schedule and its length, start nothing")

    bisect = commands.add_parser("bisect", help="the patch of an arm that changes the answers or loses the speed")
    spec_flags(bisect)
    bisect.add_argument("--arm", help="the arm to search (default: the last one)")
    bisect.add_argument("--for", dest="what", choices=("answers", "speed"), required=True)

    records = commands.add_parser("records", help="the kept verdicts")
    records.add_argument("--results", type=Path, default=RESULTS)

    micro = commands.add_parser("micro", help="a patch's functions, original against patched, A B A")
    micro.add_argument("patch")
    micro.add_argument("--device", default="cpu")
    micro.add_argument("--step-ms", type=float, help="time of one step of the service: prints the Amdahl bound")
    micro.add_argument("--seconds", type=float, default=1.0, help="length of each of A, B, A of one case")
    micro.add_argument("--patch-dir", type=Path, action="append", default=[], help="a further folder of patches")
    micro.add_argument("--json", action="store_true")

    commands.add_parser("presets", help="the named workloads")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return int(globals()[f"_{args.command.replace('-', '_')}"](args) or 0)
    except SpecError as error:
        print(f"ab_runs: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ab_runs: stopped; the same command resumes where it stopped", file=sys.stderr)
        return 130


def _spec(args: argparse.Namespace) -> Spec:
    spec = load(args.spec, model=args.model, workload=args.workload, boots=args.boots)
    if args.python:
        spec = spec.model_copy(update={"server": spec.server.model_copy(update={"python": args.python})})
    return spec


def _measure(spec: Spec, args: argparse.Namespace) -> int:
    """Measure, then judge, report and record."""
    from ab_runs import runner

    store = runner.run(spec, args.out or unfinished(spec.name), retry_failed=args.retry_failed)
    verdict = finish(store.folder, None if args.no_record else args.results)
    for arm in verdict["arms"].values():
        print(arm["summary"])
    return 0 if verdict["valid"] else 1


def unfinished(name: str) -> Path:
    """Where a run of this name goes without ``--out``: its first folder that is not finished (``NAME``, ``NAME-2``...)."""
    from ab_runs.store import Store

    number = 1
    while Store(folder := OUT / (name if number == 1 else f"{name}-{number}")).finished:
        number += 1
    return folder


def finish(folder: Path, results: Path | None) -> dict[str, Any]:
    """Judge a measured run, write its reports and its record, and close the folder."""
    from ab_runs import records, report
    from ab_runs.judge import judge
    from ab_runs.runner import to_stderr
    from ab_runs.store import Store, write_json

    try:
        verdict = judge(folder)
    except ImportError as error:
        raise SpecError(
            f"{folder} is measured; to judge it install {error.name}, then run the same command again"
        ) from error
    store = Store(folder)
    write_json(store.path("verdict.json"), verdict)
    for line in report.write(folder, verdict):
        to_stderr(line)
    record = records.make(verdict, store.run()["spec"])
    records.write(store.path("record.yaml"), record)
    if results is not None:
        to_stderr(f"record: {records.keep(record, results)}")
    store.finish(
        {"valid": verdict["valid"], "outcomes": {name: arm["outcome"] for name, arm in verdict["arms"].items()}}
    )
    return verdict


def _run(args: argparse.Namespace) -> int:
    spec = _spec(args)
    if args.dry_run:
        return _describe(spec, args)
    return _measure(spec, args)


def _describe(spec: Spec, args: argparse.Namespace) -> int:
    from ab_runs import schedule
    from ab_runs.store import Store

    store = Store(args.out or unfinished(spec.name))
    done = [store.sample(slot) for slot in schedule.slots(spec)]
    measured = [sum(sample["seconds"].values()) for sample in done if sample and sample.get("status") == "ok"]
    print(schedule.describe(spec, measured))
    return 0


def _judge(args: argparse.Namespace) -> int:
    from ab_runs.judge import judge, to_json

    try:
        print(to_json(judge(args.folder)))
    except ImportError as error:
        raise SpecError(f"judge needs {error.name}: pip install {error.name}") from error
    return 0


def _report(args: argparse.Namespace) -> int:
    """Reports again; a run that was measured where scipy is missing is judged, recorded and closed here."""
    from ab_runs import report
    from ab_runs.judge import judge
    from ab_runs.store import Store

    verdict = judge(args.folder)
    if verdict["complete"] and not Store(args.folder).finished:
        finish(args.folder, None if args.no_record else args.results)
        return 0
    for line in report.write(args.folder, verdict):
        print(line)
    return 0


def _diff(args: argparse.Namespace) -> int:
    from ab_runs import diff

    print(diff.run(args.first, args.second, args.model, args.flags, args.json))
    return 0


def _leave_one_out(args: argparse.Namespace) -> int:
    from ab_runs import attribute

    spec = attribute.leave_one_out(_spec(args), args.arm)
    if args.dry_run:
        return _describe(spec, args)
    args.out = args.out or unfinished(spec.name)
    code = _measure(spec, args)
    print(attribute.contributions(args.out))
    return code


def _bisect(args: argparse.Namespace) -> int:
    from ab_runs import attribute

    spec = _spec(args)
    found = attribute.bisect(spec, args.arm, args.what, args.out or OUT / f"{spec.name}-bisect-{args.what}")
    print(found)
    return 0


def _records(args: argparse.Namespace) -> int:
    from overlay import records

    kept = records.load(args.results)
    for problem in kept.problems:
        print(f"unreadable: {problem}", file=sys.stderr)
    for record in kept.records:
        print(records.line(record))
    if not kept.records:
        print(f"no records in {args.results}")
    return 0


def _micro(args: argparse.Namespace) -> int:
    from ab_runs import micro

    return micro.command(args.patch, args.device, args.step_ms, args.seconds, args.patch_dir, args.json)


def _presets(args: argparse.Namespace) -> int:
    for name, (what, _) in PRESETS.items():
        print(f"{name:<16} {what}")
    return 0
