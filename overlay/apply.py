"""Putting one patch into force in this process: validate every target, then commit all, or roll back all.

This is the one place that changes live code. It knows nothing of vLLM and nothing of when it is called: the hooks
decide that, and so do tests.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from overlay import fingerprint
from overlay.runtime import set_options
from overlay.spec import REPLACE, WRAP, Patch, Target
from overlay.versions import in_range

MARK = "__overlay_patch__"


class ApplyError(Exception):
    """A patch cannot be put into force; nothing of it is. ``target`` says where."""

    def __init__(self, patch: str, target: str, reason: str) -> None:
        super().__init__(f"{patch}: {target}: {reason}" if target else f"{patch}: {reason}")
        self.patch, self.target, self.reason = patch, target, reason


@dataclass
class Site:
    """One resolved target: the object that holds the attribute, and what was there."""

    target: Target
    owner: Any
    name: str
    original: Any
    fingerprint: str

    def restore(self) -> None:
        setattr(self.owner, self.name, self.original)


def resolve(patch: str, target: Target) -> Site:
    """Find a target in the modules that are imported. Raises ApplyError."""
    owner: Any = sys.modules.get(target.module)
    if owner is None:
        raise ApplyError(patch, target.at, "its module is not imported")
    *path, name = target.qualname.split(".")
    try:
        for part in path:
            owner = fingerprint.live(owner, part)
        if name not in vars(owner):
            inherited = fingerprint.live(owner, name)  # raises where it is nowhere
            raise ApplyError(patch, target.at, f"inherited here; it is defined by {inherited.__qualname__}: name that")
        original = vars(owner)[name]
        digest = fingerprint.of_live(_below(original))
    except fingerprint.MissingTarget as error:
        raise ApplyError(patch, target.at, f"missing in this build: {error}") from error
    return Site(target, owner, name, original, digest)


def _below(value: Any) -> Any:
    """What lies under the patches of ours that are stacked on an attribute."""
    while getattr(value, MARK, None):
        inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        value = inner.__wrapped__
    return value


def check_fingerprint(patch: str, target: Target, found: str, accept_drift: bool) -> str:
    """The build that a digest was verified on, or ``"drift accepted"``. Raises ApplyError on an unknown digest."""
    for build, digest in target.fingerprints.items():
        if digest == found:
            return build
    if accept_drift:
        return "drift accepted"
    expected = ", ".join(f"{digest} ({build})" for build, digest in target.fingerprints.items()) or "none on record"
    raise ApplyError(patch, target.at, f"its source is unknown: found {found}, verified: {expected}")


class Application:
    """One patch in this process, from validation to commit and back.

    module: the patch's own module. targets: those that exist in this build (see ``Target.versions``).
    """

    def __init__(
        self,
        patch: Patch,
        module: ModuleType | Any,
        targets: tuple[Target, ...] | None = None,
        assumes: tuple[Target, ...] | None = None,
        options: Mapping[str, Any] | None = None,
        accept_drift: bool = False,
        stacked_on: Iterable[str] = (),
    ) -> None:
        self.patch, self.module = patch, module
        self.targets = patch.targets if targets is None else targets
        self.assumes = patch.assumes if assumes is None else assumes
        self.options = {name: option.default for name, option in patch.options.items()} | dict(options or {})
        self.accept_drift = accept_drift
        self.stacked_on = {*stacked_on, *patch.after}
        self.sites: list[Site] = []
        self.installed: list[tuple[Site, Any]] = []
        self.fingerprints: dict[str, str] = {}  # target -> digest of the live source below any patch of ours
        self.builds: dict[str, str] = {}  # target -> the build that this digest was verified on

    def validate(self) -> None:
        """Resolve and fingerprint every target before anything changes. Raises ApplyError."""
        self.sites = []
        for target in self.targets:
            site = resolve(self.patch.id, target)
            owner = getattr(site.original, MARK, None)
            if owner is not None and owner not in self.stacked_on:
                raise ApplyError(self.patch.id, target.at, f"patch {owner!r} owns it already")
            self._check(target, site)
            if not callable(getattr(self.module, target.use, None)):
                raise ApplyError(self.patch.id, target.at, f"the patch has no function {target.use!r}")
            self.sites.append(site)
        for target in self.assumes:
            self._check(target, resolve(self.patch.id, target))

    def _check(self, target: Target, site: Site) -> None:
        self.builds[target.at] = check_fingerprint(self.patch.id, target, site.fingerprint, self.accept_drift)
        self.fingerprints[target.at] = site.fingerprint

    def commit(self) -> None:
        """Install every replacement; on any failure put everything back. Raises ApplyError."""
        set_options(self.patch.id, self.options)
        try:
            for site in self.sites:
                replacement = self._replacement(site)
                setattr(site.owner, site.name, replacement)
                self.installed.append((site, vars(site.owner)[site.name]))
            self._no_stale_binding()
        except BaseException as error:
            where = self.sites[len(self.installed)].target.at if len(self.installed) < len(self.sites) else ""
            self.rollback()
            if isinstance(error, ApplyError):
                raise
            raise ApplyError(self.patch.id, where, f"{type(error).__name__}: {error}") from error

    def apply(self) -> None:
        self.validate()
        self.commit()

    def rollback(self) -> None:
        """Put back what was there. Afterwards nothing of the patch is left."""
        for site, _ in reversed(self.installed):
            site.restore()
        self.installed = []

    def in_force(self) -> str | None:
        """None where every replacement is still in its place, else what is not."""
        for site, replacement in self.installed:
            value = vars(site.owner).get(site.name)
            while value is not replacement:  # down through patches of ours that were stacked on top
                if not getattr(value, MARK, None):
                    return f"{site.target.at} was replaced after the patch was applied"
                value = getattr(value, "__wrapped__", None)
        try:
            self._no_stale_binding()
        except ApplyError as error:
            return error.reason
        return None

    def _replacement(self, site: Site) -> Any:
        function = getattr(self.module, site.target.use)
        if site.target.how == WRAP:
            return _wrapper_type(self.patch.id)(site.original, function)
        if site.target.how == REPLACE:
            inner = site.original
            kind = type(inner) if isinstance(inner, (staticmethod, classmethod)) else None
            made = function(inner.__func__ if kind else inner)
            if made is inner or made is getattr(inner, "__func__", None):
                raise ApplyError(self.patch.id, site.target.at, f"{site.target.use} returned the original")
            if hasattr(made, "__dict__"):
                functools.update_wrapper(made, inner.__func__ if kind else inner)
                setattr(made, MARK, self.patch.id)
            return kind(made) if kind else made
        raise ApplyError(self.patch.id, site.target.at, f"unknown way to install: {site.target.how!r}")

    def _no_stale_binding(self) -> None:
        """A module-level function that another module imported by name keeps the original there: an error to report.

        The specification lists such a module as a target of its own.
        """
        ours = {(id(site.owner), site.name) for site, _ in self.installed}
        originals = {id(site.original): site for site, _ in self.installed if isinstance(site.owner, ModuleType)}
        if not originals:
            return
        for name, module in list(sys.modules.items()):
            if not isinstance(module, ModuleType):
                continue
            for attribute, value in list(vars(module).items()):
                site = originals.get(id(value))
                if site is not None and (id(module), attribute) not in ours:
                    raise ApplyError(
                        self.patch.id,
                        site.target.at,
                        f"{name}.{attribute} still holds the original (imported by name before the patch)",
                    )


def apply_entry(
    entry: Any, version: str, options: Mapping[str, Any] | None = None, accept_drift: bool = False
) -> Application:
    """Put a catalogue's entry into force in this process now, outside any run: for measurements and tests.

    version: the public version whose targets count. Imports the targets' modules. Raises ApplyError.
    """
    targets, assumes = (
        tuple(target for target in side if not target.versions or in_range(version, target.versions))
        for side in (entry.patch.targets, entry.patch.assumes)
    )
    for target in (*targets, *assumes):
        importlib.import_module(target.module)
    application = Application(entry.patch, sys.modules[entry.module], targets, assumes, options, accept_drift)
    application.apply()
    return application


@functools.cache
def _wrapper_type(patch: str) -> type:
    """A wrapt proxy type that carries the mark itself, so that the wrapped function stays untouched."""
    import wrapt

    return type("OverlayWrapper", (wrapt.FunctionWrapper,), {MARK: patch})
