"""What two patch sets differ in: their YAML files key by key, and, for a model, what the launcher makes of each."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from ab_runs import plans
from ab_runs.spec import Arm, Spec, SpecError

_ABSENT = "(not set)"


def read(path: Path) -> dict[str, Any]:
    """A launcher YAML as plain data. Raises SpecError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: is no YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise SpecError(f"{path}: expected a mapping of settings")
    return content or {}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        inner = [_flat(part, f"{prefix}.{key}" if prefix else str(key)) for key, part in value.items()]
        return {key: part for flat in inner for key, part in flat.items()}
    return {prefix: value} if prefix else {}


def settings(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, first, second) of every setting that differs. A patch given as ``true`` and one given with options
    differ by the options alone.
    """
    one, other = _flat(_plain(first)), _flat(_plain(second))
    return [
        (key, one.get(key, _ABSENT), other.get(key, _ABSENT))
        for key in sorted(one.keys() | other.keys())
        if one.get(key, _ABSENT) != other.get(key, _ABSENT)
    ]


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    patches = content.get("patches")
    if not isinstance(patches, dict):
        return content
    spelled = {
        name: {"on": True, **value} if isinstance(value, dict) else {"on": value} for name, value in patches.items()
    }
    return {**content, "patches": spelled}


def resolved(first: Path, second: Path, model: str, flags: str) -> dict[str, Any]:
    """What the launcher plans for both files: verdicts that differ, and what else does."""
    arms = {"first": Arm(config=str(first.resolve())), "second": Arm(config=str(second.resolve()))}
    load = {"input_len": 1}
    spec = Spec.model_validate(
        {"name": "diff", "model": model, "flags": shlex.split(flags), "arms": arms, "workload": load}
    )
    made = plans.make(spec)
    one, other = made["first"], made["second"]
    verdicts = [{p["id"]: f"{p['verdict']}: {p['reason']}" for p in plan.content["patches"]} for plan in (one, other)]
    return {
        "patches": {
            patch: [verdicts[0].get(patch, _ABSENT), verdicts[1].get(patch, _ABSENT)]
            for patch in sorted(verdicts[0].keys() | verdicts[1].keys())
            if verdicts[0].get(patch) != verdicts[1].get(patch)
        },
        "options": sorted(plans.added(one, other).keys() & one.applied.keys()),
        "other": [str(difference) for difference in plans.differences(one, other)],
        "digests": [one.digest, other.digest],
    }


def run(first: Path, second: Path, model: str | None, flags: str, as_json: bool) -> str:
    """The differences as text or JSON."""
    found: dict[str, Any] = {"settings": [list(row) for row in settings(read(first), read(second))]}
    if model:
        found["plans"] = resolved(first, second, model, flags)
    if as_json:
        return json.dumps(found, indent=1, sort_keys=True, default=str)
    lines = [f"{key}: {one} | {other}" for key, one, other in found["settings"]] or ["the same settings"]
    if model:
        planned = found["plans"]
        lines += ["", f"plans for {model}: {planned['digests'][0]} | {planned['digests'][1]}"]
        lines += [f"  {patch}: {one} | {other}" for patch, (one, other) in planned["patches"].items()]
        lines += [f"  {patch}: applied by both, with other options" for patch in planned["options"]]
        lines += [f"  {text}" for text in planned["other"]]
        if not (planned["patches"] or planned["options"] or planned["other"]):
            lines.append("  the same plan")
    return "\n".join(lines)
