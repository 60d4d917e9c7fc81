"""The plots of a report, each as inline SVG: small, sharp, and nothing to load.

Needs matplotlib; ``report`` does without the page where it is missing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from ab_runs.judge import FIGURES

# Colour-blind safe (Okabe and Ito); the base is always the first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def colours(verdict: Mapping[str, Any]) -> dict[str, str]:
    names = [verdict["base"], *verdict["arms"]]
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def _figure(width: float = 7.2, height: float = 3.2) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"svg.hashsalt": "ab_runs", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    return figure, axes


def _svg(figure: Any, name: str, title: str) -> str:
    """The figure as an ``<svg>`` element with an id and a title, without a prologue; ids are made unique to it."""
    import matplotlib.pyplot as plt

    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("<svg", f'<svg id="{name}" role="img" aria-label="{title}" class="plot"', 1)


def running_order(verdict: Mapping[str, Any], figure: str = "mean_tpot") -> str:
    """Each boot's figure in running order: drift and outliers show at once."""
    name, unit, _ = FIGURES[figure]
    plot, axes = _figure()
    for arm, colour in colours(verdict).items():
        mine = [boot for boot in verdict["boots"] if boot["arm"] == arm]
        axes.plot([b["index"] for b in mine], [b[figure] for b in mine], "o-", color=colour, label=arm, lw=0.8, ms=6)
    for failed in verdict["failed"]:
        axes.axvline(failed["index"], color="grey", ls=":", lw=1)
    axes.set(xlabel="boot, in running order", ylabel=f"{name} ({unit})", title=f"{name} per boot")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    return _svg(plot, "plot-order", f"{name} of each boot in running order")


def distribution(verdict: Mapping[str, Any], requests: Mapping[str, list[float]]) -> str:
    """Per arm: the requests' TPOT as a violin, the boots' means as points. requests: arm -> milliseconds."""
    plot, axes = _figure()
    for place, (arm, colour) in enumerate(colours(verdict).items()):
        values = requests.get(arm) or []
        if len(set(values)) > 1:
            parts = axes.violinplot([values], [place], widths=0.8, showextrema=False)
            for body in parts["bodies"]:
                body.set(facecolor=colour, alpha=0.35)
        means = [boot["mean_tpot"] for boot in verdict["boots"] if boot["arm"] == arm]
        axes.plot([place] * len(means), means, "o", color=colour, ms=5)
    axes.set_xticks(range(len(colours(verdict))), list(colours(verdict)))
    axes.set(ylabel="TPOT (ms)", title="TPOT per arm: requests (shape) and boots (points)")
    return _svg(plot, "plot-distribution", "distribution of TPOT per arm")


def effects(verdict: Mapping[str, Any], margin: float) -> str:
    """The effect on every figure with its interval; the margin shaded. Better is to the right."""
    rows = [
        (arm, figure, entry["effects"][figure])
        for arm, entry in verdict["arms"].items()
        for figure in FIGURES
        if entry["effects"].get(figure, {}).get("estimate") is not None
    ]
    plot, axes = _figure(height=1.2 + 0.38 * max(1, len(rows)))
    axes.axvspan(-100 * margin, 100 * margin, color="#dddddd", zorder=0)
    axes.axvline(0, color="black", lw=0.8)
    shades = colours(verdict)
    for place, (arm, figure, effect) in enumerate(reversed(rows)):
        sign = -1 if FIGURES[figure][2] else 1
        centre = 100 * sign * effect["estimate"]
        if effect.get("low") is not None:
            ends = sorted((100 * sign * effect["low"], 100 * sign * effect["high"]))
            axes.plot(ends, [place, place], "-", color=shades[arm], lw=2)
        axes.plot([centre], [place], "o", color=shades[arm], ms=6)
    axes.set_yticks(range(len(rows)), [f"{arm}: {FIGURES[figure][0]}" for arm, figure, _ in reversed(rows)])
    axes.set_ylim(-0.7, max(0.7, len(rows) - 0.3))
    axes.set(xlabel="better by … % (interval over boots; shaded: no difference)", title="Effect against the base")
    return _svg(plot, "plot-effect", "effect on each figure with its interval")


def hits(verdict: Mapping[str, Any]) -> str:
    """Per patch: how often its fast path ran and how often its gates refused, over the measured windows."""
    total: dict[str, list[int]] = {}
    for patches in verdict["hits"].values():
        for patch, events in patches.items():
            row = total.setdefault(patch, [0, 0])
            row[0] += events.get("hit", 0)
            row[1] += sum(count for event, count in events.items() if event.startswith("refused"))
    plot, axes = _figure(height=1.2 + 0.4 * max(1, len(total)))
    names = sorted(total)
    axes.barh(names, [total[name][0] for name in names], color="#009E73", label="hits")
    axes.barh(
        names,
        [total[name][1] for name in names],
        left=[total[name][0] for name in names],
        color="#E69F00",
        label="refusals",
    )
    if names:
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
    else:
        axes.text(0.5, 0.5, "no patch counted anything", ha="center", transform=axes.transAxes)
        axes.set_yticks([])
    axes.set(xlabel="calls in the measured windows", title="Hits and refusals per patch")
    return _svg(plot, "plot-hits", "hits and refusals per patch")


def all_plots(verdict: Mapping[str, Any], requests: Mapping[str, list[float]], margin: float) -> list[str]:
    return [running_order(verdict), distribution(verdict, requests), effects(verdict, margin), hits(verdict)]
