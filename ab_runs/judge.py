"""From the files of a run to its verdict, and from nothing else: ``python -m ab_runs judge DIR``.

In this order: is the comparison valid, are the answers the same, is the arm faster, slower, no different, or undecided.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ab_runs import exactness, load, schedule, stats, validity
from ab_runs import plans as planning
from ab_runs.plans import Plan
from ab_runs.spec import Spec, SpecError
from ab_runs.store import Store, StoreError, read_json

# Figure -> (name, unit, whether lower is better), in the order of reports.
FIGURES = {
    "mean_tpot": ("TPOT mean", "ms", True),
    "p99_tpot": ("TPOT p99", "ms", True),
    "mean_ttft": ("TTFT mean", "ms", True),
    "output_throughput": ("output throughput", "tokens/s", False),
}

INVALID, DIVERGENT = "invalid", "divergent"


class Run:
    """What the folder of a run holds: spec, plans, finished boots, and the samples that failed."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.spec = Spec.model_validate(self.store.run()["spec"])
        self.plans = {name: Plan(name, read_json(self.store.path("plans", f"{name}.json"))) for name in self.spec.arms}
        self.boots: list[validity.Boot] = []
        self.failed: list[dict[str, Any]] = []
        self.missing: list[int] = []
        self.unreadable: list[validity.Violation] = []
        for slot in schedule.slots(self.spec):
            record = self.store.sample(slot)
            if record is None:
                self.missing.append(slot.index)
            elif record.get("status") != "ok":
                self.failed.append({"index": slot.index, "arm": slot.arm, **(record.get("reason") or {})})
            else:
                try:
                    bench = load.parse(read_json(self.store.sample_folder(slot) / "bench.json"))
                    bench.figures()
                except (load.BenchError, StoreError) as error:
                    self.unreadable.append(validity.Violation("unreadable-result", slot.arm, str(error), (slot.index,)))
                    continue
                self.boots.append(validity.Boot(slot.index, slot.arm, slot.block, record, bench))

    def of(self, arm: str) -> list[validity.Boot]:
        return [boot for boot in self.boots if boot.arm == arm]

    def read(self, arm: str, name: str) -> list[Any]:
        """``answers.json`` or ``quality.json`` of every boot of an arm that has it."""
        slots = {slot.index: slot for slot in schedule.slots(self.spec)}
        found = []
        for boot in self.of(arm):
            if name in boot.record.get("files", {}):
                found.append(read_json(self.store.sample_folder(slots[boot.index]) / name))
        return found


def judge(folder: Path) -> dict[str, Any]:
    """The verdict on a run's folder as plain data. Raises StoreError where the folder holds no run that can be read."""
    try:
        run = Run(folder)
    except ValueError as error:  # pydantic's
        raise StoreError(f"{folder}/run.json: its spec cannot be read by this version: {error}") from error
    spec = run.spec
    figures = {boot.index: boot.bench.figures() for boot in run.boots}
    violations = [*run.unreadable, *validity.check(spec, run.plans, run.boots, figures, run.failed)]
    base = run.plans[spec.base]
    control = {name: stats.disagreement([figures[boot.index][name] for boot in run.of(spec.base)]) for name in FIGURES}
    arms = {}
    for name in list(spec.arms)[1:]:
        broken = [v for v in violations if v.arm in (name, spec.base, "all")]
        arms[name] = _arm(run, name, base, figures, control, broken)
    return {
        "format": 1,
        "name": spec.name,
        "base": spec.base,
        "complete": not run.missing,
        "valid": not violations,
        "violations": [v.to_dict() for v in violations],
        "notes": _notes(run),
        "boots": [
            {"index": boot.index, "arm": boot.arm, "block": boot.block, **figures[boot.index]} for boot in run.boots
        ],
        "failed": run.failed,
        "missing": run.missing,
        "control": control,
        "hits": {name: _hits(run.of(name)) for name in spec.arms},
        "arms": arms,
        "patches": {
            name: {patch: p.get("source") for patch, p in sorted(plan.applied.items())}
            for name, plan in run.plans.items()
        },
        "build": {k: base.fact(f"build.{k}") for k in ("distribution", "version", "plugins", "torch", "triton")},
        "hardware": base.fact("hardware"),
        "model": base.fact("model"),
    }


