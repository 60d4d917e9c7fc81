"""What the launcher prints: the catalogue, and a plan as text or JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from overlay.catalog import Entry
from overlay.plan import Plan
from overlay.spec import Verdict

SHOWN = (Verdict.APPLY, Verdict.REFUSED, Verdict.OFF, Verdict.SUPERSEDED, Verdict.INAPPLICABLE)  # what matters first


def plan_json(
    plan: Plan, catalog: Mapping[str, Entry], argv: list[str], env: Mapping[str, str]
) -> dict[str, Any]:
    """Stable keys: ``facts``, ``patches``, ``argv``, ``env``, ``digest``, ``settings``, ``notes``."""
    patches = []
    for decision in plan.decisions:
        entry = catalog[decision.id]
        patches.append(
            {
                "id": decision.id,
                "verdict": decision.verdict.value,
                "reason": decision.reason,
                "kind": entry.patch.kind.value,
                "exactness": entry.patch.exactness.value,
                "verified": entry.patch.verified,
                "named": decision.named,
                "options": dict(decision.options),
                "targets": dict(decision.targets),
                "source": entry.source,
                "file": str(entry.file),
                "advert": decision.advert,
                "notes": list(decision.contribution.notes) if decision.contribution else [],
                "contribution": {"args": dict(decision.contribution.args), "env": dict(decision.contribution.env)}
                if decision.contribution
                else None,
            }
        )
    return {
        "facts": plan.facts.to_dict(),
        "settings": {
            "profile": plan.settings.profile,
            "exactness": plan.settings.exactness.value,
            "on_refusal": plan.settings.on_refusal,
            "enabled": plan.settings.enabled,
        },
        "patches": patches,
        "argv": argv,
        "env": dict(env),
        "notes": list(plan.notes),
        "digest": plan.digest,
    }


def print_plan(
    plan: Plan, catalog: Mapping[str, Entry], argv: list[str], env: Mapping[str, str], as_json: bool
) -> None:
    """To standard output."""
    content = plan_json(plan, catalog, argv, env)
    if as_json:
        print(json.dumps(content, indent=2, sort_keys=True, default=str))
        return
    print("Facts")
    for group, values in content["facts"].items():
        if group == "unknown":
            continue
        shown = {k: v for k, v in values.items() if v not in (None, "", (), [], {})}
        print(f"  {group:<9} " + ("; ".join(f"{k} {_short(v)}" for k, v in shown.items()) or "none"))
    for path, reason in sorted(content["facts"]["unknown"].items()):
        print(f"  unknown   {path}: {reason}")
    print(f"Settings\n  {'; '.join(f'{k} {v}' for k, v in content['settings'].items())}")
    print("Patches")
    width = max((len(p["id"]) for p in content["patches"]), default=0)
    rank = {verdict.value: i for i, verdict in enumerate(SHOWN)}
    for patch in sorted(content["patches"], key=lambda patch: rank[patch["verdict"]]):
        print(f"  {patch['id']:<{width}}  {patch['verdict']:<12}  {patch['reason']}")
        if patch["advert"] and patch["verdict"] != "apply":
            print(f"  {'':<{width}}  {'':<12}  measured: {patch['advert']}")
    for note in content["notes"]:
        print(f"Note\n  {note}")
    print(f"Command\n  {shlex.join(argv)}")
    print("Environment added")
    for name, value in sorted(content["env"].items()):
        print(f"  {name}={value}")
    print(f"Digest\n  {content['digest']}")


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def print_catalog(catalog: Mapping[str, Entry], as_json: bool) -> None:
    """Every patch with what it is, to standard output."""
    rows = [
        {
            "id": name,
            "kind": entry.patch.kind.value,
            "exactness": entry.patch.exactness.value,
            "default": entry.patch.default,
            "verified": entry.patch.verified,
            "summary": entry.patch.summary,
            "why": entry.patch.why,
            "remove_when": entry.patch.remove_when,
            "options": {key: option.default for key, option in entry.patch.options.items()},
            "targets": [target.at for target in entry.patch.targets],
            "tests": entry.patch.tests,
            "measured": entry.patch.measured,
            "file": str(entry.file),
        }
        for name, entry in catalog.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=2, sort_keys=True, default=str))
        return
    for row in rows:
        flags = f"{row['kind']}, {row['exactness']}, {'on' if row['default'] else 'off'} by default, {row['verified']}"
        print(f"{row['id']}  ({flags})\n    {row['summary']}\n    {row['file']}")
