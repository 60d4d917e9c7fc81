"""Facts x settings x catalogue -> a plan: one verdict and reason a patch, the final command line, a stable digest."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overlay import conditions
from overlay.catalog import SHIPPED, Entry, order
from overlay.config import Choice, Settings
from overlay.facts import Facts
from overlay.fingerprint import MissingTarget, SourceCache
from overlay.runtime import set_options
from overlay.serve_args import ServeArgs
from overlay.spec import WORKER, Contribution, Kind, Target, Verdict
from overlay.versions import in_range

ENGINE = 1  # raised when the engine itself changes what a patch does to a server: part of every digest


@dataclass(frozen=True)
class Decision:
    """The plan's word on one patch.

    named: the user asked for it. deferred: conditions that only the started processes can tell. targets, assumes:
    those of this build, with the digests found in its source.
    """

    id: str
    verdict: Verdict
    reason: str
    named: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)
    assumes: Mapping[str, str] = field(default_factory=dict)
    contribution: Contribution | None = None
    deferred: tuple[str, ...] = ()
    advert: str = ""

    @property
    def applies(self) -> bool:
        return self.verdict is Verdict.APPLY


@dataclass(frozen=True)
class Plan:
    """What one start will do. argv: the words behind ``vllm serve`` (or the other program, whole). env: what is added."""

    facts: Facts
    settings: Settings
    decisions: tuple[Decision, ...]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...]
    digest: str

    def decision(self, name: str) -> Decision:
        return next(d for d in self.decisions if d.id == name)

    @property
    def applied(self) -> list[Decision]:
        return [d for d in self.decisions if d.applies]

    @property
    def stopping(self) -> list[Decision]:
        """Decisions for which the launch must stop: a patch that the user named and that cannot apply, and under
        ``on_refusal: stop`` every refused one.
        """
        bad = (Verdict.REFUSED, Verdict.INAPPLICABLE)
        strict = self.settings.on_refusal == "stop"
        return [d for d in self.decisions if (d.named and d.verdict in bad) or (strict and d.verdict is Verdict.REFUSED)]


def make_plan(
    facts: Facts,
    settings: Settings,
    catalog: Mapping[str, Entry],
    args: ServeArgs | None,
    argv: Iterable[str] = (),
    cache: SourceCache | None = None,
    recorded: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    server: bool = True,
) -> Plan:
    """Decide every patch of the catalogue.

    args: the server's command line, read; None where it cannot be. server: False where another program is started, whose
    model and arguments nobody knows before it runs. recorded: patch -> what a kept
    comparison says against it on this hardware, model and build.
    """
    cache = cache or SourceCache(None)
    planner = _Planner(facts, settings, catalog, server, cache, recorded or {})
    decisions = planner.decide()
    cache.save()
    words = list(argv)
    notes: list[str] = []
    env: dict[str, str] = {}
    wanted: dict[str, Any] = {}
    for decision in decisions:
        if not decision.applies or decision.contribution is None:
            continue
        contribution = decision.contribution
        notes += [f"{decision.id}: {note}" for note in contribution.notes]
        wanted.update(contribution.args)
        for name, value in contribution.env.items():
            if name in (environ or {}):
                if environ[name] != value:  # type: ignore[index]
                    notes.append(f"{decision.id}: {name}={environ[name]} is yours and stands; ours was {value}")  # type: ignore[index]
            else:
                env[name] = value
    if wanted and args is not None:
        words, kept = args.merge(wanted)
        notes += [f"{leaf.path}: {leaf.reason}; yours stands: {leaf.found!r}, ours was {leaf.wanted!r}" for leaf in kept]
    decisions = sorted(decisions, key=lambda d: list(catalog).index(d.id))
    digest = _digest(facts, decisions, catalog, words, env)
    return Plan(facts, settings, tuple(decisions), tuple(words), env, tuple(notes), digest)


class _Planner:
    def __init__(
        self,
        facts: Facts,
        settings: Settings,
        catalog: Mapping[str, Entry],
        server: bool,
        cache: SourceCache,
        recorded: Mapping[str, str],
    ) -> None:
        self.facts, self.settings, self.catalog, self.server = facts, settings, catalog, server
        self.cache, self.recorded = cache, recorded
        self.root = str(Path(facts.build.root).parent) if facts.build.root else None

    def decide(self) -> list[Decision]:
        """Decisions in order of application."""
        decisions: dict[str, Decision] = {}
        for name in order(dict(self.catalog)):
            decision = self._alone(name)
            if decision.applies:
                decision = self._related(decision, decisions)
            decisions[name] = decision
        return list(decisions.values())

    def _alone(self, name: str) -> Decision:
        """The verdict on one patch by itself."""
        entry = self.catalog[name]
        patch, module = entry.patch, sys.modules[entry.module]
        choice = self.settings.patches.get(name)
        choice = choice or Choice(patch.default, {}, "the patch's default")
        options = {key: option.default for key, option in patch.options.items()} | dict(choice.options)

        def say(verdict: Verdict, reason: str, **more: Any) -> Decision:
            return Decision(name, verdict, reason, choice.named and choice.on, options, **more)

        if not self.settings.enabled:
            return say(Verdict.OFF, f"the overlay is off ({self.settings.source.get('enabled', 'settings')})")
        if choice.named and not choice.on:
            return say(Verdict.OFF, f"switched off by {choice.source}")
        set_options(name, options)  # conditions may ask for them, as they may in the processes
        failed = list(conditions.failures(patch.condition, self.facts, module))
        deferred: tuple[str, ...] = ()
        # only the worker checks conditions again: what is in force elsewhere, or is no code, must be known now
        later = not self.server and patch.kind is Kind.CODE and patch.process == WORKER
        if later and failed and all(conditions.is_deferrable(path) for path, _ in failed):
            deferred, failed = tuple(reason for _, reason in failed), []
        if failed:
            return say(Verdict.INAPPLICABLE, conditions.explain(failed))
        if patch.superseded and (reason := getattr(module, patch.superseded)(self.facts)):
            return say(Verdict.SUPERSEDED, reason)
        advert = ""
        if patch.advert:
            advert = getattr(module, patch.advert)(self.facts) or ""
        if not self.settings.exactness.allows(patch.exactness):
            reason = (
                f"its class is {patch.exactness.value}, the settings allow {self.settings.exactness.value} "
                f"(--overlay-exactness {patch.exactness.value})"
            )
            return say(Verdict.REFUSED if choice.named else Verdict.OFF, reason, advert=advert)
        if not choice.on:
            where = choice.source if choice.source != "the patch's default" else "it is not on by default"
            return say(Verdict.OFF, f"{where} (--overlay-patches +{name})", advert=advert)
        if self.settings.records and not choice.named and name in self.recorded:
            return say(Verdict.OFF, f"a kept comparison says so: {self.recorded[name]} (--overlay-patches +{name})")
        contribution = None
        if patch.kind is Kind.CONFIG:
            contribution = getattr(module, patch.config)(self.facts, options)
            if contribution.superseded:
                return say(Verdict.SUPERSEDED, contribution.superseded)
            if contribution.nothing:
                return say(Verdict.INAPPLICABLE, contribution.nothing)
        try:
            late = bool(patch.after_call)
            targets, builds, drifted = self._targets(patch.targets, name, late)
            assumes, _, _ = self._targets(patch.assumes, name, late)
        except _Drift as drift:
            return say(Verdict.REFUSED, str(drift))
        if patch.kind is not Kind.CONFIG and not targets:
            return say(Verdict.INAPPLICABLE, f"none of its targets is in vLLM {self.facts.build.version}")
        if builds:
            reason = f"verified on {', '.join(sorted(builds))}"
        elif targets:
            reason = "its targets' sources are not here to read: each process checks its live code"
        else:
            reason = "adds to vLLM's own configuration"
        if drifted:
            reason += f"; drift accepted at {', '.join(drifted)}"
        if deferred:
            reason += f"; to be confirmed in the process: {'; '.join(deferred)}"
        return say(Verdict.APPLY, reason, targets=targets, assumes=assumes, contribution=contribution, deferred=deferred)

    def _targets(self, targets: Iterable[Target], name: str, late: bool) -> tuple[dict[str, str], set[str], list[str]]:
        """Target -> digest found in the source, the builds it was verified on, and accepted drift. Raises _Drift.

        late: the build replaces its own code at run time before the patch is applied, so that its source need not say
        what will be live: what is not verified here is left to the processes.
        """
        found: dict[str, str] = {}
        builds: set[str] = set()
        drifted = []
        for target in targets:
            if target.versions and in_range(self.facts.build.public, target.versions) is False:
                continue
            if not target.fingerprints and target.module.partition(".")[0] not in ("vllm", "vllm_ascend", "vllm_hcu"):
                raise _Drift(f"{target.at}: no fingerprint on record")
            digest = self._source_digest(target, late)
            if late and digest not in target.fingerprints.values():
                digest = None
            if digest is None:
                # nothing to read here (facts of another machine): the processes check their live code
                found[target.at] = "unread"
                continue
            verified = [build for build, known in target.fingerprints.items() if known == digest]
            if verified:
                builds.add(self._best(verified))
            elif name in self.settings.accept_drift:
                drifted.append(target.at)
            else:
                expected = ", ".join(f"{known} ({build})" for build, known in target.fingerprints.items()) or "none"
                raise _Drift(
                    f"{target.at} has a source that was never verified: found {digest}, verified: {expected}; "
                    f"if you have read it and it is the same, --overlay-accept-drift {name}"
                )
            found[target.at] = digest
        return found, builds, drifted

    def _source_digest(self, target: Target, late: bool) -> str | None:
        """None where this machine has no such source to read, or where the live code is replaced after import."""
        if self.root is None:
            return None
        try:
            root = self._root_of(target.module.partition(".")[0])
            if root is None:
                return None
            return self.cache.digest(root, target.module, target.qualname)
        except MissingTarget as error:
            if late:
                return None  # a name that the build makes at run time
            raise _Drift(f"{target.at} is missing in this build: {error}") from error

    def _root_of(self, package: str) -> str | None:
        if package == "vllm":
            return self.root
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise MissingTarget(f"the package {package} is not installed")
        return str(Path(next(iter(spec.submodule_search_locations))).parent)

    def _best(self, builds: list[str]) -> str:
        """The build to name: this one where it is among them."""
        return next((b for b in builds if b.split(" ")[-1] == self.facts.build.public), builds[-1])

    def _related(self, decision: Decision, before: dict[str, Decision]) -> Decision:
        """Relations to the patches decided before. In a conflict the one that the user named stands, else the first."""
        patch = self.catalog[decision.id].patch
        for other in patch.requires:
            if not before[other].applies:
                reason = f"it requires {other}, which is {before[other].verdict.value}: {before[other].reason}"
                return replace(decision, verdict=Verdict.REFUSED, reason=reason)
        for other in before.values():
            theirs = self.catalog[other.id].patch
            if not other.applies or not (other.id in patch.conflicts or decision.id in theirs.conflicts):
                continue
            if decision.named and not other.named:
                reason = f"it conflicts with {decision.id}, which you asked for"
                before[other.id] = replace(other, verdict=Verdict.REFUSED, reason=reason)
                continue
            return replace(decision, verdict=Verdict.REFUSED, reason=f"it conflicts with {other.id}, which applies")
        return decision


class _Drift(Exception):
    """A target is missing, or its source is not one that was verified."""


def _digest(
    facts: Facts, decisions: Iterable[Decision], catalog: Mapping[str, Entry], argv: list[str], env: Mapping[str, str]
) -> str:
    """16 hexadecimal digits over what makes the patched server what it is. The same start gives the same digest."""
    content: dict[str, Any] = {
        "engine": ENGINE,
        "build": [facts.build.distribution, facts.build.version, dict(facts.build.plugins), facts.build.torch],
        "runner": facts.serving.runner,
        # vLLM's own key leaves out the number of draft tokens
        "speculation": [facts.serving.speculative_method, facts.serving.num_speculative_tokens],
        "env": dict(env),
    }
    applied = [decision for decision in decisions if decision.applies]
    content["patches"] = [
        [
            decision.id,
            catalog[decision.id].source,
            dict(decision.options),
            dict(decision.targets),
            dict(decision.assumes),
            dict(decision.contribution.args) if decision.contribution else {},
        ]
        for decision in applied
    ]
    if any(catalog[decision.id].shipped for decision in applied):
        content["lib"] = library_digest()
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def library_digest() -> str:
    """The digest of the helpers and tables that shipped patches share."""
    digest = hashlib.sha256()
    for path in sorted((SHIPPED / "_lib").rglob("*")):
        if path.is_file() and path.suffix in (".py", ".yaml", ".yml", ".json"):
            digest.update(str(path.relative_to(SHIPPED)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def orders(plan: Plan, catalog: Mapping[str, Entry]) -> dict[str, Any]:
    """What every process of the run is told (``overlay.hooks``)."""
    strict = plan.settings.on_refusal == "stop"
    patches = []
    for decision in plan.decisions:
        entry = catalog[decision.id]
        if not decision.applies or entry.patch.kind is Kind.CONFIG:
            continue
        patch = entry.patch
        patches.append(
            {
                "id": decision.id,
                "kind": patch.kind.value,
                "module": entry.module,
                "file": str(entry.file),
                "targets": list(decision.targets),
                "assumes": list(decision.assumes),
                "options": dict(decision.options),
                "accept_drift": decision.id in plan.settings.accept_drift,
                "process": patch.process,
                "runner": patch.condition.runner,
                "live": list(patch.live),
                "after": list(patch.after),
                "requires": list(patch.requires),
                "after_call": patch.after_call,
                "required": decision.named or strict,
            }
        )
    return {
        "digest": plan.digest,
        "profile": plan.settings.profile,
        "exactness": plan.settings.exactness.value,
        "runner": plan.facts.serving.runner,
        "facts": plan.facts.to_dict(),
        "patches": _in_order(patches, catalog),
        "verdicts": [{"id": d.id, "verdict": d.verdict.value, "reason": d.reason} for d in plan.decisions],
    }


def _in_order(patches: list[dict[str, Any]], catalog: Mapping[str, Entry]) -> list[dict[str, Any]]:
    at = {name: i for i, name in enumerate(order(dict(catalog)))}
    return sorted(patches, key=lambda patch: at[patch["id"]])