def _hits(boots: Sequence[validity.Boot]) -> dict[str, dict[str, int]]:
    """patch -> event -> count over the measured windows of all boots of an arm."""
    total: dict[str, dict[str, int]] = {}
    for boot in boots:
        for patch, events in (boot.window.get("counters") or {}).items():
            for event, count in events.items():
                total.setdefault(patch, {})[event] = total.get(patch, {}).get(event, 0) + count
    return total


def _arm(
    run: Run,
    name: str,
    base: Plan,
    figures: Mapping[int, Mapping[str, float]],
    control: Mapping[str, float | None],
    broken: Sequence[validity.Violation],
) -> dict[str, Any]:
    spec, plan = run.spec, run.plans[name]
    changed = planning.added(base, plan) | {p: base.applied[p] for p in planning.removed(base, plan)}
    kind = planning.loosest(changed)
    answers = _answers(run, name, kind)
    effects = {}
    for figure, (_, _, lower) in FIGURES.items():
        samples = [stats.Boot(boot.arm, boot.block, figures[boot.index][figure]) for boot in run.boots]
        try:
            effect = stats.estimate(samples, spec.base, name, spec.acceptance.confidence)
        except ValueError as error:
            effects[figure] = {"verdict": stats.UNDECIDED, "why": str(error)}
            continue
        decision = stats.decide(effect, control[figure], spec.acceptance.margin, lower)
        effects[figure] = {
            **effect.to_dict(),
            "verdict": decision.verdict,
            "why": decision.why,
            "more_boots": decision.more_boots,
            "p_permutation": stats.permutation(samples, spec.base, name),
        }
    primary = effects[spec.acceptance.primary]
    if broken:
        outcome = INVALID
    elif answers["tested"] and not answers["acceptable"] and answers["verdict"] != exactness.UNTESTABLE:
        outcome = DIVERGENT
    else:
        outcome = primary["verdict"]
    return {
        "added": sorted(plan.applied.keys() - base.applied.keys()),
        "removed": planning.removed(base, plan),
        "changed": sorted(planning.added(base, plan).keys() & base.applied.keys()),  # options or source
        "exactness": kind,
        "answers": answers,
        "effects": effects,
        "outcome": outcome,
        "summary": _summary(spec, name, outcome, primary, answers, broken),
    }


def _answers(run: Run, name: str, kind: str) -> dict[str, Any]:
    """The verdict on an arm's answers, the quality figure, and how many measured answers read the same."""
    spec = run.spec
    base, arm = run.read(spec.base, "answers.json"), run.read(name, "answers.json")
    if not base or not arm:
        found: dict[str, Any] = {"tested": False, "verdict": "not tested", "acceptable": None, "why": "no answers"}
    else:
        sizes = [
            next((b.record.get("engine", {}).get("capture_sizes") for b in run.of(n)), None) for n in (spec.base, name)
        ]
        same = None
        if kind == "batch":
            width = 1 + int(run.plans[name].fact("serving.num_speculative_tokens") or 0)
            same = [
                all(
                    exactness.padded(step, sizes[0] or ()) == exactness.padded(step, sizes[1] or ())
                    for step in (width, answer.get("prompt_tokens") or 1)
                )
                for answer in base[0]
            ]
        judged = exactness.judge(base, arm, near_tie=spec.exactness.near_tie, exactness=kind, same_size=same)
        found = {"tested": True, **judged.to_dict()}
    scores = run.read(spec.base, "quality.json"), run.read(name, "quality.json")
    if all(scores):
        change = exactness.quality_change(*scores, spec.acceptance.confidence)
        kept = change.low is not None and change.low > -spec.exactness.quality_drop
        found["quality"] = {
            "change": change.mean,
            "low": change.low,
            "high": change.high,
            "texts": change.number,
            "allowed_drop": spec.exactness.quality_drop,
            "kept": kept,
        }
        if kind == "rounding" and found["tested"] and not kept:
            found["acceptable"] = False
            found["why"] += f"; the mean log-probability may have dropped by {-(change.low or 0):.4f} nats"
    elif kind == "rounding" and found["tested"]:
        found["why"] += "; no quality figure was measured"
    found["same_texts"] = {
        "base": _same_texts(run.of(spec.base), run.of(spec.base)),
        "arm": _same_texts(run.of(spec.base), run.of(name)),
    }
    return found


