"""Evaluating a patch's ``Condition`` over facts: every part that fails gives a reason of its own."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from overlay.facts import Facts
from overlay.spec import Check, Condition
from overlay.versions import in_range


def public(version: str | None) -> str | None:
    """The public part of a raw version string; None where there is none to be had."""
    from overlay.versions import parse

    return parse(version).public if version else None


def failures(condition: Condition, facts: Facts, module: ModuleType) -> Iterator[tuple[str, str]]:
    """(fact's path, reason) of every part that does not hold. An unknown fact does not hold, with its reason.

    An unknown vLLM version is no failure here: fingerprints decide there.
    """
    build = facts.build
    if condition.vllm and in_range(build.public, condition.vllm) is False:
        yield "build.version", f"vLLM {build.version} is outside {condition.vllm}"
    plugins = {_same(name): version for name, version in build.plugins.items()}
    for name, wanted in condition.plugins.items():
        have = plugins.get(_same(name))
        if have is None:
            yield "build.plugins", f"the plugin {name} is not installed"
        elif in_range(public(have), wanted) is False:
            yield "build.plugins", f"{name} {have} is outside {wanted}"
    yield from _one_of(facts, "hardware.platform", condition.platforms, "platform")
    yield from _one_of(facts, "hardware.arch", condition.archs, "architecture")
    if condition.runner:
        yield from _one_of(facts, "serving.runner", (condition.runner,), "model runner")
    if condition.architectures:
        have = facts.model.architectures
        if not have:
            yield "model.architectures", f"the model is unknown: {facts.why_unknown('model.architectures')}"
        elif not set(have) & set(condition.architectures):
            yield "model.architectures", f"the model is {', '.join(have)}, not {' or '.join(condition.architectures)}"
    for path, wanted in condition.facts.items():
        reason = _fact(facts, path, wanted)
        if reason is not None:
            yield path, reason
    if condition.also:
        reason = getattr(module, condition.also)(facts)
        if reason:
            yield "also", reason


def _same(name: str) -> str:
    """A distribution's name as PEP 503 compares names."""
    return name.lower().replace("_", "-").replace(".", "-")


def _one_of(facts: Facts, path: str, allowed: tuple[str, ...], what: str) -> Iterator[tuple[str, str]]:
    if not allowed:
        return
    have = facts.get(path)
    if have is None:
        yield path, f"the {what} is unknown: {facts.why_unknown(path)}"
    elif have not in allowed:
        why = f" ({facts.serving.runner_reason})" if path == "serving.runner" and facts.serving.runner_reason else ""
        yield path, f"the {what} is {have}{why}, not {' or '.join(allowed)}"


def _fact(facts: Facts, path: str, wanted: Any) -> str | None:
    have = facts.get(path)
    if have is None and not (isinstance(wanted, tuple) and None in wanted):
        return f"{path} is unknown: {facts.why_unknown(path)}"
    if isinstance(wanted, Check):
        return None if wanted.passes(have) else f"{path} is {have!r}, not {wanted.what}"
    allowed = wanted if isinstance(wanted, tuple) else (wanted,)
    if have in allowed:
        return None
    return f"{path} is {have!r}, not {' or '.join(repr(value) for value in allowed)}"


def is_deferrable(path: str) -> bool:
    """Facts that only the process knows where the launched program is not the server."""
    return path.startswith(("serving.", "model.")) or path == "also"


def explain(found: list[tuple[str, str]]) -> str:
    return "; ".join(reason for _, reason in found)

