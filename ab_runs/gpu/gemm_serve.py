"""TPOT of served models, stock against the GEMM patches, arms resident side by side and measured in turns.

    python ab_runs/gpu/gemm_serve.py --models DIR --out FILE --plan qwen3-0.6b:stock,tiles qwen3-4b:stock,tiles --seconds 120

Every arm is an engine of its own (its own process, vLLM's defaults: torch.compile, graphs, asynchronous scheduling), all
on one GPU and idle but for the one that is measured. Figures: TPOT in ms as (time of 8 + N tokens - time of 8 tokens) / N
for a batch of equal requests, so that prefill and start of a request cancel out. Weights are random, of one seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
ARMS = {"stock": [], "tiles": ["gemm-tiles"]}
MODULES = {"gemm-tiles": "patches.common.gemm_tiles"}
# Puts an arm's patches into force in every process of its engine, by their real specifications and fingerprints.
HOOK = """
import importlib, importlib.abc, importlib.util, os, sys
sys.path.append({root!r})
patches = {{}}
for name in os.environ.get("ARM_MODULES", "").split():
    module = importlib.import_module(name)
    for target in module.PATCH.targets:
        if module not in patches.setdefault(target.module, []):
            patches[target.module].append(module)

def apply(name):
    from overlay.apply import Application
    import json
    from overlay.ledger import bind
    os.makedirs(os.environ["ARM_COUNTS"], exist_ok=True)
    bind(os.environ["ARM_COUNTS"])
    options = json.loads(os.environ["ARM_OPTIONS"])
    for module in list(patches[name]):
        if all(target.module in sys.modules for target in module.PATCH.targets):
            patches[name].remove(module)
            Application(module.PATCH, module, options=options).apply()
            print("ARM applied", module.PATCH.id, os.getpid(), file=sys.stderr, flush=True)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in patches:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        run = spec.loader.exec_module
        def execute(module):
            run(module)
            apply(name)
        spec.loader.exec_module = execute
        return spec

if patches:
    sys.meta_path.insert(0, Finder())
"""


def child(args: argparse.Namespace) -> None:
    """One arm: builds the engine when told to, says ready, then answers one measurement a line."""
    import random

    from vllm import LLM, SamplingParams

    sys.stdin.readline()

    speculative = (
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1} if args.spec else None
    )
    engine = LLM(
        model=args.model, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=(3 if "27b" in args.model else 1) * 2**30, seed=0,
        speculative_config=speculative, disable_log_stats=True,
    )  # fmt: skip
    chance = random.Random(1)

    def generate(batch: int, tokens: int) -> tuple[float, list]:
        if args.spec:  # a text that repeats, so that the lookup drafts at every step
            prompts = [{"prompt_token_ids": [100 + i, 200, 300, 400] * 40} for i in range(batch)]
        else:
            prompts = [{"prompt_token_ids": [chance.randrange(1000, 20000) for _ in range(128)]} for _ in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]

    for batch in (1, 2, 4, 8):
        generate(batch, 24)
    fixed = [{"prompt_token_ids": [7 * i % 19000 + 500 for i in range(64)]}]
    same = engine.generate(
        fixed, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False), use_tqdm=False
    )
    print("READY " + json.dumps(list(same[0].outputs[0].token_ids)), flush=True)
    for line in sys.stdin:
        if line.startswith("quit"):
            break
        batch, tokens = (int(word) for word in line.split())
        short, _ = generate(batch, 8)
        long, _ = generate(batch, 8 + tokens)
        print("TIME " + json.dumps({"tpot_ms": (long - short) / tokens * 1000, "short_ms": short * 1000}), flush=True)


class Arm:
    def __init__(self, model: str, arm: str, spec: bool, args: argparse.Namespace, work: Path) -> None:
        self.model, self.arm, self.name = model, arm, f"{model} {arm}" + (" spec" if spec else "")
        hook = work / "hook"
        hook.mkdir(parents=True, exist_ok=True)
        (hook / "sitecustomize.py").write_text(HOOK.format(root=str(ROOT)))
        self.kind = model + (" spec" if spec else "")
        slug = self.name.replace(" ", "-")
        environment = dict(
            os.environ, VLLM_CACHE_ROOT=str(work / f"cache-{slug}"), TORCHINDUCTOR_CACHE_DIR=str(work / f"inductor-{slug}")
        )
        if ARMS[arm]:
            environment |= {
                "ARM_MODULES": " ".join(MODULES[patch] for patch in ARMS[arm]),
                "ARM_OPTIONS": json.dumps({"tables": str(args.tables)} if args.tables else {}),
                "ARM_COUNTS": str(work / f"counts-{slug}"),
            }
            environment["PYTHONPATH"] = f"{hook}:{environment.get('PYTHONPATH', '')}"
        command = [sys.executable, __file__, "--child", "--model", str(args.models / model)] + (["--spec"] if spec else [])
        self.log = work / f"{slug}.log"
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            bufsize=1,
        )
        self.times: dict[int, list[dict]] = {}
        self.tokens: list[int] = []
        self.boot = None

    def go(self) -> None:
        """Build the engine. Until then the process has only imported vLLM."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def answer(self, word: str) -> dict | list | None:
        for line in self.process.stdout:
            if line.startswith(word + " "):
                return json.loads(line[len(word) :])
        return None

    def ready(self) -> bool:
        self.tokens = self.answer("READY") or []
        self.boot = time.monotonic() - self.started
        return bool(self.tokens)

    def measure(self, batch: int, tokens: int) -> None:
        self.process.stdin.write(f"{batch} {tokens}\n")
        self.process.stdin.flush()
        if (found := self.answer("TIME")) is not None:
            self.times.setdefault(batch, []).append(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--spec", action="store_true")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plan", nargs="+", default=[])
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120, help="for measuring, after the last arm is ready")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    work = Path(tempfile.gettempdir()) / "gemm-serve"
    waves: list[list[Arm]] = [[]]
    for part in args.plan:
        if part == "then":
            waves.append([])
            continue
        model, _, names = part.partition(":")
        spec = model.endswith("+spec")
        waves[-1] += [Arm(model.removesuffix("+spec"), arm, spec, args, work) for arm in names.split(",")]
    arms = [arm for wave in waves for arm in wave]
    for wave in waves:
        run_wave(wave, arms, args, work)


