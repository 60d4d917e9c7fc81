"""TPOT of served models, stock against the overlay's arms, arms resident side by side and measured in turns.

    python ab_runs/gpu/gemm_serve.py --models DIR --out FILE --plan qwen3-0.6b:stock,host,tiles,all [qwen3-4b:...] --boots 3
    python ab_runs/gpu/gemm_serve.py --models DIR --out FILE --plan qwen3.5-27b:stock then qwen3.5-27b:tiles --boots 2

Arms (``arms.py``): ``stock`` without the launcher; ``host`` what ``profile: auto`` gives of bitwise patches; ``tiles`` only
gemm-tiles; ``kernels`` that and the fused MLP; ``all`` everything of class rounding that is on by default, ``unfused`` that
without the fused MLP, ``normed`` that with normed-layer-qwen3. Every arm but stock is started through ``launch.py
--overlay-exec``. It is an engine of its own (its own processes and compile caches; vLLM's defaults: torch.compile, graphs,
asynchronous scheduling) on one GPU, idle but for the moments in which it is measured. ``then`` ends a wave: its engines are
gone before the next wave's are built. ``MODEL+spec`` is the model under n-gram speculation (K = 4) on a text that repeats.
``MODEL+lora`` serves every other request of a batch, the first included, with a LoRA adapter (``adapter.py``) that every
engine makes for itself, the same in all.

``--setting tensor_parallel_size=2`` spreads every engine over two GPUs; ``arms.py`` says what is switched off then, in all
arms alike. A rank's products are other shapes: give ``--tables`` of ``python -m overlay tune MODEL -tp 2``.

Figures: TPOT in ms as (time of 8 + N tokens - time of 8 tokens) / N for a batch of equal requests, so that prefill and
start of a request cancel out. Weights are random, of one seed. Boots are the samples: ``--boots N`` goes through the whole
plan N times with fresh engines, and the ratio to stock is taken within a wave, or a pass through the plan.

An arm whose patches were not in force in its worker is reported with ``!!!`` and under ``problems``. The file is written
after every round, so that what was measured before a time limit is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ab_runs.gpu import adapter, arms  # noqa: E402
from ab_runs.gpu.boots import lines, summary  # noqa: E402
from ab_runs.gpu.resident import Resident  # noqa: E402
from ab_runs.gpu.scenarios import OF_MODEL, SPECULATION  # noqa: E402

WITH = ("spec", "lora")  # what a model's name may end with, behind a plus


def child(args: argparse.Namespace) -> None:
    """One arm: imports vLLM, builds the engine when told to, then answers one measurement a line. Ends with its stdin."""
    import importlib.metadata
    import random

    import torch
    from vllm import LLM, SamplingParams, __version__

    print("\nIMPORTED {}", flush=True)
    if sys.stdin.readline().strip() != "go":
        return
    made, lora = tempfile.TemporaryDirectory(), None  # gone with the process
    if args.lora:
        from vllm.lora.request import LoRARequest

        config = json.loads((Path(args.model) / "config.json").read_text())
        lora = LoRARequest("made", 1, str(adapter.make(config, Path(made.name))))
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        # only asked for at the start, and other engines hold the rest of the card; the cache's size is given
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 2**30,
        "seed": 0,
        "disable_log_stats": True,
        **OF_MODEL.get(Path(args.model).name, {}),
        **({"speculative_config": SPECULATION} if args.spec else {}),
        **({"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter.RANK} if lora else {}),
        **dict(args.setting),
    }
    settings = arms.without_multicast(settings)
    engine = LLM(model=args.model, **settings)
    chance = random.Random(1)

    def generate(batch: int, tokens: int) -> tuple[float, list[list[int]]]:
        if args.spec:  # a text that repeats, so that the lookup drafts at every step
            prompts = [{"prompt_token_ids": [100 + i, 200, 300, 400] * 40} for i in range(batch)]
        else:
            prompts = [{"prompt_token_ids": [chance.randrange(1000, 20000) for _ in range(128)]} for _ in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        adapters = [None if i % 2 else lora for i in range(batch)]
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]

    for batch in map(int, args.batches.split(",")):
        generate(batch, 24)
    fixed = [{"prompt_token_ids": [7 * i % 19000 + 500 for i in range(64)]}]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    with_each = [engine.generate(fixed, params, use_tqdm=False, lora_request=[one]) for one in dict.fromkeys([lora, None])]
    same = [list(outputs[0].outputs[0].token_ids) for outputs in with_each]
    ready = {
        "tokens": [token for tokens in same for token in tokens],
        "adapter_changes_nothing": lora is not None and same[0] == same[1],
        "launched": bool(os.environ.get("OVERLAY_PLAN")),
        "v2": getattr(engine.llm_engine.vllm_config, "use_v2_model_runner", None),
        "versions": {"vllm": __version__, "torch": torch.__version__, "triton": _version(importlib.metadata, "triton")},
        "settings": {key: value for key, value in settings.items() if key != "speculative_config"},
    }
    print("\nREADY " + json.dumps(ready), flush=True)
    for line in sys.stdin:
        if line.startswith("quit"):
            break
        batch, tokens = (int(word) for word in line.split())
        short, _ = generate(batch, 8)
        long, ids = generate(batch, 8 + tokens)
        answers = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]
        found = {"tpot_ms": (long - short) / tokens * 1000, "short_ms": short * 1000, "answers": answers}
        print("\nTIME " + json.dumps(found), flush=True)


def _version(metadata: Any, name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class Waves:
    """The plan, boot after boot, and the file of its results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.work = Path(tempfile.gettempdir()) / "gemm-serve"
        self.notes: list[str] = []
        parts: list[list[str]] = [[]]
        for part in args.plan:
            if part == "then":
                parts.append([])
            else:
                parts[-1].append(part)
        self.waves: list[list[Resident]] = []
        for turn in range(args.boots):
            for wave in parts:
                place = (turn + 1, len(self.waves) + 1)
                named = [(part.partition(":")[0], arm) for part in wave for arm in part.partition(":")[2].split(",")]
                self.waves.append([self.resident(model, arm, place) for model, arm in named])

    def resident(self, model: str, arm: str, place: tuple[int, int]) -> Resident:
        args = self.args
        folder, *extras = model.split("+")
        program = [__file__, "--child", "--model", str(args.models / folder), "--batches", args.batches]
        program += [f"--{extra}" for extra in extras]
        for key, value in args.setting:
            program += ["--setting", f"{key}={json.dumps(value)}"]
        ranks = arms.ranks_of(dict(args.setting))
        return Resident(model, arm, place, program, self.work, args.tables, args.boot_limit, ranks)

    @property
    def arms(self) -> list[Resident]:
        return [arm for wave in self.waves for arm in wave]

    def run(self) -> None:
        longest = 0.0
        try:
            for arm in self.waves[0]:
                arm.start()
            for number, wave in enumerate(self.waves):
                begun = time.monotonic()
                if number and begun - self.began + longest > self.args.limit:
                    self.note(f"{len(self.waves) - number} waves left out: no time for another {longest:.0f} s")
                    break
                self.wave(wave, self.waves[number + 1] if number + 1 < len(self.waves) else [])
                if number == len(self.waves) // self.args.boots:
                    longest = 0.0  # from the second boot on the compile caches are there
                longest = max(longest, time.monotonic() - begun)
        except BaseException:
            for arm in self.arms:
                arm.kill()  # no time to be polite: whoever stops this may not wait
            raise
        finally:
            for arm in self.arms:
                arm.end()
            self.save()
        self.show()

    def wave(self, wave: list[Resident], following: list[Resident]) -> None:
        """Build the wave's engines, measure them in turns, end them. The following wave's processes import vLLM while
        these engines are built, and wait: nothing but the measured engine works while it is measured.
        """
        for arm in wave:
            arm.wait_imported()
        for arm in wave:
            arm.go()
        for arm in following:
            arm.start()
        live = [arm for arm in wave if arm.wait_ready()]
        for arm in following:
            arm.wait_imported()
        for arm in wave:
            arm.prove()
            if arm.ready.get("adapter_changes_nothing"):
                arm.problems.append("the adapter changes no token of the fixed prompt: it may not be in force")
            runner = "V2" if arm.ready.get("v2") else "V1"
            state = f"{runner}, ready after {arm.boot_s:.0f} s" if arm in live else "FAILED"
            print(f"{arm.name}: {state}; {arms.describe(arm.proof)}", flush=True)
            arms.warn(arm.name, [p for p in arm.problems if "never ran" not in p])
        self.save()
        begun, slowest = time.monotonic(), 0.0
        for turn in range(self.args.rounds if live else 0):
            started = time.monotonic()
            if turn and started - begun + slowest > self.args.seconds:
                break
            for batch in map(int, self.args.batches.split(",")):
                for arm in live if turn % 2 == 0 else live[::-1]:
                    arm.measure(batch, self.args.tokens)
            slowest = max(slowest, time.monotonic() - started)
            self.save()
        print(f"measured in {time.monotonic() - begun:.0f} s, {time.monotonic() - self.began:.0f} s in all", flush=True)
        for arm in wave:
            arm.prove()
        for arm in wave:
            arm.tell("quit")  # all at once, then one after the other
        for arm in wave:
            arm.end()
        self.save()

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)

    def save(self) -> None:
        from ab_runs import machine

        started = [arm for arm in self.arms if arm.process is not None]
        names = ("plan", "boots", "tokens", "rounds", "seconds", "batches", "setting")
        content = {
            "what": "TPOT of served models, stock against the overlay's arms",
            "options": {name: getattr(self.args, name) for name in names},
            "exactness_and_patches": {arm.arm: arms.settings(arm.arm) for arm in started},
            "versions": next((arm.ready["versions"] for arm in started if arm.ready), None),
            "cpu": machine.cpu(),
            "state": machine.state(),
            "notes": self.notes,
            "problems": {arm.name: arm.problems for arm in started if arm.problems},
            "summary": summary([arm.record() for arm in started]),
            "arms": [arm.record() for arm in started],
        }
        temporary = self.args.out.with_suffix(".part")
        temporary.write_text(json.dumps(content))
        temporary.replace(self.args.out)

    def show(self) -> None:
        records = [arm.record() for arm in self.arms if arm.process is not None]
        for line in lines(summary(records)):
            print(line, flush=True)
        for record in records:
            arms.warn(record["name"], record["problems"])