def _same_texts(base: Sequence[validity.Boot], boots: Sequence[validity.Boot]) -> list[int] | None:
    """[equal, compared] measured answers of ``boots`` against the first base boot; None where results hold no texts.

    Information, no verdict: under concurrency the base's own answers may vary.
    """
    if not base or not base[0].bench.texts:
        return None
    first = base[0].bench.texts
    pairs = [(a, b) for boot in boots if boot is not base[0] for a, b in zip(first, boot.bench.texts, strict=False)]
    return [sum(a == b for a, b in pairs), len(pairs)] if pairs else None


def _notes(run: Run) -> list[str]:
    notes = [f"boot {f['index']} ({f['arm']}) failed: {f.get('code')}: {f.get('detail')}" for f in run.failed]
    if run.missing:
        notes.append(f"not complete: boots {', '.join(map(str, run.missing))} are missing; run it again to resume")
    for boot in run.boots:
        notes += [f"boot {boot.index} ({boot.arm}): {note}" for note in boot.record.get("notes") or ()]
        load, cores = (
            (boot.record.get("state_before") or {}).get("load"),
            (boot.record.get("machine") or {}).get("cores"),
        )
        if load and cores and load[0] > cores:
            notes.append(
                f"boot {boot.index} ({boot.arm}): the machine was busy before it (load {load[0]:.1f} on {cores} cores)"
            )
        stop = boot.record.get("stop") or {}
        if stop and not stop.get("clean"):
            notes.append(f"boot {boot.index} ({boot.arm}) did not stop cleanly (exit code {stop.get('exit_code')})")
    return notes


def _summary(
    spec: Spec,
    name: str,
    outcome: str,
    primary: Mapping[str, Any],
    answers: Mapping[str, Any],
    broken: Sequence[validity.Violation],
) -> str:
    """One sentence for a person."""
    figure = FIGURES[spec.acceptance.primary][0]
    if outcome == INVALID:
        rules = ", ".join(dict.fromkeys(v.rule for v in broken))
        return f"{name} against {spec.base}: not valid ({rules}); nothing is concluded about speed"
    if outcome == DIVERGENT:
        return f"{name} against {spec.base}: the answers are not what its patches promise: {answers['why']}"
    said = {"identical": "identical answers", "near-tie": "answers that differ in near-ties"}
    same = said.get(str(answers["verdict"]), f"answers {answers['verdict']}")
    if primary.get("low") is None:
        return f"{name} against {spec.base}: {outcome} ({primary['why']}), {same}"
    span = f"{primary['estimate']:+.2%} [{primary['low']:+.2%}, {primary['high']:+.2%}]"
    text = f"{name} against {spec.base}: {figure} {span}: {outcome}"
    if outcome == stats.SAME:
        text += f" larger than {spec.acceptance.margin:.2%}"
    if outcome == stats.UNDECIDED:
        more = primary.get("more_boots")
        text += f" ({primary['why']}; about {more} more boots per arm would decide)" if more else f" ({primary['why']})"
    return f"{text}, {same}"


def to_json(verdict: Mapping[str, Any]) -> str:
    return json.dumps(verdict, indent=1, sort_keys=True)


__all__ = ["FIGURES", "Run", "SpecError", "judge", "to_json"]
