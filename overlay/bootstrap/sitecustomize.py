"""Runs in every interpreter that a launched server starts. Boilerplate: the logic is in ``overlay.bootstrap.arm``.

Without a plan in the environment it does nothing. In every case the ``sitecustomize`` that this one shadows runs
afterwards. ``site`` swallows exceptions here, so that a failure has to end the process itself.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _arm():
    try:
        from importlib.util import module_from_spec, spec_from_file_location

        root = os.path.dirname(os.path.dirname(_HERE))
        spec = spec_from_file_location("overlay_checkout", os.path.join(_HERE, "checkout.py"))
        checkout = module_from_spec(spec)
        spec.loader.exec_module(checkout)
        checkout.install(root)
        from overlay.bootstrap.arm import arm

        arm(os.environ["OVERLAY_PLAN"])
    except BaseException as error:  # noqa: BLE001
        print(f"overlay: this process cannot be patched: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(78)


def _run_shadowed():
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("OVERLAY_PLAN"):
    _arm()
_run_shadowed()
