"""Is the comparison valid? Every rule that is broken is named, with the boots and the numbers.

A comparison with one broken rule has no verdict on speed. Boots that failed as a whole (the server died, the load
timed out) are left out and noted; they invalidate only where too few are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ab_runs import plans as planning
from ab_runs.load import Bench
from ab_runs.plans import Plan
from ab_runs.spec import Spec

RULES = {
    "too-few-boots": "an arm has fewer good boots than the spec asks for",
    "unreadable-result": "the result of vllm bench serve lacks what the verdict needs",
    "failed-requests": "requests of the measured load failed",
    "missing-requests": "the load has fewer or more requests than were asked for",
    "token-counts": "the number of output tokens differs: answers that got shorter look like speed",
    "warm-prefix-cache": "the prefix cache gave tokens away while it was measured",
    "compiled-while-measured": "kernels were compiled in the measured window",
    "drift": "the first and the last base boot differ by more than the threshold",
    "patch-without-hits": "a patch was in force but never ran while it was measured",
    "not-in-force": "a process did not run under the arm's plan",
    "unequal-environments": "the arms differ in something else than their patches",
}


@dataclass(frozen=True)
class Violation:
    """One broken rule. boots: the indices it was seen in."""

    rule: str
    arm: str
    detail: str
    boots: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        where = f" (boot {', '.join(map(str, self.boots))})" if self.boots else ""
        return f"{self.rule}: {self.arm}{where}: {self.detail}"


@dataclass(frozen=True)
class Boot:
    """One boot that went through: its sample record and its result."""

    index: int
    arm: str
    block: int
    record: Mapping[str, Any]
    bench: Bench

    @property
    def window(self) -> Mapping[str, Any]:
        return self.record.get("window") or {}


def requests(spec: Spec, boots: Sequence[Boot]) -> list[Violation]:
    """Failed and missing requests, and output token counts."""
    found = []
    for boot in boots:
        bad = boot.bench.failed
        if bad:
            errors = {boot.bench.errors[i].strip().splitlines()[-1] for i in bad if boot.bench.errors[i].strip()}
            said = f": {'; '.join(sorted(errors))[:300]}" if errors else ""
            found.append(
                Violation("failed-requests", boot.arm, f"{len(bad)} of {len(boot.bench.tokens)}{said}", (boot.index,))
            )
        if len(boot.bench.tokens) != spec.workload.requests:
            detail = f"{len(boot.bench.tokens)} requests in place of {spec.workload.requests}"
            found.append(Violation("missing-requests", boot.arm, detail, (boot.index,)))
    reference = next((boot for boot in boots if boot.arm == spec.base), None)
    for boot in boots:
        if reference is None or boot is reference or len(boot.bench.tokens) != len(reference.bench.tokens):
            continue
        pairs = list(zip(reference.bench.tokens, boot.bench.tokens, strict=True))
        other = [i for i, (mine, theirs) in enumerate(pairs) if mine != theirs]
        if other:
            totals = f"{sum(reference.bench.tokens)} against {sum(boot.bench.tokens)} tokens"
            detail = f"{totals}; request {other[0]}: {pairs[other[0]][0]} against {pairs[other[0]][1]}"
            found.append(Violation("token-counts", boot.arm, detail, (reference.index, boot.index)))
    return found


def window(spec: Spec, boots: Sequence[Boot]) -> list[Violation]:
    """What happened on the server between the first and the last measured request."""
    found = []
    shares: dict[int, float] = {}
    for boot in boots:
        cache = boot.window.get("prefix_cache") or {}
        hits, queries = cache.get("hits", 0) or 0, cache.get("queries", 0) or 0
        on = "--enable-prefix-caching" in spec.serve_flags
        if not on and str((boot.record.get("engine") or {}).get("enable_prefix_caching")) == "True":
            detail = "the engine runs with prefix caching, though it was to be off"
            found.append(Violation("warm-prefix-cache", boot.arm, detail, (boot.index,)))
        if on:
            shares[boot.index] = hits / queries if queries else 0.0
        elif hits:
            detail = f"{hits:.0f} of {queries:.0f} tokens came from it, though prefix caching was to be off"
            found.append(Violation("warm-prefix-cache", boot.arm, detail, (boot.index,)))
        compiled = [*(boot.window.get("new_cache_files") or ()), *(boot.window.get("compile_lines") or ())]
        if compiled:
            detail = f"{len(compiled)} traces of it, the first: {compiled[0]}"
            found.append(Violation("compiled-while-measured", boot.arm, detail, (boot.index,)))
    if shares and max(shares.values()) - min(shares.values()) > 0.01:
        low, high = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        detail = f"it gave {shares[low]:.1%} of the tokens in one boot and {shares[high]:.1%} in another"
        found.append(Violation("warm-prefix-cache", "all", detail, (low, high)))
    return found


def in_force(plans: Mapping[str, Plan], boots: Sequence[Boot]) -> list[Violation]:
    """Every process worked under the arm's plan, every patch was applied and ran while it was measured."""
    found = []
    for boot in boots:
        plan = plans[boot.arm]
        if not plan.applied:
            continue
        receipts = boot.record.get("receipts") or []
        if not receipts:
            found.append(Violation("not-in-force", boot.arm, "no process left a receipt", (boot.index,)))
        for receipt in receipts:
            who = f"process {receipt.get('pid')} ({receipt.get('role')})"
            if plan.digest and receipt.get("digest") != plan.digest:
                detail = f"{who} ran under plan {receipt.get('digest')}, not {plan.digest}"
                found.append(Violation("not-in-force", boot.arm, detail, (boot.index,)))
            for patch, state in (receipt.get("patches") or {}).items():
                if state.get("state") == "failed":
                    detail = f"{patch} failed in {who}: {state.get('reason') or state.get('error')}"
                    found.append(Violation("not-in-force", boot.arm, detail, (boot.index,)))
        all_states = [pair for receipt in receipts for pair in (receipt.get("patches") or {}).items()]
        states = {patch for patch, state in all_states if state.get("state") == "applied"}
        hits = boot.window.get("counters") or {}
        for name, patch in plan.applied.items():
            if receipts and patch.get("kind") != "config" and name not in states:
                detail = f"{name} was applied in no process"
                found.append(Violation("not-in-force", boot.arm, detail, (boot.index,)))
            events = hits.get(name) or {}
            counted = patch.get("kind") == "code" or (patch.get("kind") == "module" and events)
            if counted and not events.get("hit"):
                refused = ", ".join(f"{event} {count}" for event, count in sorted(events.items())) or "no call at all"
                found.append(Violation("patch-without-hits", boot.arm, f"{name}: {refused}", (boot.index,)))
    return found


