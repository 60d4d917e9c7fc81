"""Carrying a comparison out: plans first, then every boot of the schedule that is not there yet, then the verdict."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ab_runs import machine, plans, schedule
from ab_runs.plans import Plan
from ab_runs.sample import Sample, identity
from ab_runs.schedule import Slot
from ab_runs.server import end_orphan
from ab_runs.spec import Spec
from ab_runs.store import Store, StoreError, read_json, write_json

Say = Callable[[str], None]


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does: the server is stopped, the folder can be resumed."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare(spec: Spec, store: Store, say: Say) -> dict[str, Plan]:
    """The plans of all arms, checked; those of an earlier start of this run must be the same. Raises PlanError."""
    say("plans: asking the launcher for every arm")
    made = plans.make(spec)
    plans.check(made, spec)
    for name, plan in made.items():
        file = store.path("plans", f"{name}.json")
        if file.exists():
            before = Plan(name, read_json(file))
            moved = [str(d) for d in plans.differences(before, plan)][:3]
            if plans.added(before, plan) or plans.removed(before, plan) or moved:
                patches = sorted(plans.added(before, plan)) + plans.removed(before, plan)
                raise StoreError(
                    f"{store.folder}: arm {name!r} is no longer what this run began with "
                    f"({'; '.join(['patch ' + p for p in patches] + moved)}). Choose another folder (--out)"
                )
        else:
            write_json(file, plan.content)
    return made


def scored(spec: Spec, made: dict[str, Plan]) -> bool:
    """Whether the quality figure is wanted: always, never, or where the arms differ by a ``rounding`` patch."""
    if spec.exactness.quality != "auto":
        return spec.exactness.quality == "always"
    base = made[spec.base]
    changed = [plans.added(base, plan) | plans.added(plan, base) for plan in made.values()]
    return any(plans.loosest(patches) == "rounding" for patches in changed)


def run(spec: Spec, folder: Path, say: Say = to_stderr, retry_failed: bool = False) -> Store:
    """Measure every boot of ``spec`` that is not in ``folder`` yet.

    Raises SpecError (and its kinds) before anything is measured, KeyboardInterrupt where it is stopped: then the folder
    can be resumed by the same call.
    """
    store = Store(folder.resolve())
    with store.locked(), stopped_by_signals():
        resumed = store.begin(spec.model_dump(mode="json"))
        made = prepare(spec, store, say)
        here = machine.record(plans.interpreter(spec))
        if not store.path("machine.json").exists():
            write_json(store.path("machine.json"), here)
        all_slots = schedule.slots(spec)
        answers, score = schedule.answering(spec), scored(spec, made)
        if resumed:
            done = sum(store.sample(slot) is not None for slot in all_slots)
            say(f"resuming {store.folder.name}: {done} of {len(all_slots)} boots are there")
        for slot in all_slots:
            before = store.sample(slot)
            if before is not None and (before.get("status") == "ok" or not retry_failed):
                continue
            _measure(spec, made[slot.arm], slot, store, slot.index in answers, score, identity(here), say)
    return store


def _measure(
    spec: Spec, plan: Plan, slot: Slot, store: Store, answer: bool, score: bool, facts: dict[str, Any], say: Say
) -> None:
    folder = store.sample_folder(slot)
    if end_orphan(folder):
        say(f"[{slot.index}] ended the server that an interrupted run left behind")
    aside = store.set_aside(slot)
    if aside is not None:
        say(f"[{slot.index}] an unfinished or cut-off sample was set aside as {aside.name}")
    total = len(schedule.slots(spec))
    label = f"[{slot.index + 1}/{total}] {slot.arm}"
    sample = Sample(
        spec,
        plan,
        slot,
        folder,
        store.path("cache", slot.arm),
        answer,
        score and answer,
        lambda what: say(f"{label}: {what}"),
    )
    began = time.monotonic()
    record = sample.measure(facts)
    store.finish_sample(slot, record, ["bench.json", "answers.json", "quality.json"])
    took = time.monotonic() - began
    if record["status"] == "ok":
        say(f"{label}: done in {took:.0f} s, {_glance(folder)}")
    else:
        reason = record["reason"]
        log = "\n".join(f"    {line}" for line in reason["log"].splitlines()[-15:])
        say(f"{label}: failed after {took:.0f} s: {reason['code']}: {reason['detail']}\n{log}")


def _glance(folder: Path) -> str:
    from ab_runs import load

    try:
        figures = load.parse(read_json(folder / "bench.json")).figures()
    except (load.BenchError, StoreError) as error:
        return str(error)
    return f"TPOT {figures['mean_tpot']:.2f} ms, TTFT {figures['mean_ttft']:.1f} ms"
