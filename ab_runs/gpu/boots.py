"""Figures of engines whose boots are the samples: the ratio to stock within a boot, and its range over boots."""

from __future__ import annotations

import statistics
from typing import Any


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an arm of a model: by batch size the TPOT in ms of each boot, their median, and the ratio to stock (above 1:
    faster than stock) with its least and largest value over boots; tokens and answers that agree with stock's.
    """
    rows = []
    for model, arm in dict.fromkeys((record["model"], record["arm"]) for record in records):
        boots = [record for record in records if (record["model"], record["arm"]) == (model, arm)]
        bases = {record["boot"]: record for record in records if record["model"] == model and record["arm"] == "stock"}
        row: dict[str, Any] = {"model": model, "arm": arm, "batches": {}, "first_tokens_as_stock": [], "answers_as_stock": ""}
        same = compared = 0
        for batch in sorted({batch for record in boots for batch in record["times"]}):
            tpots, ratios = [], []
            for record in boots:
                own, base = (entry.get("times", {}).get(batch, []) for entry in (record, bases.get(record["boot"], {})))
                if own:
                    tpots.append(_median(own))
                if own and base:
                    ratios.append(_median(base) / _median(own))
                    same += sum(a["answers"] == b["answers"] for a, b in zip(own, base, strict=False))
                    compared += min(len(own), len(base))
            row["batches"][batch] = {
                "tpot_ms": tpots,
                "median_ms": statistics.median(tpots),
                "ratio": statistics.median(ratios) if ratios else None,
                "ratio_range": [min(ratios), max(ratios)] if ratios else None,
            }
        row["answers_as_stock"] = f"{same} of {compared}"
        for record in boots:
            ours, theirs = (entry.get("ready", {}).get("tokens", []) for entry in (record, bases.get(record["boot"], {})))
            if ours and theirs:
                at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
                row["first_tokens_as_stock"].append(at)
        row["boots"] = len([record for record in boots if record["times"]])
        row["problems"] = sum(bool(record["problems"]) for record in boots)
        rows.append(row)
    return rows


def _median(times: list[dict[str, Any]]) -> float:
    return statistics.median(entry["tpot_ms"] for entry in times)


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The summary for a person."""
    out = []
    for row in rows:
        cells = []
        for batch, entry in row["batches"].items():
            cell = f"b{batch} {entry['median_ms']:.3f}"
            if entry["ratio"] is not None and row["arm"] != "stock":
                low, high = entry["ratio_range"]
                cell += f" ({entry['ratio']:.3f}x, {low:.3f}-{high:.3f})"
            cells.append(cell)
        where = f"{row['model']} {row['arm']}"
        tail = f"{row['boots']} boots, answers as stock {row['answers_as_stock']}, first tokens {row['first_tokens_as_stock']}"
        alarm = "  !!! NOT VALID, see below" if row["problems"] else ""
        out.append(f"{where:20} {'  '.join(cells) or 'nothing measured'}  [{tail}]{alarm}")
    return out
