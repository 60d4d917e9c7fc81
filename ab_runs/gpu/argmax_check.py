"""The one-launch argmax on a card: tokens against ``torch.argmax``, and the time of both in turns.

    python ab_runs/gpu/argmax_check.py --out FILE [--seeds 4] [--seconds 25]

Tokens: vocabularies of served models, 1 to 16 rows, bf16 and fp16, seeded rows with ties, equal values, zeros of both signs,
infinities and NaN, strided rows; a long run of launches without a pause on one workspace; two streams at once, a workspace
each. Times: a CUDA graph of 20 calls replayed, torch, ours, torch (A B A), us a call on the device; host us of one call without
a graph. Exits with 1 where a token differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

VOCABULARIES = (151936, 128256, 248320, 49152)
ROWS = (1, 2, 4, 8, 16)
KINDS = ("normal", "ties", "equal", "zeros", "infinities", "nan", "strided")
CALLS = 20  # of a graph


def made(torch: Any, kind: str, rows: int, vocabulary: int, dtype: Any, seed: int, device: str) -> Any:
    """Logits [rows, vocabulary] of one kind."""
    generator = torch.Generator(device=device).manual_seed(seed)
    if kind == "strided":
        wide = torch.randn(rows, vocabulary + 8 + seed % 9, generator=generator, device=device).to(dtype)
        wide[:, vocabulary:] = float("inf")
        return wide[:, :vocabulary]
    logits = torch.randn(rows, vocabulary, generator=generator, device=device)
    if kind == "ties":
        logits = (logits * 2).round() / 2
    elif kind == "equal":
        logits.fill_((0.0, 5.0, float("inf"), float("-inf"))[seed % 4])
    elif kind == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
        logits[:, : seed % 5000] = -1.0
    elif kind in ("infinities", "nan"):
        at = torch.randint(0, vocabulary, (rows, 6), generator=generator, device=device)
        logits.scatter_(1, at[:, :3], float("inf"))
        logits.scatter_(1, at[:, 3:], float("-inf") if kind == "infinities" else float("nan"))
    return logits.to(dtype)


def tokens(torch: Any, argmax: Any, args: argparse.Namespace) -> dict[str, Any]:
    """How many rows were compared, and which cases differ."""
    found: dict[str, Any] = {"cases": 0, "rows": 0, "different": []}
    for vocabulary in VOCABULARIES:
        for rows in ROWS:
            for dtype in (torch.bfloat16, torch.float16):
                for seed in range(args.seeds):
                    for kind in KINDS:
                        logits = made(torch, kind, rows, vocabulary, dtype, 1000 * seed + rows, args.device)
                        assert argmax.takes(logits)
                        theirs = torch.argmax(logits, dim=-1, keepdim=True).to(torch.int32)
                        wide = logits.to(torch.float32).argmax(dim=-1, keepdim=True).to(torch.int32)
                        mine = argmax.argmax(logits)
                        found["cases"] += 1
                        found["rows"] += rows
                        if not (torch.equal(mine, theirs) and torch.equal(mine, wide)):
                            found["different"].append([vocabulary, rows, str(dtype), seed, kind])
    return found


def under_pressure(torch: Any, argmax: Any, args: argparse.Namespace, launches: int = 3000) -> dict[str, Any]:
    """Launches without a pause on one stream, then on two at once: no token differs, no workspace is left dirty."""
    pool = [made(torch, "ties", 8, 151936, torch.bfloat16, seed, args.device) for seed in range(12)]
    expected = [torch.argmax(x, dim=-1, keepdim=True).to(torch.int32) for x in pool]
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device=args.device)
    for i in range(launches):
        wrong += (argmax.argmax(pool[i % 12]) != expected[i % 12]).sum()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    sums = [torch.zeros((), dtype=torch.int64, device=args.device) for _ in streams]
    torch.cuda.synchronize()
    for i in range(launches // 2):
        for stream, total in zip(streams, sums, strict=True):
            with torch.cuda.stream(stream):
                total += (argmax.argmax(pool[i % 12]) != expected[i % 12]).sum()
    torch.cuda.synchronize()
    dirty = sum(bool(workspace.any()) for workspace in argmax._workspaces.values())
    return {
        "launches": launches * 2,
        "workspaces": len(argmax._workspaces),
        "different": int(wrong) + sum(int(total) for total in sums),
        "dirty_workspaces": dirty,
    }


def graph_of(torch: Any, call: Any) -> Any:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def clock(torch: Any, graph: Any, replays: int = 30) -> float:
    """Median us of one call."""
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / CALLS)
    return round(statistics.median(times), 2)


def host(torch: Any, call: Any, calls: int = 200) -> float:
    """us of the host for one call; the device keeps up with so few."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return round(1e6 * spent / calls, 2)


def times(torch: Any, argmax: Any, args: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    """torch, ours, torch for each size, and ours with programs of other sizes."""
    found: list[dict[str, Any]] = []
    usual = argmax.PART
    for vocabulary in VOCABULARIES:
        for rows in ROWS:
            if time.monotonic() > until:
                return found
            logits = made(torch, "normal", rows, vocabulary, torch.bfloat16, 1, args.device)
            own = torch.zeros(rows, 2, dtype=torch.int64, device=args.device)
            theirs = graph_of(torch, lambda x=logits: torch.argmax(x, dim=-1, keepdim=True).to(torch.int32))
            mine = graph_of(torch, lambda x=logits, w=own: argmax.argmax(x, w))
            a, b, again = clock(torch, theirs), clock(torch, mine), clock(torch, theirs)
            entry: dict[str, Any] = {"vocabulary": vocabulary, "rows": rows, "torch_us": [a, again], "ours_us": b}
            entry["speedup"] = round(min(a, again) / b, 2)
            entry["host_us"] = {
                "torch": host(torch, lambda x=logits: torch.argmax(x, dim=-1, keepdim=True).to(torch.int32)),
                "ours": host(torch, lambda x=logits: argmax.argmax(x)),
            }
            if rows in (1, 8):
                entry["ours_us_by_part"] = {}
                for part in (2048, 8192):
                    argmax.PART = part
                    try:
                        entry["ours_us_by_part"][part] = clock(
                            torch, graph_of(torch, lambda x=logits, w=own: argmax.argmax(x, w))
                        )
                    finally:
                        argmax.PART = usual
            entry["workspace_clean"] = not bool(own.any())
            found.append(entry)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="file for the figures (JSON)")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=25, help="start no further timing after this long")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began = time.monotonic()
    import torch
    import triton

    from patches._lib import argmax

    result: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    on_card = args.device == "cuda"
    result["device"] = torch.cuda.get_device_name() if on_card else "cpu"
    result["tokens"] = tokens(torch, argmax, args)
    if on_card:
        result["under_pressure"] = under_pressure(torch, argmax, args)
        result["times"] = times(torch, argmax, args, began + args.seconds)
    result["seconds"] = round(time.monotonic() - began, 1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "times"}, indent=1))
    for entry in result.get("times", ()):
        print(json.dumps(entry))
    wrong = len(result["tokens"]["different"])
    if on_card:
        pressure = result["under_pressure"]
        wrong += pressure["different"] + pressure["dirty_workspaces"]
        wrong += sum(not entry["workspace_clean"] for entry in result["times"])
    print("WRONG" if wrong else "all tokens equal", f"({result['seconds']} s)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