def environments(spec: Spec, plans: Mapping[str, Plan], boots: Sequence[Boot]) -> list[Violation]:
    """Plans, effective engine settings, machine and libraries: equal but for the patches."""
    found = []
    base = plans[spec.base]
    for name, plan in plans.items():
        for difference in planning.differences(base, plan) if name != spec.base else ():
            found.append(Violation("unequal-environments", name, str(difference)))
    first: dict[str, Any] = {}
    for boot in boots:
        own, _ = planning.contributed(plans[boot.arm])
        others, _ = planning.contributed(base)
        explained = _explained(own | others)
        for key, value in (boot.record.get("engine") or {}).items():
            if not explained & {key, "*"} and value != first.setdefault(f"engine.{key}", value):
                detail = f"engine setting {key}: {_short(first[f'engine.{key}'])} against {_short(value)}"
                found.append(Violation("unequal-environments", boot.arm, detail, (boot.index,)))
        for key, value in (boot.record.get("machine") or {}).items():
            if value != first.setdefault(f"machine.{key}", value):
                detail = f"machine, {key}: {_short(first[f'machine.{key}'])} against {_short(value)}"
                found.append(Violation("unequal-environments", boot.arm, detail, (boot.index,)))
    return found


def _explained(arguments: set[str]) -> set[str]:
    """The engine's own settings that config patches change with these arguments; ``*`` for any."""
    found = {name.split(".")[0] for name in arguments}
    if found & {"compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"}:
        found |= {"compilation_config", "capture_sizes"}
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 120 else text[:117] + "..."


def numbers(
    spec: Spec,
    boots: Sequence[Boot],
    figures: Mapping[int, Mapping[str, float]],
    failed: Sequence[Mapping[str, Any]] = (),
) -> list[Violation]:
    """Enough boots, and no drift from the first to the last base boot. failed: the boots that came to nothing."""
    found = []
    for name in spec.arms:
        good = sum(boot.arm == name for boot in boots)
        if good < spec.acceptance.min_boots:
            detail = f"{good} good boots, {spec.acceptance.min_boots} are needed"
            mine = [entry for entry in failed if entry.get("arm") == name]
            if mine:
                log = str(mine[-1].get("log", "")).strip().splitlines()
                said = f"; its log ends: {log[-1][:200]}" if log else ""
                detail += f"; {len(mine)} failed, the last: {mine[-1].get('code')}: {mine[-1].get('detail')}{said}"
            found.append(Violation("too-few-boots", name, detail))
    base = [boot for boot in boots if boot.arm == spec.base]
    if len(base) > 1:
        primary = spec.acceptance.primary
        one, last = figures[base[0].index][primary], figures[base[-1].index][primary]
        change = last / one - 1
        if abs(change) > spec.acceptance.drift:
            detail = f"{primary} went from {one:.4g} to {last:.4g} ({change:+.1%}, allowed {spec.acceptance.drift:.1%})"
            found.append(Violation("drift", spec.base, detail, (base[0].index, base[-1].index)))
    return found


def check(
    spec: Spec,
    plans: Mapping[str, Plan],
    boots: Sequence[Boot],
    figures: Mapping[int, Mapping[str, float]],
    failed: Sequence[Mapping[str, Any]] = (),
) -> list[Violation]:
    """All broken rules."""
    return [
        *environments(spec, plans, boots),
        *in_force(plans, boots),
        *requests(spec, boots),
        *window(spec, boots),
        *numbers(spec, boots, figures, failed),
    ]
