"""Which arm is booted when, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ab_runs.spec import Spec


@dataclass(frozen=True)
class Slot:
    """One boot of the schedule. index: its place, from 0. block: the pass of the order it belongs to."""

    index: int
    arm: str
    block: int

    @property
    def folder(self) -> str:
        return f"{self.index:03d}-{self.arm}"


def order(kind: str, arms: Sequence[str]) -> list[str]:
    """One pass. ``ABBA``: forth and back, each arm twice, so that linear drift cancels. ``ABA``: the base before and
    after every other arm, which then has one boot a pass.
    """
    if kind == "ABBA":
        return [*arms, *reversed(arms)]
    base, *others = arms
    return [base] + [name for other in others for name in (other, base)]


def slots(spec: Spec) -> list[Slot]:
    """All boots of a comparison, in running order."""
    one = order(spec.order, list(spec.arms))
    passes = spec.boots // one.count(list(spec.arms)[-1])
    return [Slot(index, arm, index // len(one)) for index, arm in enumerate(one * passes)]


def answering(spec: Spec) -> set[int]:
    """Indices of the boots that answer the exactness protocol: spread over each arm's boots, first and last included."""
    chosen: set[int] = set()
    for name in spec.arms:
        mine = [slot.index for slot in slots(spec) if slot.arm == name]
        wanted = min(spec.exactness.boots, len(mine))
        if wanted == 1:
            chosen.add(mine[0])
        chosen |= {mine[round(i * (len(mine) - 1) / (wanted - 1))] for i in range(wanted)} if wanted > 1 else set()
    return chosen


# Assumed where nothing was measured yet, in seconds; they only serve the estimate that --dry-run prints.
BOOT, PER_TOKEN, CLIENT = 60.0, 0.05, 15.0


def seconds(spec: Spec, answered: int) -> float:
    """A rough length of one boot before any was measured. answered: requests of the exactness protocol in it."""
    load = spec.workload
    rounds = -(-load.requests // load.concurrency) + -(-load.warmup_requests // load.concurrency)
    answers = answered * spec.exactness.max_tokens * PER_TOKEN
    return BOOT + CLIENT + rounds * load.output_len * PER_TOKEN + answers


def describe(spec: Spec, measured: Sequence[float] = ()) -> str:
    """The schedule and its length as text. measured: seconds of the samples that are already there."""
    all_slots = slots(spec)
    load = spec.workload
    length = f"{load.input_range[0]}-{load.input_range[1]}" if load.input_range else str(load.input_len)
    asked = answering(spec)
    lines = [
        f"{spec.name}: {len(all_slots)} boots, order {spec.order}",
        "arms: " + ", ".join(f"{name}{' (base)' if name == spec.base else ''}" for name in spec.arms),
        f"model: {spec.model}",
        f"flags of every arm: {' '.join(spec.serve_flags)}",
        f"load of each boot: {load.requests} requests of {length} tokens in, {load.output_len} out, "
        f"concurrency {load.concurrency}, temperature {load.temperature:g}, {load.warmup_requests} warm-up requests",
    ]
    total = 0.0
    for slot in all_slots:
        answers = spec.exactness.count if slot.index in asked else 0
        took = sum(measured) / len(measured) if measured else seconds(spec, answers)
        lines.append(
            f"  {slot.index:3d}  block {slot.block}  {slot.arm}" + (f"  + {answers} answers" if answers else "")
        )
        total += took
    source = (
        f"from {len(measured)} finished boots"
        if measured
        else (f"a guess: {BOOT:.0f} s a boot and {PER_TOKEN * 1000:.0f} ms a token, nothing was measured yet")
    )
    lines.append(f"about {total / 60:.0f} minutes ({source})")
    return "\n".join(lines)
