"""Import hooks of one process: when the last module of a patch's targets and of what it assumes is imported, the patch is
applied. One that requires another is applied behind it, and not at all where the other is not in force.

A hook acts when the module's code has run and before the importing statement binds any of its names. Each patch
goes from ``waiting`` to ``applied`` or ``failed``; a failure latches. Nothing here raises into an import: the check before
serving (``overlay.verify``) decides what a failure means.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from overlay.ledger import Receipt, bind, write_json

ARMED: Hooks | None = None  # the hooks of this process, once armed

WAITING, APPLIED, FAILED = "waiting", "applied", "failed"
UNMET = "it requires "  # how the reason of a patch begins that is off because of another one


class Refused(RuntimeError):
    """The overlay refuses to serve: what it was asked for is not in force. The run ends with exit code 78."""


class Hooks:
    """The orders of a run, as this process carries them out.

    orders: ``{"digest", "root", "patches": [{"id", "kind", "module", "file", "targets", "assumes", "options", "accept_drift",
    "process", "after", "requires", "after_call", "live", "required"}], "runner", ...}`` (see ``overlay.plan.orders``).
    """

    def __init__(self, orders: dict[str, Any], folder: str | None) -> None:
        self.orders = orders
        self.folder = folder
        self.receipt = Receipt(folder, orders["digest"])
        self.patches = {order["id"]: order for order in orders["patches"]}
        self.applications: dict[str, Any] = {}
        self.finder = _Finder(self)
        self._lock = threading.RLock()
        self._missing: dict[str, set[str]] = {}  # patch -> what it still waits for: modules, "call", other patches
        self._bound = False

    def arm(self) -> None:
        """Put the finder first on the meta path. A target that is already imported is an error, latched."""
        for patch, order in self.patches.items():
            modules = {at.partition(":")[0] for at in order["targets"]}
            early = sorted(modules & set(sys.modules))
            self.receipt.content["patches"][patch] = {"state": WAITING}
            if early:
                self._fail(patch, f"{', '.join(early)} was imported before the hooks were armed", at=early[0])
                continue
            if order["kind"] == "module":
                for module in modules:
                    self.finder.replace[module] = patch
                continue
            assumed = {at.partition(":")[0] for at in order["assumes"]} - modules
            # One whose code is still running, because it imports a target, has not all of its names yet: it is waited for.
            modules |= {name for name in assumed if not _complete(name)}
            others = {*order["after"], *order["requires"]} & set(self.patches)
            waits = set(modules) | {f"patch {other}" for other in others}
            if order["after_call"]:
                waits.add(f"call {order['after_call']}")
                self._watch_call(order["after_call"])
            self._missing[patch] = waits
            for module in modules:
                self.on_import(module, self._seen)
        sys.meta_path.insert(0, self.finder)

    def on_import(self, module: str, callback: Callable[[Any], None]) -> None:
        """Call ``callback(module object)`` once, right after ``module`` has been executed."""
        self.finder.watch.setdefault(module, []).append(callback)

    def start_counting(self) -> None:
        """Give this process its receipt and counter file. Not at arming: most interpreters never import a target."""
        if not self._bound and self.folder is not None:
            self._bound = True
            try:
                bind(self.folder)
                self.receipt.write()
            except OSError as error:
                self.folder = self.receipt.folder = None
                print(f"overlay: {error}: receipts and counters of this process stay in memory", file=sys.stderr)

    def state(self, patch: str) -> str:
        return self.receipt.content["patches"].get(patch, {}).get("state", "unknown")

    def failed(self) -> list[str]:
        return [patch for patch in self.patches if self.state(patch) == FAILED]

    def refuse(self, reason: str) -> Refused:
        """Record that this run must not serve. Returns the exception to raise."""
        if self.folder is not None:
            content = {"pid": os.getpid(), "role": self.receipt.content["role"], "reason": reason}
            write_json(os.path.join(self.folder, f"refusal-{os.getpid()}.json"), content)
        print(f"overlay: refused: {reason}", file=sys.stderr, flush=True)
        return Refused(f"overlay: {reason}")

    # -- from waiting to applied or failed

    def _seen(self, module: Any) -> None:
        self._arrived(module.__name__)

    def _arrived(self, what: str) -> None:
        with self._lock:
            self.start_counting()
            for waits in self._missing.values():
                waits.discard(what)
            while ready := [patch for patch, waits in self._missing.items() if not waits]:
                for patch in ready:
                    del self._missing[patch]
                    self._apply(patch)
                    for waits in self._missing.values():
                        waits.discard(f"patch {patch}")

    def unmet(self, patch: str) -> str | None:
        """Why ``patch`` cannot be in force here: one that it requires is not."""
        for other in self.patches[patch]["requires"]:
            if self.state(other) != APPLIED:
                reason = self.receipt.content["patches"].get(other, {}).get("reason", "it is not part of the plan")
                return f"{UNMET}{other}, which is not in force: {reason}"
        return None

    def _apply(self, patch: str) -> None:
        order = self.patches[patch]
        if (reason := self.unmet(patch)) is not None:
            self._fail(patch, reason)
            return
        try:
            from overlay.apply import Application
            from overlay.catalog import import_patch

            module = import_patch(order["module"], order["file"])
            spec = module.PATCH
            targets = tuple(t for t in spec.targets if t.at in order["targets"])
            assumes = tuple(t for t in spec.assumes if t.at in order["assumes"])
            application = Application(
                spec, module, targets, assumes, order["options"], order["accept_drift"], stacked_on=order["after"]
            )
            application.apply()
        except Exception as error:  # whatever a patch throws: it is rolled back, and the run decides
            self._fail(patch, f"{type(error).__name__}: {error}", at=getattr(error, "target", ""))
            return
        self.applications[patch] = application
        self.receipt.state(patch, state=APPLIED, fingerprints=application.fingerprints, builds=application.builds)

    def _fail(self, patch: str, reason: str, at: str = "") -> None:
        self._missing.pop(patch, None)
        self.receipt.state(patch, state=FAILED, reason=reason, target=at)
        print(f"overlay: {patch}: not applied in process {os.getpid()}: {reason}", file=sys.stderr, flush=True)

    # -- patches that wait for a call

    def _watch_call(self, at: str) -> None:
        module, _, qualname = at.partition(":")
        if at not in self.finder.calls:
            self.finder.calls.add(at)
            self.on_import(module, lambda loaded: self._wrap_call(loaded, at, qualname))

    def _wrap_call(self, module: Any, at: str, qualname: str) -> None:
        import functools

        *path, name = qualname.split(".")
        owner = module
        for part in path:
            owner = getattr(owner, part)
        original = vars(owner)[name]

        @functools.wraps(original)
        def returned(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._arrived(f"call {at}")
            return result

        setattr(owner, name, returned)

    # -- module patches

    def replacement(self, patch: str, module: str, found: Any) -> str | None:
        """The file to load in place of ``module``, or None (and a latched failure) where the original drifted."""
        order = self.patches[patch]
        try:
            from overlay.apply import check_fingerprint
            from overlay.catalog import import_patch
            from overlay.fingerprint import of_file

            self.start_counting()
            spec = import_patch(order["module"], order["file"]).PATCH
            target = next(t for t in spec.targets if t.at == module)
            digest = of_file(found.origin)
            build = check_fingerprint(patch, target, digest, order["accept_drift"])
        except Exception as error:
            self._fail(patch, f"{type(error).__name__}: {error}", at=module)
            return None
        self.receipt.state(patch, fingerprints={module: digest}, builds={module: build})
        return os.path.join(os.path.dirname(order["file"]), target.use)

    def module_loaded(self, patch: str, error: BaseException | None) -> None:
        if error is not None:
            self._fail(patch, f"its file failed to load: {type(error).__name__}: {error}")
        else:
            self.receipt.state(patch, state=APPLIED)


def _complete(name: str) -> bool:
    """Whether a module is imported and its code has run."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


