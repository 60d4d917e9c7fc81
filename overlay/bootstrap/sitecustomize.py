"""Runs in every interpreter that a launched server starts. Boilerplate: the logic is in ``overlay.bootstrap.arm``.

Without a plan in the environment it does nothing. With one it only watches for the first import of a name that the plan
cares about: most interpreters (resource trackers, compile workers) never import one and pay nothing. In every case
the ``sitecustomize`` that this one shadows runs afterwards. No import here that the interpreter has not done already.
"""

import _frozen_importlib
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PathFinder = next((finder for finder in sys.meta_path if getattr(finder, "__name__", "") == "PathFinder"), None)


class _FirstImport:
    """First on the meta path until a watched name is imported; then the real hooks take its place."""

    def __init__(self, plan):
        names, _, self.orders = plan.partition(";")
        self.names = frozenset(names.split(","))

    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        return self.arm().find_spec(name, path, target)

    def arm(self):
        """Arm the hooks and return their finder. ``site`` swallows exceptions and so may an importer: a failure ends the
        process itself.
        """
        try:
            sys.meta_path.remove(self)
            spec = _PathFinder.find_spec("checkout", [_HERE])
            checkout = _frozen_importlib.module_from_spec(spec)
            spec.loader.exec_module(checkout)
            checkout.install(os.path.dirname(os.path.dirname(_HERE)))
            from overlay.bootstrap.arm import arm

            return arm(self.orders)
        except BaseException as error:  # noqa: BLE001
            print(f"overlay: this process cannot be patched: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(78)


def _run_shadowed():
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = _PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = _frozen_importlib.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("OVERLAY_PLAN"):
    _first = _FirstImport(os.environ["OVERLAY_PLAN"])
    if _first.names.isdisjoint(sys.modules):
        sys.meta_path.insert(0, _first)
    else:
        _first.arm()  # a target is here already: the hooks say so in their receipt
_run_shadowed()