def setting(text: str) -> tuple[str, Any]:
    """``KEY=VALUE`` of vLLM's ``LLM``; the value as JSON, or as it stands."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, found {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--spec", action="store_true", help="every model under speculation")
    parser.add_argument("--lora", action="store_true", help="every model with an adapter for every other request")
    parser.add_argument("--models", type=Path, help="folder of the models' folders")
    parser.add_argument("--tables", type=Path, help="tables of one's own for gemm-tiles")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plan", nargs="+", default=[], metavar="MODEL[+spec][+lora]:ARM,ARM")
    parser.add_argument("--boots", type=int, default=1, help="go through the plan this often, with fresh engines")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=160, help="N (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="at most, of each boot (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=40, help="for measuring a wave; whole rounds (default: %(default)s)")
    parser.add_argument("--boot-limit", type=float, default=300, help="seconds until an engine must be ready")
    parser.add_argument("--limit", type=float, default=500, help="start no wave that may end later than this, in seconds")
    parser.add_argument("--setting", type=setting, action="append", default=[], metavar="KEY=VALUE", help="of vLLM's LLM")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    for extra in WITH:
        if getattr(args, extra):
            args.plan = [part if part == "then" else part.replace(":", f"+{extra}:", 1) for part in args.plan]
    for part in args.plan:
        if part != "then" and not set(part.partition(":")[0].split("+")[1:]) <= set(WITH):
            parser.error(f"--plan: {part!r} has another ending than {', '.join(WITH)}")
        if part != "then" and not set(part.partition(":")[2].split(",")) <= set(arms.ARMS):
            parser.error(f"--plan: {part!r} is not MODEL:ARM,ARM with arms of {', '.join(arms.ARMS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended too
    Waves(args).run()


if __name__ == "__main__":
    main()
