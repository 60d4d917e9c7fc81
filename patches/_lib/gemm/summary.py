"""What the tables say, for the launcher: whether there is one for this machine, and what was measured on it.

Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlay.runtime import options
from patches._lib.gemm import table
from patches._lib.gemm.shapes import Product, products

if TYPE_CHECKING:
    from overlay.facts import Facts

TILES = "gemm-tiles"
SERVED = Path(__file__).parent / "served.json"
FLAGS = "--overlay-exactness rounding --overlay-patches +gemm-tiles"


def device(facts: Facts) -> table.Device:
    return table.Device(facts.hardware.arch, facts.hardware.name, facts.hardware.sms, facts.build.triton)


def batch_invariant(facts: Facts) -> str | None:
    """A reason where the server computes every row alike at every batch size: kernels by the number of rows do not."""
    if facts.serving.batch_invariant or facts.env.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0", "False", "false"):
        return "batch-invariant mode: a row's result must not depend on the number of rows, and these kernels' does"
    return None


def own_tables() -> str:
    """The folder of the user's own tables, from the options that the plan is made with."""
    return str(options(TILES).get("tables", "") or "")


def no_table(facts: Facts) -> str | None:
    """Why no table serves these facts, or None. The server's processes check again on the device itself."""
    found = table.choose(device(facts), table.folders(own_tables()))
    ranks = facts.serving.tensor_parallel or 1
    tune = "To make one: python -m overlay tune MODEL" + (f" -tp {ranks}" if ranks > 1 else "")
    if not found.entries:
        here = facts.hardware.name or facts.hardware.arch or "this device"
        reasons = "; ".join(found.rejected) or "there are none"
        return f"no table of measured products for {here}: {reasons}. {tune}"
    try:
        model = _products(facts)
    except (TypeError, ValueError):
        return None  # facts that do not say: the process finds what it finds
    sizes = {(n, k) for _, _, n, k in found.entries}
    if model and not any((product.n, product.k) in sizes for product in model):
        return f"the tables have none of this model's products on {ranks} rank{'s' * (ranks > 1)}. {tune}"
    return None


def _products(facts: Facts) -> list[Product]:
    """The model's products on one rank; empty for models whose products the facts do not hold. Raises TypeError or
    ValueError where a size is unknown.
    """
    model = facts.model
    if model.hybrid or model.moe or model.quantization:
        return []
    config = {
        "hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers, "vocab_size": model.vocab_size,
        "num_attention_heads": model.num_attention_heads, "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim, "intermediate_size": model.intermediate_size,
    }  # fmt: skip
    return products(config, facts.serving.tensor_parallel or 1)


def measured_gain(facts: Facts) -> str | None:
    """One line: what ``gemm-tiles`` brought where it was served on this hardware with this model, and the flags for it."""
    for record in served():
        if record["device"] != facts.hardware.name or record["arch"] != facts.hardware.arch:
            continue
        model = record["model"]
        if (facts.serving.tensor_parallel or 1) != 1:
            continue
        if all(getattr(facts.model, name, None) == value for name, value in model["dims"].items()):
            gain = record["without_ms"] / record["with_ms"]
            times = f"{gain:.2f}x against {record['against']}" if "against" in record else f"{gain:.2f}x"
            return (
                f"measured on {record['device']} with {model['name']} (vLLM {record['vllm']}, {record['runner']} runner): TPOT "
                f"{record['without_ms']:.2f} -> {record['with_ms']:.2f} ms at batch 1 ({times}); to use it: {FLAGS}"
            )
    return _products_gain(facts)


def _products_gain(facts: Facts) -> str | None:
    """The same from the table alone, where the model was not served: its products of one row, one after the other."""
    entries = table.choose(device(facts), table.folders(own_tables())).entries
    dtype = (facts.model.dtype or "").replace("torch.", "")
    try:
        found = _products(facts)
    except (TypeError, ValueError):
        return None
    chosen = [(product.count, entries.get((dtype, 1, product.n, product.k))) for product in found]
    known = [(count, entry) for count, entry in chosen if entry]
    if not known:
        return None
    ours, theirs = (sum(count * getattr(entry, name) for count, entry in known) / 1000 for name in ("us", "original_us"))
    return (
        f"not measured in service with this model; the table has {len(known)} of its {len(chosen)} one-row products, "
        f"which take {theirs:.2f} -> {ours:.2f} ms a decode step alone on {facts.hardware.name}; to use it: {FLAGS}"
    )


def served(path: Path = SERVED) -> list[dict[str, Any]]:
    """The records of served measurements, TPOT at batch 1 with the other patches of the default profile in force (or, where a
    record says ``against``, all of them against that); empty where the file is missing.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))["served"]
    except OSError:
        return []
