"""Kept verdicts of comparisons (``ab_runs/results/*.yaml``), asked for one thing: what do they say of this service?

A record speaks of a service where hardware, model and build are the same. It speaks of one patch where the two arms
differ by that patch alone; what a whole set did is shown and switches nothing off. Standard library and YAML only: the
launcher reads this.

A user ignores all records with ``records: false`` or ``--overlay-ignore-records``, one by deleting its file or by setting
``ignored: true`` in it, and one patch's by naming the patch (``--overlay-patches +id``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "ab_runs" / "results"

# What must be equal for a record to speak of a service, by dotted fact. Paths and names of a checkpoint are left out: the same
# model lies elsewhere on every machine.
SAME = (
    "hardware.platform",
    "hardware.arch",
    "hardware.name",
    "model.architectures",
    "model.hidden_size",
    "model.num_layers",
    "model.vocab_size",
    "model.dtype",
    "model.quantization",
    "build.distribution",
    "build.version",
    "build.plugins",
)


@dataclass(frozen=True)
class Kept:
    """The records of a folder, oldest first, and the files that could not be read."""

    records: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def load(folder: Path | None = None) -> Kept:
    """Every record of ``folder``. A file that is broken becomes a problem, never an error: a launch goes on. Results of
    another kind (no ``subject`` in them) lie there as well and are passed over.
    """
    import yaml

    records, problems = [], []
    for path in sorted((folder or FOLDER).glob("*.yaml")):
        try:
            content = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (OSError, ValueError, yaml.YAMLError) as error:
            problems.append(f"{path}: {error}")
            continue
        if isinstance(content, dict) and "subject" not in content:
            continue
        arms = content.get("arms") if isinstance(content, dict) else None
        sound = isinstance(arms, dict) and all(isinstance(arm, dict) for arm in arms.values())
        if not sound or not isinstance(content.get("subject"), dict):
            problems.append(f"{path}: is no record of a comparison (no 'subject' and 'arms')")
            continue
        records.append({"id": path.stem, **content})
    return Kept(sorted(records, key=lambda record: str(record.get("date", ""))), problems)


def subject(facts: Any) -> dict[str, Any]:
    """What a record must share with these facts: dotted fact -> plain value."""
    found = {}
    for path in SAME:
        value = facts.get(path)
        if isinstance(value, Mapping):
            value = {str(key): str(part) for key, part in sorted(value.items())}
        found[path] = list(value) if isinstance(value, (list, tuple)) else value
    return found


def matching(facts: Any, folder: Path | None = None) -> list[dict[str, Any]]:
    """The records that speak of this service and are not ignored, oldest first."""
    wanted = subject(facts)
    return [r for r in load(folder).records if r["subject"] == wanted and not r.get("ignored")]


def single(arm: Mapping[str, Any]) -> tuple[str, bool] | None:
    """The one patch in which an arm differs from its base, and whether the arm has it (or lacks it).

    None for sets, and where a patch of both arms has other options or another source.
    """
    added, removed = list(arm.get("added") or ()), list(arm.get("removed") or ())
    if len(added) + len(removed) != 1 or arm.get("changed"):
        return None
    return (added or removed)[0], bool(added)


def says(arm: Mapping[str, Any]) -> str:
    """What an arm's outcome says of its single patch: ``slower``, ``faster``, ``divergent``, ``no difference``..."""
    outcome = str(arm.get("outcome"))
    found = single(arm)
    if found is not None and not found[1]:  # the arm lacks the patch: the other way round
        return {"slower": "faster", "faster": "slower"}.get(outcome, outcome)
    return outcome


def line(record: Mapping[str, Any]) -> str:
    """One record as one line for a person."""
    parts = []
    for name, arm in record["arms"].items():
        signs = {"added": "+", "removed": "-", "changed": "~"}
        change = ", ".join(f"{sign}{patch}" for key, sign in signs.items() for patch in arm.get(key) or ())
        parts.append(f"{name} ({change}): {arm.get('outcome')}{_span(arm)}")
    return f"{record['id']}: {'; '.join(parts)}" + (" [ignored]" if record.get("ignored") else "")


def _span(arm: Mapping[str, Any]) -> str:
    effect = (arm.get("effects") or {}).get(arm.get("primary", "mean_tpot")) or {}
    if effect.get("low") is None:
        return ""
    return f" {effect['estimate']:+.2%} [{effect['low']:+.2%}, {effect['high']:+.2%}]"


def against(facts: Any, folder: Path | None = None) -> dict[str, str]:
    """patch -> reason to leave it off: a kept comparison on this hardware, model and build calls it slower or divergent.

    A later record of the same patch under the same load takes the place of an earlier one. Comparisons that were not valid
    say nothing.
    """
    latest: dict[tuple[str, str], tuple[str, str]] = {}
    for record in matching(facts, folder):
        for arm in record["arms"].values():
            found = single(arm)
            if found is None or not record.get("valid", False) or arm.get("outcome") in ("invalid", "undecided"):
                continue
            verdict = says(arm)
            reason = f"{verdict}{_span(arm) if found[1] else ''} ({record['id']})"
            latest[found[0], str(record.get("workload"))] = (verdict, reason)
    said: dict[str, str] = {}
    for (patch, _), (verdict, reason) in latest.items():
        if verdict in ("slower", "divergent"):
            said[patch] = f"{said[patch]}; {reason}" if patch in said else reason
    return said


def lines(facts: Any, folder: Path | None = None) -> list[str]:
    """Every record that speaks of this service, for a plan to show."""
    return [line(record) for record in matching(facts, folder)]