class _Finder:
    """First on the meta path; knows exact module names and otherwise costs one dictionary lookup an import."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.watch: dict[str, list[Callable[[Any], None]]] = {}
        self.replace: dict[str, str] = {}
        self.calls: set[str] = set()
        self._busy: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if (name not in self.watch and name not in self.replace) or name in self._busy:
            return None
        self._busy.add(name)
        try:
            found = next((spec for spec in self._others(name, path, target) if spec is not None), None)
        finally:
            self._busy.discard(name)
        if found is None or found.loader is None:
            return found
        patch = self.replace.pop(name, None)
        if patch is not None and (file := self.hooks.replacement(patch, name, found)) is not None:
            from importlib.util import spec_from_file_location

            found = spec_from_file_location(name, file, submodule_search_locations=found.submodule_search_locations)
            found.loader = _Loader(found.loader, name, self, patch)
            return found
        if name in self.watch:
            found.loader = _Loader(found.loader, name, self, None)
        return found

    def _others(self, name: str, path: Any, target: Any) -> Any:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                yield finder.find_spec(name, path, target)


class _Loader:
    """Stands before the real loader for one import and takes itself out of the module's records afterwards."""

    def __init__(self, loader: Any, name: str, finder: _Finder, patch: str | None) -> None:
        self._loader, self._name, self._finder, self._patch = loader, name, finder, patch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException as error:
            if self._patch is not None:
                self._finder.hooks.module_loaded(self._patch, error)
            raise
        if self._patch is not None:
            self._finder.hooks.module_loaded(self._patch, None)
        for callback in self._finder.watch.pop(self._name, []):
            callback(module)
