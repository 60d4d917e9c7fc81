"""Writing the record of a verdict: small, without paths or host names, one YAML file that nobody overwrites.

``overlay.records`` reads them for the launcher.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ab_runs.store import write_text
from overlay.facts import Build, Facts, Hardware, Model
from overlay.records import subject

FORMAT = 1


def _facts(verdict: Mapping[str, Any]) -> Facts:
    """The facts of a verdict as the launcher has them, so that both make the same subject."""

    def only(kind: type, values: Mapping[str, Any] | None) -> Any:
        known = {name: value for name, value in (values or {}).items() if name in kind.__dataclass_fields__}
        return kind(**known)

    return Facts(
        build=only(Build, verdict.get("build")),
        hardware=only(Hardware, verdict.get("hardware")),
        model=only(Model, verdict.get("model")),
    )


def _number(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def make(verdict: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one verdict (``judge.judge``)."""
    workload = {key: value for key, value in spec["workload"].items() if value not in (None, (), [])}
    arms = {}
    for name, arm in verdict["arms"].items():
        effects = {
            figure: {key: _number(effect.get(key)) for key in ("estimate", "low", "high", "confidence", "verdict")}
            for figure, effect in arm["effects"].items()
        }
        answers = arm["answers"]
        arms[name] = {
            "added": arm["added"],
            "removed": arm["removed"],
            "changed": arm["changed"],
            "exactness": arm["exactness"],
            "outcome": arm["outcome"],
            "summary": arm["summary"],
            "primary": spec["acceptance"]["primary"],
            "effects": effects,
            "answers": {
                key: answers.get(key) for key in ("verdict", "acceptable", "counts", "quality") if key in answers
            },
        }
    return {
        "format": FORMAT,
        "name": verdict["name"],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "subject": subject(_facts(verdict)),
        "torch": (verdict.get("build") or {}).get("torch"),
        "base": {"name": verdict["base"], "patches": verdict["patches"][verdict["base"]]},
        "patches": {name: verdict["patches"][name] for name in verdict["arms"]},
        "workload": workload,
        "flags": list(spec["flags"]),
        "order": spec["order"],
        "boots": {name: sum(boot["arm"] == name for boot in verdict["boots"]) for name in spec["arms"]},
        "margin": spec["acceptance"]["margin"],
        "control": {figure: _number(value) for figure, value in verdict["control"].items()},
        "valid": verdict["valid"],
        "violations": sorted({violation["rule"] for violation in verdict["violations"]}),
        "arms": arms,
    }


def dump(record: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(record))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def write(path: Path, record: Mapping[str, Any]) -> None:
    write_text(path, dump(record))


def keep(record: Mapping[str, Any], folder: Path) -> Path:
    """Put a record into the folder of results under a name of its own. The file."""
    text = dump(record)
    what = record["subject"]
    hardware = str(what.get("hardware.arch") or what.get("hardware.platform") or "unknown")
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    words = f"{record['date'][:10]}-{record['name']}-{hardware}-{what.get('build.version') or 'unknown'}-{digest}"
    safe = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in words)
    path = folder / f"{safe}.yaml"
    write_text(path, text)
    return path
