"""Figures of engines whose boots are the samples: the ratio to stock within a boot, and its range over boots."""

from __future__ import annotations

import statistics
from typing import Any

Record = dict[str, Any]  # of one engine: see ``Resident.record``


def stock_of(record: Record, records: list[Record]) -> Record | None:
    """The stock engine to hold a record against: of its own wave, else of its pass through the plan."""
    stocks = [other for other in records if other["model"] == record["model"] and other["arm"] == "stock"]
    for key in ("wave", "pass"):
        for other in stocks:
            if other[key] == record[key]:
                return other
    return None


def summary(records: list[Record]) -> list[dict[str, Any]]:
    """One row an arm of a model: by batch size the TPOT in ms of each boot, their median, and the ratio to stock (above 1:
    faster than stock) with its least and largest value over boots; how many answers are stock's, and how many first tokens
    of one fixed prompt.
    """
    rows = []
    for model, arm in dict.fromkeys((record["model"], record["arm"]) for record in records):
        boots = [record for record in records if (record["model"], record["arm"]) == (model, arm)]
        pairs = [(record, stock_of(record, records) or {}) for record in boots]
        batches = sorted({batch for record in boots for batch in record["times"]})
        measured = [
            (own, base)
            for record, stock in pairs
            for batch in batches
            for own, base in zip(record["times"].get(batch, []), stock.get("times", {}).get(batch, []), strict=False)
        ]
        rows.append(
            {
                "model": model,
                "arm": arm,
                "boots": sum(bool(record["times"]) for record in boots),
                "boots_with_problems": sum(bool(record["problems"]) for record in boots),
                "batches": {batch: _figures(pairs, batch) for batch in batches},
                "answers_as_stock": f"{sum(own['answers'] == base['answers'] for own, base in measured)} of {len(measured)}",
                "first_tokens_as_stock": [
                    _agreement(record["ready"]["tokens"], stock["ready"]["tokens"])
                    for record, stock in pairs
                    if record["ready"] and stock.get("ready")
                ],
            }
        )
    return rows


def _figures(pairs: list[tuple[Record, Record]], batch: int) -> dict[str, Any]:
    tpots, ratios = [], []
    for record, stock in pairs:
        own, base = (entry.get("times", {}).get(batch) for entry in (record, stock))
        if own:
            tpots.append(_median(own))
        if own and base:
            ratios.append(_median(base) / _median(own))
    return {
        "tpot_ms": tpots,
        "median_ms": statistics.median(tpots),
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_range": [min(ratios), max(ratios)] if ratios else None,
    }


def _median(times: list[dict[str, Any]]) -> float:
    return statistics.median(entry["tpot_ms"] for entry in times)


def _agreement(ours: list[int], theirs: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The summary for a person: median TPOT in ms a batch size, and the ratio to stock with its range over boots."""
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
        alarm = "  !!! NOT VALID, see below" if row["boots_with_problems"] else ""
        out.append(f"{where:20} {'  '.join(cells) or 'nothing measured'}  [{tail}]{alarm}")
    return out
