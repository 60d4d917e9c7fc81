"""Which patch of a set did it: leave-one-out for the speed of each, bisection for the one that changes or slows.

Both make specs out of a spec, so that each boot is measured, judged and kept like any other comparison's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ab_runs.spec import Spec, SpecError

BAD, GOOD, UNTESTABLE = "bad", "good", "untestable"


def _set(spec: Spec, name: str | None) -> tuple[str, tuple[str, ...]]:
    """The arm to take apart and its patches in the order written. Raises SpecError where it is no plain set."""
    name = name or list(spec.arms)[-1]
    if name not in spec.arms:
        raise SpecError(f"--arm: {name!r} is no arm of {spec.name}; there are {', '.join(spec.arms)}")
    arm = spec.arms[name]
    if arm.only is None:
        raise SpecError(f"arms.{name}: name its patches with only: [ids] to take it apart")
    if len(arm.only) < 2:
        raise SpecError(f"arms.{name}: has {len(arm.only)} patch, so there is nothing to take apart")
    return name, arm.only


def leave_one_out(spec: Spec, arm: str | None) -> Spec:
    """A comparison of the whole set (the base) against the set without each of its patches.

    An arm that is slower than the base lacks a patch that helps there.
    """
    name, patches = _set(spec, arm)
    arms = {"all": spec.arms[name]}
    for patch in patches:
        rest = tuple(p for p in patches if p != patch)
        arms[f"without-{patch}"] = spec.arms[name].model_copy(update={"only": rest})
    made = spec.model_copy(update={"name": f"{spec.name}-leave-one-out", "arms": arms})
    return Spec.model_validate(made.model_dump())


def contributions(folder: Path) -> str:
    """What each patch contributes within the set, from a judged leave-one-out run, as a table for a person."""
    from ab_runs.store import read_json

    verdict = read_json(folder / "verdict.json")
    lines = ["what the set loses without each patch (TPOT mean; positive: the patch helps)"]
    for name, arm in verdict["arms"].items():
        effect = arm["effects"]["mean_tpot"]
        if effect.get("low") is None:
            lines.append(f"  {name.removeprefix('without-'):<28} {arm['outcome']}")
            continue
        span = f"{effect['estimate']:+.2%} [{effect['low']:+.2%}, {effect['high']:+.2%}]"
        lines.append(f"  {name.removeprefix('without-'):<28} {span}  without it: {arm['outcome']}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Culprit:
    """What a bisection found. patch: None where the whole set is good. before: the patches that were there with it.
    alone: what it does without them (``bad``: it alone is enough). tested: subset -> outcome.
    """

    patch: str | None
    before: tuple[str, ...]
    alone: str | None
    tested: dict[tuple[str, ...], str]

    def __str__(self) -> str:
        if self.patch is None:
            said = "no patch: the whole set is good" if GOOD in self.tested.values() else "no patch can be named"
        elif self.alone == BAD:
            said = f"{self.patch}: it alone is enough"
        else:
            said = f"{self.patch}: bad together with {', '.join(self.before) or 'nothing'}, alone {self.alone}"
        trail = "\n".join(
            f"  {outcome:<11} {', '.join(subset) or 'no patch'}" for subset, outcome in self.tested.items()
        )
        return f"{said}\ntested:\n{trail}"


def search(patches: Sequence[str], test: Callable[[tuple[str, ...]], str]) -> Culprit:
    """The patch whose coming makes the growing set bad: the shortest prefix of ``patches`` that is bad ends with it.

    test: subset -> ``bad``, ``good`` or ``untestable`` (a subset whose plan refuses, because one patch requires
    another). The empty set is good by definition of the base. About log2(n) + 2 tests; an untestable prefix is passed
    over to the next.
    """
    patches = tuple(patches)
    tested: dict[tuple[str, ...], str] = {}

    def outcome(subset: tuple[str, ...]) -> str:
        if subset not in tested:
            tested[subset] = test(subset)
        return tested[subset]

    if outcome(patches) != BAD:
        return Culprit(None, (), None, tested)
    good, bad = 0, len(patches)  # prefix lengths: good is good, bad is bad
    while bad - good > 1:
        middle = (good + bad) // 2
        at = [middle, *range(middle + 1, bad), *range(middle - 1, good, -1)]
        found = next((n for n in at if outcome(patches[:n]) != UNTESTABLE), None)
        if found is None:
            return Culprit(None, (), None, tested)
        if outcome(patches[:found]) == BAD:
            bad = found
        else:
            good = found
    patch, before = patches[bad - 1], patches[: bad - 1]
    alone = BAD if not before else outcome((patch,))
    return Culprit(patch, before, alone, tested)


def bisect(spec: Spec, arm: str | None, what: str, folder: Path) -> Culprit:
    """Search an arm's patches for the one that changes the answers (``answers``) or is slower (``speed``).

    Each subset is a comparison of its own against the spec's base, in a folder of its own under ``folder``, so that an
    interrupted search resumes. For answers, two boots an arm are enough.
    """
    name, patches = _set(spec, arm)
    base = spec.arms[spec.base]

    def test(subset: tuple[str, ...]) -> str:
        arms = {spec.base: base, "subset": spec.arms[name].model_copy(update={"only": subset})}
        changes: dict[str, Any] = {"name": f"{spec.name}-bisect", "arms": arms}
        if what == "answers":
            changes |= {"boots": 2, "acceptance": spec.acceptance.model_copy(update={"min_boots": 1})}
        return judge_subset(Spec.model_validate(spec.model_copy(update=changes).model_dump()), folder, subset, what)

    return search(patches, test)


def judge_subset(spec: Spec, folder: Path, subset: tuple[str, ...], what: str) -> str:
    """Measure and judge one subset of a bisection; its outcome."""
    import hashlib

    from ab_runs import exactness, runner
    from ab_runs.cli import finish
    from ab_runs.plans import PlanError
    from ab_runs.store import Store, read_json

    place = folder / hashlib.sha256(",".join(subset).encode()).hexdigest()[:12]
    runner.to_stderr(f"subset {', '.join(subset)} in {place.name}")
    if Store(place).finished:
        verdict = read_json(place / "verdict.json")
    else:
        try:
            runner.run(spec, place)
        except PlanError as error:
            runner.to_stderr(f"untestable: {error}")
            return UNTESTABLE
        verdict = finish(place, None)
    result = verdict["arms"]["subset"]
    if what == "answers":
        answers = result["answers"]
        if not answers["tested"] or answers["verdict"] == exactness.UNTESTABLE:
            return UNTESTABLE
        return GOOD if answers["acceptable"] else BAD
    if result["outcome"] in ("invalid", "undecided"):
        return UNTESTABLE
    return BAD if result["outcome"] == "slower" else GOOD
