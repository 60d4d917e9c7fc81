"""What a patch's functions may ask for while the server runs: their options and their counters.

    from overlay.runtime import Counters, options

    count = Counters("block-table-dirty")      # at the patch module's top: cheap, imports nothing

    def commit(wrapped, instance, args, kwargs):
        if options("block-table-dirty")["shadow"]: ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay.ledger import Counters

__all__ = ["Counters", "options", "set_options"]

_options: dict[str, Mapping[str, Any]] = {}


def set_options(patch: str, values: Mapping[str, Any]) -> None:
    """Give ``patch`` its options in this process (done by the hooks from the plan, and by tests)."""
    _options[patch] = dict(values)


def options(patch: str) -> Mapping[str, Any]:
    """The options of ``patch`` in this process; empty where it was applied without any."""
    return _options.get(patch, {})
