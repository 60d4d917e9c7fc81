"""What the tables say, for the launcher: whether there is one for this machine, and what was measured on it.

Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patches._lib.gemm import table

if TYPE_CHECKING:
    from overlay.facts import Facts

SERVED = Path(__file__).parent / "served.json"
FLAGS = "--overlay-exactness rounding --overlay-patches +gemm-tiles"


def _device(facts: Facts) -> table.Device:
    return table.Device(facts.hardware.arch, facts.hardware.name, facts.hardware.sms, facts.build.triton)


def batch_invariant(facts: Facts) -> str | None:
    """A reason where the server computes every row alike at every batch size: kernels by the number of rows do not."""
    if facts.serving.batch_invariant or facts.env.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0", "False", "false"):
        return "batch-invariant mode: a row's result must not depend on the number of rows, and these kernels' does"
    return None


def no_table(facts: Facts, extra: str = "") -> str | None:
    """Why no table serves these facts, or None. The server's processes check again on the device itself."""
    entries, _, rejected = table.choose(_device(facts), table.folders(extra))
    if entries:
        return None
    here = facts.hardware.name or facts.hardware.arch or "this device"
    reasons = "; ".join(rejected) or "there are none"
    return f"no table of measured products for {here}: {reasons}. To make one: python -m overlay tune MODEL"


def measured_gain(facts: Facts) -> str | None:
    """One line: what ``gemm-tiles`` brought where it was served on this hardware with this model, and the flags for it."""
    for record in served():
        if record["device"] != facts.hardware.name or record["arch"] != facts.hardware.arch:
            continue
        model = record["model"]
        if all(getattr(facts.model, name, None) == value for name, value in model["dims"].items()):
            return (
                f"measured on {record['device']} with {model['name']} and vLLM {record['vllm']}: TPOT "
                f"{record['stock_ms']:.2f} -> {record['patched_ms']:.2f} ms at batch 1 "
                f"({record['stock_ms'] / record['patched_ms']:.2f}x), answers equal but for rounding; to use it: {FLAGS}"
            )
    return None


def served(path: Path = SERVED) -> list[dict[str, Any]]:
    """The records of served measurements; empty where the file is missing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["served"]
    except OSError:
        return []