def run_wave(wave: list[Arm], arms: list[Arm], args: argparse.Namespace, work: Path) -> None:
    """Start the wave's engines, measure them in turns, end them."""
    for arm in wave:
        arm.go()
    live = [arm for arm in wave if arm.ready()]
    for arm in wave:
        state = f"ready after {arm.boot:.0f} s" if arm in live else "FAILED: " + arm.log.read_text()[-1500:]
        print(f"{arm.name}: {state}", flush=True)
    begun = time.monotonic()
    for turn in range(args.rounds):
        for batch in (int(b) for b in args.batches.split(",")):
            for arm in live if turn % 2 == 0 else live[::-1]:
                if time.monotonic() - begun < args.seconds:
                    arm.measure(batch, args.tokens)
        save(args, arms)
    print(f"measured in {time.monotonic() - begun:.0f} s", flush=True)
    for arm in live:
        arm.process.stdin.write("quit\n")
        arm.process.stdin.flush()
    for arm in live:
        try:
            arm.process.wait(15)
        except subprocess.TimeoutExpired:
            arm.process.kill()
    save(args, arms, work)
    first = {arm.kind: arm for arm in live[::-1]}
    for arm in live:
        base = first[arm.kind]
        same = next((i for i, (a, b) in enumerate(zip(arm.tokens, base.tokens, strict=False)) if a != b), len(arm.tokens))
        row = "  ".join(
            f"b{batch} {tpot(times):.3f} ({tpot(base.times[batch]) / tpot(times):.3f}x)" for batch, times in arm.times.items()
        )
        print(f"{arm.name:20} {row}  first {same} tokens as stock", flush=True)


def tpot(times: list[dict]) -> float:
    return statistics.median(entry["tpot_ms"] for entry in times)


def save(args: argparse.Namespace, arms: list[Arm], work: Path | None = None) -> None:
    from overlay.ledger import read_run

    counts = {path.name: read_run(str(path))[1] for path in sorted(work.glob("counts-*"))} if work else {}
    content = {
        "arms": [
            {"name": arm.name, "patches": ARMS[arm.arm], "boot_s": arm.boot, "tokens": arm.tokens, "times": arm.times}
            for arm in arms
        ],
        "counts": counts,
    }
    args.out.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
