"""The report of a run: ``report.md`` always, ``report.html`` with its plots where jinja2 and matplotlib are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ab_runs.judge import FIGURES, Run
from ab_runs.store import Store, read_json, write_text

TEMPLATE = Path(__file__).resolve().parent / "report.html.j2"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2%}"


def effect_rows(verdict: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row for each arm and figure, as text."""
    rows = []
    for name, arm in verdict["arms"].items():
        for figure, effect in arm["effects"].items():
            control = verdict["control"].get(figure)
            interval = f"{_percent(effect.get('low'))} … {_percent(effect.get('high'))}"
            rows.append(
                {
                    "arm": name,
                    "figure": FIGURES[figure][0],
                    "effect": _percent(effect.get("estimate")),
                    "interval": interval if effect.get("low") is not None else "–",
                    "control": "–" if control is None else f"{control:.2%}",
                    "verdict": effect["verdict"] if verdict["valid"] else f"({effect['verdict']})",
                    "why": effect["why"],
                }
            )
    return rows


def answer_rows(verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each arm's answers."""
    rows = []
    for name, arm in verdict["arms"].items():
        answers = arm["answers"]
        counts = answers.get("counts") or {}
        why = answers["why"]
        quality = answers.get("quality")
        if quality:
            span = f"[{quality['low']:+.4f}, {quality['high']:+.4f}]" if quality["low"] is not None else ""
            why += f"; quality: mean token log-probability {quality['change']:+.4f} nats {span} over {quality['texts']} texts"
        for who, same in (answers.get("same_texts") or {}).items():
            if same:
                why += f"; measured texts equal to the first base boot's: {who} {same[0]} of {same[1]}"
        rows.append(
            {
                "arm": name,
                "verdict": answers["verdict"],
                "identical": counts.get("identical", 0),
                "near_tie": counts.get("near-tie", 0),
                "divergent": counts.get("divergent", 0),
                "untestable": counts.get("untestable", 0),
                "why": why,
            }
        )
    return rows


def boot_rows(verdict: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    heads = [f"{name} ({unit})" for name, unit, _ in FIGURES.values()]
    return heads, [
        {"index": boot["index"], "arm": boot["arm"], "cells": [f"{boot[figure]:.2f}" for figure in FIGURES]}
        for boot in verdict["boots"]
    ]


def machine_rows(folder: Path, verdict: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What it ran on, for a reader; the whole record is ``machine.json``."""
    store = Store(folder)
    machine = read_json(store.path("machine.json")) if store.path("machine.json").exists() else {}
    cpu, build = machine.get("cpu") or {}, verdict.get("build") or {}
    hardware, model = verdict.get("hardware") or {}, verdict.get("model") or {}
    rows = [
        ("hardware", " ".join(str(hardware[key]) for key in ("platform", "arch", "name") if hardware.get(key))),
        ("CPU", f"{cpu.get('model')}, {cpu.get('usable_cores')} cores, governor {cpu.get('governor') or 'unreadable'}"),
        ("vLLM", f"{build.get('distribution')} {build.get('version')}, torch {build.get('torch')}"),
        (
            "model",
            f"{', '.join(model.get('architectures') or ())} {model.get('dtype') or ''}, {model.get('num_layers')} layers",
        ),
        ("python", str(machine.get("python"))),
    ]
    for name, arm in verdict["arms"].items():
        if arm["added"]:
            rows.append((f"{name} adds", f"{', '.join(arm['added'])} ({arm['exactness']})"))
        if arm["changed"]:
            rows.append((f"{name} changes", f"{', '.join(arm['changed'])} (options or source)"))
        if arm["removed"]:
            rows.append((f"{name} lacks", ", ".join(arm["removed"])))
    return rows


def context(spec: Mapping[str, Any]) -> str:
    load = spec["workload"]
    length = "-".join(map(str, load["input_range"])) if load.get("input_range") else load["input_len"]
    return (
        f"{load['requests']} requests a boot, {length} tokens in, {load['output_len']} out, concurrency {load['concurrency']}, "
        f"temperature {load['temperature']:g}, prefix caching {'on' if spec['prefix_caching'] else 'off'}, "
        f"order {spec['order']}, {spec['boots']} boots per arm, seed {spec['seed']}"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    clean = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [*lines, *("| " + " | ".join(row) + " |" for row in clean), ""]


def markdown(folder: Path, verdict: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    """The report as text."""
    lines = [f"# {verdict['name']}", "", context(spec), ""]
    lines += [f"**{arm['outcome']}**: {arm['summary']}\n" for arm in verdict["arms"].values()]
    if verdict["violations"]:
        lines += ["## Why it is not valid", ""]
        lines += _table(
            ["rule", "arm", "boots", "what was seen"],
            [(v["rule"], v["arm"], ", ".join(map(str, v["boots"])), v["detail"]) for v in verdict["violations"]],
        )
    lines += ["## Effect", ""]
    lines += _table(
        ["arm", "figure", "effect", "interval", "A against A", "verdict", "why"],
        [tuple(row.values()) for row in effect_rows(verdict)],
    )
    lines += ["## Answers", ""]
    lines += _table(
        ["arm", "verdict", "identical", "near-tie", "divergent", "untestable", "why"],
        [tuple(row.values()) for row in answer_rows(verdict)],
    )
    heads, boots = boot_rows(verdict)
    lines += ["## Boots", ""]
    lines += _table(["boot", "arm", *heads], [(row["index"], row["arm"], *row["cells"]) for row in boots])
    lines += ["## Hits in the measured windows", ""]
    counts = [
        (arm, patch, event, count)
        for arm, patches in verdict["hits"].items()
        for patch, events in sorted(patches.items())
        for event, count in sorted(events.items())
    ]
    lines += _table(["arm", "patch", "event", "count"], counts) if counts else ["none", ""]
    for failed in verdict["failed"]:
        lines += [
            f"## Boot {failed['index']} ({failed['arm']}) failed: {failed.get('code')}",
            "",
            str(failed.get("detail")),
        ]
        lines += ["", "```", str(failed.get("log", "")), "```", ""]
    if verdict["notes"]:
        lines += ["## Notes", "", *(f"- {note}" for note in verdict["notes"]), ""]
    lines += ["## Machine and build", "", *_table(["", ""], machine_rows(folder, verdict))]
    return "\n".join(lines)


def html(folder: Path, verdict: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    """The page: self-contained, its plots inline. Raises ImportError where jinja2 or matplotlib is missing."""
    import jinja2

    from ab_runs import plots

    run = Run(folder)
    requests = {name: [1000 * float(v) for boot in run.of(name) for v in boot.bench.tpot()] for name in run.spec.arms}
    heads, boots = boot_rows(verdict)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        verdict=verdict,
        context=context(spec),
        plots=plots.all_plots(verdict, requests, spec["acceptance"]["margin"]),
        effects=effect_rows(verdict),
        confidence=f"{spec['acceptance']['confidence']:.0%}",
        answers=answer_rows(verdict),
        boots=boots,
        boot_heads=heads,
        machine=machine_rows(folder, verdict),
    )


def write(folder: Path, verdict: Mapping[str, Any]) -> list[str]:
    """Write the reports into the run's folder; lines that say where they are."""
    store = Store(folder)
    spec = store.run()["spec"]
    write_text(store.path("report.md"), markdown(folder, verdict, spec))
    said = [f"report: {store.path('report.md')}"]
    try:
        write_text(store.path("report.html"), html(folder, verdict, spec))
        said.append(f"report: {store.path('report.html')}")
    except ImportError as error:
        said.append(
            f"no report.html: {error.name} is not installed (pip install jinja2 matplotlib); report.md has the same"
        )
    return said
