"""Decode steps of one live engine, stock and patched in turns: TPOT, launches, copies, gaps, host time, token ids.

The measuring side of ``v1_decode.py`` and ``v2_decode.py``; ``probe.py`` is what runs in the worker, ``scenarios.py`` what an
engine is. One engine serves both arms: the patches are put into force and taken back inside its process between measurements
(A B B A ...), through vLLM's own ``worker_extension_cls`` and collective RPC. So both arms share the graphs, the clocks and the
memory layout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from ab_runs.gpu.clocks import host_gaps  # noqa: E402
from ab_runs.gpu.scenarios import Refused, Requests, Scenario, misled, missing, scenario, steady  # noqa: E402


class Bench:
    """One engine: boots it, switches patches, measures."""

    def __init__(self, model: str, settings: dict[str, Any], requests: Callable[[int, int], Requests] = steady) -> None:
        from vllm import LLM

        self.requests = requests
        began = time.time()
        self.llm = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            worker_extension_cls="ab_runs.gpu.probe.Probe",
            seed=0,
            **settings,
        )
        self.boot_s = round(time.time() - began, 1)

    def rpc(self, method: str, *args: Any) -> Any:
        return self.llm.collective_rpc(method, args=args)[0]

    def generate(self, batch: int, tokens: int) -> tuple[float, list[tuple[int, ...]]]:
        """(seconds, token ids of each request) for ``batch`` requests of up to ``tokens`` output tokens, sent together."""
        from vllm import SamplingParams

        made = self.requests(batch, tokens)
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in made]
        params = [SamplingParams(detokenize=False, **fields) for _, fields in made]
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        spent = time.perf_counter() - began
        return spent, [tuple(output.outputs[0].token_ids) for output in outputs]

    def tpot(self, batch: int, tokens: int) -> tuple[float, list[tuple[int, ...]]]:
        """(ms a token, token ids): the difference of a long and a short run, so that prefill and start cancel out."""
        short, _ = self.generate(batch, 8)
        long, ids = self.generate(batch, 8 + tokens)
        return 1e3 * (long - short) / tokens, ids

    def front(self, batch: int, tokens: int) -> dict[str, Any]:
        """Of the front end's loop, us a step: waiting for the engine, and turning its outputs into results."""
        engine, spent = self.llm.llm_engine, {"wait for the engine": 0.0, "process outputs": 0.0}
        steps = 0

        def timed(function: Any, label: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal steps
                began = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    spent[label] += time.perf_counter() - began
                    steps += label.startswith("wait")

            return call

        core, processor = engine.engine_core, engine.output_processor
        core.get_output = timed(core.get_output, "wait for the engine")
        processor.process_outputs = timed(processor.process_outputs, "process outputs")
        try:
            total, _ = self.generate(batch, tokens)
        finally:
            del core.get_output, processor.process_outputs
        return {k: round(1e6 * v / max(steps, 1), 1) for k, v in {**spent, "whole loop": total}.items()} | {"steps": steps}

    def drafts(self) -> dict[str, int]:
        """Draft tokens so far, and how many were accepted (an engine that speculates, with its statistics on)."""
        names = {"vllm:spec_decode_num_draft_tokens": "drafted", "vllm:spec_decode_num_accepted_tokens": "accepted"}
        found = dict.fromkeys(names.values(), 0)
        for metric in self.llm.get_metrics():
            if metric.name in names:
                found[names[metric.name]] += int(metric.value)
        return found

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":  # the engine was in this process: make room for the next
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


def measure(bench: Bench, patches: list[str], options: dict[str, Any], batches: list[int], args: Any) -> dict[str, Any]:
    """Both arms at every batch size: TPOT in turns with the ids compared, then a trace and the host's timers of each."""
    found: dict[str, Any] = {"batches": {}}
    for batch in batches:
        bench.generate(batch, 16)
        times: dict[str, list[float]] = {"stock": [], "patched": []}
        ids: dict[str, Any] = {}
        equal = True
        for turn in range(args.turns):
            for arm in ("stock", "patched") if turn % 2 == 0 else ("patched", "stock"):
                if arm == "patched":
                    found["builds"] = bench.rpc("probe_apply", patches, options)
                    bench.generate(batch, 16)  # compiles what the patches bring
                spent, tokens = bench.tpot(batch, args.tokens)
                times[arm].append(round(spent, 4))
                equal = equal and ids.setdefault("ids", tokens) == tokens
                if arm == "patched":
                    bench.rpc("probe_rollback")
        entry: dict[str, Any] = {"tpot_ms": times, "ids_equal": equal, "distinct_tokens": len(set(ids["ids"][0]))}
        for arm in ("stock", "patched"):
            if arm == "patched":
                bench.rpc("probe_apply", patches, options)
                bench.generate(batch, 16)
            bench.rpc("probe_trace", True)
            bench.generate(batch, args.trace_tokens)
            trace = bench.rpc("probe_trace", False)
            bench.rpc("probe_events", True)
            bench.generate(batch, args.tokens)
            events = host_gaps(bench.rpc("probe_events", False), trace)
            bench.rpc("probe_timers", True)
            bench.generate(batch, args.tokens)
            entry[arm] = {"trace": trace, "events": events, "host": bench.rpc("probe_timers", False)}
            entry[arm]["front"] = bench.front(batch, args.tokens)
            if args.cprofile:
                bench.rpc("probe_profile", True)
                bench.generate(batch, args.tokens)
                entry[arm]["cprofile"] = bench.rpc("probe_profile", False)
            if arm == "patched":
                entry["counters"] = {k: v for k, v in bench.rpc("probe_counters").items() if k in patches}
                bench.rpc("probe_rollback")
        found["batches"][batch] = entry
    return found


def compare(bench: Bench, patches: list[str], options: dict[str, Any], made: Scenario, args: Any) -> dict[str, Any]:
    """Token ids of both arms, stock first and last, in one process where requests are admitted together: with an engine
    process of its own, who shares a prefill depends on when requests arrive, and stock does not repeat itself.
    """
    found: dict[str, Any] = {"runs": {}}
    factor = 1.0
    for vary in made.vary:
        bench.rpc("probe_vary", vary / factor)
        factor = vary
        for batch in args.batches:
            found["runs"][f"batch {batch}, weights x {vary:g}"] = _three(bench, patches, options, made, batch, args.tokens)
    counters = found["counters"] = _sum(run["counters"] for run in found["runs"].values())
    found["missing"] = missing({p: e for p, e in made.needs.items() if p in patches}, counters, bool(options))
    found["missing"] += [f"{patch}: not for this engine" for patch in made.needs if patch not in patches]
    found["idle"] = [patch for patch in patches if not counters.get(patch, {}).get("hit")]
    if made.speculates:
        drafts = found["drafts"] = _sum([{"drafts": run["drafts"]["patched"]} for run in found["runs"].values()])["drafts"]
        if not 0 < drafts["accepted"] < drafts["drafted"]:
            found["missing"].append("drafts both accepted and rejected")
    found["ids_equal"] = all(run["ids_equal"] for run in found["runs"].values())
    found["stock_repeats"] = all(run["stock_repeats"] for run in found["runs"].values())
    return found


def _three(
    bench: Bench, patches: list[str], options: dict[str, Any], made: Scenario, batch: int, tokens: int
) -> dict[str, Any]:
    """Stock, patched, stock at one batch size."""
    bench.requests = made.requests
    _, answers = bench.generate(batch, 16)
    if made.speculates:
        bench.requests = misled(made.requests, answers)
        bench.generate(batch, 16)
    ids: dict[str, Any] = {}
    drafts: dict[str, dict[str, int]] = {}
    moved: dict[str, dict[str, int]] = {}
    for arm in ("stock", "patched", "stock again"):
        if arm == "patched":
            before = bench.rpc("probe_counters")
            bench.rpc("probe_apply", patches, options)
            if made.recapture:
                bench.rpc("probe_recapture")
        drafted = bench.drafts() if made.speculates else {}
        _, ids[arm] = bench.generate(batch, tokens)
        if made.speculates:
            drafts[arm] = {name: number - drafted[name] for name, number in bench.drafts().items()}
        if arm == "patched":
            moved = difference(bench.rpc("probe_counters"), before, patches)
            bench.rpc("probe_rollback")
            if made.recapture:
                bench.rpc("probe_recapture")
    run = {
        "stock_repeats": ids["stock"] == ids["stock again"],
        "ids_equal": ids["stock"] == ids["patched"],
        "lengths": [len(tokens) for tokens in ids["stock"]],
        "distinct_tokens": [len(set(tokens)) for tokens in ids["stock"]],
        "counters": moved,
    }
    if not run["ids_equal"]:
        run["first_difference"] = [
            next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            for mine, theirs in zip(ids["patched"], ids["stock"], strict=True)
        ]
    return run | ({"drafts": drafts} if drafts else {})


def difference(after: dict[str, Any], before: dict[str, Any], patches: list[str]) -> dict[str, dict[str, int]]:
    """patch -> event -> how often between two readings of the counters."""
    found = {}
    for patch in patches:
        old = before.get(patch, {})
        found[patch] = {e: n - old.get(e, 0) for e, n in after.get(patch, {}).items() if n != old.get(e, 0)}
    return found


def _sum(counted: Iterable[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for one in counted:
        for patch, events in one.items():
            into = total.setdefault(patch, {})
            for event, number in events.items():
                into[event] = into.get(event, 0) + number
    return total


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, help="folder that holds the models' folders")
    parser.add_argument("--out", required=True, help="file for the figures (JSON), rewritten after each engine")
    help_plan = "engines, see ab_runs/gpu/scenarios.py"
    engines = ["qwen3-0.6b:plain", "qwen3-0.6b:default"]
    parser.add_argument("--plan", nargs="+", default=engines, metavar="MODEL:CONFIG[+WORD...]", help=help_plan)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--trace-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=450, help="start no further engine after this long")
    parser.add_argument("--boot-seconds", type=float, default=110, help="time to allow for one engine's start")
    parser.add_argument("--exact", action="store_true", help="compare token ids only, in one process, nothing timed")
    parser.add_argument("--shadow", action="store_true", help="patches compare with the original at every step where they can")
    parser.add_argument("--no-cprofile", dest="cprofile", action="store_false")
    parser.add_argument("--setting", action="append", default=[], help="further LLM setting, name=JSON")
    return parser.parse_args()


def main(description: str | None, runner: str, patches: list[str], exact_too: tuple[str, ...] = ()) -> int:
    """Everything of one script: ``runner`` is V1 or V2, ``patches`` those of the patched arm, in order; ``exact_too``: further
    ones, for the engines of ``--exact`` that they are for. Returns the exit status: 1 where tokens differ or proof is missing.
    """
    from overlay.catalog import load_catalog

    args = arguments(description)
    catalog = load_catalog()
    asked = [*patches, *(exact_too if args.exact else ())]
    shadowed = [name for name in asked if args.shadow and "shadow" in catalog[name].patch.options]
    shadow: dict[str, Any] = {name: {"shadow": True} for name in shadowed}
    try:
        plan = {item: scenario(item, runner, Path(args.models)) for item in args.plan}
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "V2" else "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if args.exact:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    began = time.time()
    result: dict[str, Any] = {"runner": runner, "patches": patches, "machine": machine(), "engines": {}}
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    extra = {name: json.loads(value) for name, _, value in (s.partition("=") for s in args.setting)}
    unclean = False
    for item, made in plan.items():
        if unclean:
            result["engines"][item] = {"skipped": "an engine failed in this process"}
            continue
        if time.time() - began + args.boot_seconds > args.seconds:
            result["engines"][item] = {"skipped": "out of time"}
            continue
        settings = {"gpu_memory_utilization": 0.25 if args.exact else 0.4, **made.settings, **extra}
        try:
            bench = Bench(str(Path(args.models) / made.model), settings, made.requests)
            engine = bench.rpc("probe_engine")
            print(item, engine, flush=True)
            if engine["runner"] != runner:
                raise RuntimeError(f"vLLM chose the {engine['runner']} runner")
            left_out = {name: reason for name, reason in bench.rpc("probe_choose", asked).items() if reason}
            chosen = [name for name in asked if name not in left_out]
            options = {name: shadow[name] for name in chosen if name in shadow}
            if args.exact:
                figures = compare(bench, chosen, options, made, args)
            else:
                bench.rpc("probe_vary", made.vary[0])
                figures = measure(bench, chosen, options, args.batches, args)
            kept = {"engine": engine, "boot_s": bench.boot_s, "in_force": chosen, "left_out": left_out}
            result["engines"][item] = kept | figures
            bench.close()
        except Exception as error:  # keep what the other engines gave
            import traceback

            traceback.print_exc()
            result["engines"].setdefault(item, {})["failed"] = f"{type(error).__name__}: {error}"
            unclean = args.exact  # patches may still be in force in this process: no later arm here would be stock
        result["seconds"] = round(time.time() - began, 1)
        out.write_text(json.dumps(result, indent=1))
    if args.exact:
        return exact_table(result)
    table(result)
    return 0


def machine() -> dict[str, Any]:
    import torch
    import vllm

    found = {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    try:
        found["cpu"] = next(
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass
    return found


def exact_table(result: dict[str, Any]) -> int:
    """One line an engine and what is wrong with it; 1 where a token differs, a proof is missing or an engine failed."""
    status = 0
    for item, engine in result["engines"].items():
        if "runs" not in engine:
            print(item, engine)
            status = 1
            continue
        good = engine["ids_equal"] and engine["stock_repeats"] and not engine["missing"] and "failed" not in engine
        status |= not good
        print(item, "EQUAL" if good else "NOT PROVED", "drafts:", engine.get("drafts", "-"), "idle:", engine["idle"])
        print("   left out:", engine["left_out"])
        for patch, events in engine["counters"].items():
            print("  ", patch, events)
        if not good:
            print("   MISSING:", engine["missing"], engine.get("failed", ""))
            for name, run in engine["runs"].items():
                if not (run["ids_equal"] and run["stock_repeats"]):
                    first = run.get("first_difference")
                    print("  ", name, "equal:", run["ids_equal"], "stock repeats:", run["stock_repeats"], first)
    return int(status)


def table(result: dict[str, Any]) -> None:
    """The figures in short, last on standard output."""
    columns = "TPOT ms | launches | copies | fills | busy us | idle us | in graph us | outside us | of it busy | host gap us"
    print(f"\nengine | batch | arm | {columns} | launch wait us | gap of step us | period us | ids equal")
    for item, engine in result["engines"].items():
        if "batches" not in engine:
            print(item, engine)
            continue
        for batch, entry in engine["batches"].items():
            for arm in ("stock", "patched"):
                trace, host = entry[arm]["trace"], entry[arm]["host"]
                cells = [trace.get(k, "-") for k in ("launches_per_step", "copies_per_step", "fills_per_step")]
                cells += [trace.get(k, "-") for k in ("busy_us", "idle_us")]
                names = ("inside_us", "outside_us", "busy_outside_us", "host_gap_us", "launch_wait_us", "gap_of_step_us")
                cells += [entry[arm]["events"].get(k, "-") for k in names]
                tpot = statistics.median(entry["tpot_ms"][arm])
                print(item, batch, arm, f"{tpot:.3f}", *cells, host["period_us"], entry["ids_equal"], sep=" | ")
            print("   dispatch:", entry["stock"]["host"]["dispatch"], "distinct tokens:", entry["distinct_tokens"])
            print("   front end, us/step:", entry["stock"]["front"], "->", entry["patched"]["front"])
            rows = list(entry["stock"]["host"]["us_per_step"].items())[:16]
            patched = entry["patched"]["host"]["us_per_step"]
            print("   us/step:", "; ".join(f"{k} {v[0]}->{patched.get(k, ['-'])[0]}" for k, v in rows))
