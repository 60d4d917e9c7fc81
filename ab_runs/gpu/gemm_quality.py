"""Answers and quality of a model with real weights, stock against the GEMM patches, on the GPU at hand.

    python ab_runs/gpu/gemm_quality.py --model DIR --tables DIR --out FILE

Per arm one engine, eager, V1-sized steps: ``quality`` reads English text in steps of 16 and of 1 token, so that every
product of the model, lm_head included, has 16 or 1 rows, and records each token's log probability. ``greedy`` decodes
prompts one request at a time with the two best log probabilities of every token. Stock runs twice: the control.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ab_runs.gpu.gemm_serve import HOOK, MODULES

ROOT = Path(__file__).resolve().parents[2]
PATCHES = {"stock": [], "again": [], "patched": ["gemm-tiles"]}
QUESTIONS = [
    "Why is the sky blue?", "Explain how a bicycle stays upright.", "Write a short story about a lighthouse keeper.",
    "What is the difference between a list and a tuple in Python?", "Name three causes of the First World War.",
    "How do vaccines work?", "Give me a recipe for pancakes.", "What does a compiler do?",
    "Describe the water cycle to a child.", "Why do leaves change colour in autumn?", "What is inflation in economics?",
    "Summarise the plot of Romeo and Juliet.", "How does a refrigerator keep food cold?", "What is a prime number?",
    "Write a polite email asking for a day off.", "What makes a good password?",
]  # fmt: skip


def texts(tokenizer, count: int, length: int) -> list[list[int]]:
    """English prose of the Python documentation, cut into pieces of ``length`` tokens."""
    from pydoc_data.topics import topics

    ids = []
    for name in sorted(topics):
        ids += tokenizer.encode(topics[name])
        if len(ids) > count * length:
            break
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def child(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    result: dict = {"quality": {}, "greedy": []}
    for rows, pieces in ((16, 24), (1, 8)):
        engine = LLM(
            model=args.model, enforce_eager=True, attention_backend="TRITON_ATTN", max_model_len=1024, max_num_seqs=1,
            max_num_batched_tokens=rows, enable_prefix_caching=False, enable_chunked_prefill=True, gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=2**29, seed=0, disable_log_stats=True,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        scores = []
        for piece in texts(tokenizer, pieces, 256):
            output = engine.generate([{"prompt_token_ids": piece}], params, use_tqdm=False)[0]
            scores.append([entry[token].logprob for token, entry in zip(piece[1:], output.prompt_logprobs[1:], strict=True)])
        result["quality"][rows] = scores
        if rows == 16:
            for question in QUESTIONS:
                ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
                ids = ids["input_ids"] if not isinstance(ids, list) else ids
                params = SamplingParams(temperature=0, max_tokens=96, logprobs=2)
                output = engine.generate([{"prompt_token_ids": list(ids)}], params, use_tqdm=False)[0].outputs[0]
                best = [sorted((entry.logprob for entry in step.values()), reverse=True)[:2] for step in output.logprobs]
                result["greedy"].append({"tokens": list(output.token_ids), "best": best, "text": output.text})
        Path(args.out).write_text(json.dumps(result))
        del engine
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()
    os._exit(0)


def largest(stock: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(x - y) for a, b in zip(stock, other, strict=True) for x, y in zip(a, b, strict=True))


def judge(found: dict[str, dict]) -> dict:
    """Differences of mean log probability with a bootstrap interval over pieces, and every first divergence."""
    stock, verdict = found["stock"], {}
    chance = random.Random(0)
    for arm in ("again", "patched"):
        entry: dict = {"quality": {}, "divergences": []}
        for rows, scores in stock["quality"].items():
            differences = [
                statistics.fmean(b) - statistics.fmean(a) for a, b in zip(scores, found[arm]["quality"][rows], strict=True)
            ]
            draws = sorted(statistics.fmean(chance.choices(differences, k=len(differences))) for _ in range(2000))
            mean = -statistics.fmean(x for piece in scores for x in piece)
            entry["quality"][rows] = {
                "tokens": sum(map(len, scores)), "stock_nll": mean, "stock_perplexity": math.exp(mean),
                "change_of_mean_logprob": statistics.fmean(differences), "interval_95": [draws[50], draws[1949]],
                "largest_token_difference": largest(scores, found[arm]["quality"][rows]),
            }  # fmt: skip
        same = 0
        for number, (a, b) in enumerate(zip(stock["greedy"], found[arm]["greedy"], strict=True)):
            at = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=False)) if x != y), None)
            if at is None:
                same += 1
            else:
                entry["divergences"].append(
                    {"prompt": number, "token": at, "stock_gap_nats": a["best"][at][0] - a["best"][at][1]}
                )
        entry["equal_answers"] = f"{same} of {len(stock['greedy'])}"
        verdict[arm] = entry
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tables")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    work = Path(tempfile.gettempdir()) / "gemm-quality"
    (work / "hook").mkdir(parents=True, exist_ok=True)
    (work / "hook" / "sitecustomize.py").write_text(HOOK.format(root=str(ROOT)))
    running = {}
    for arm, patches in PATCHES.items():
        environment = dict(os.environ, VLLM_CACHE_ROOT=str(work / f"cache-{arm}"), VLLM_ENABLE_V1_MULTIPROCESSING="0")
        if patches:
            environment |= {
                "ARM_MODULES": " ".join(MODULES[patch] for patch in patches),
                "ARM_OPTIONS": json.dumps({"tables": args.tables}),
                "ARM_COUNTS": str(work / "counts"),
                "PYTHONPATH": f"{work / 'hook'}:{environment.get('PYTHONPATH', '')}",
            }
        command = [sys.executable, __file__, "--child", "--model", args.model, "--out", str(work / f"{arm}.json")]
        running[arm] = subprocess.Popen(
            command, env=environment, stdout=(work / f"{arm}.log").open("w"), stderr=subprocess.STDOUT
        )
    for arm, process in running.items():
        if process.wait():
            print(arm, "FAILED", (work / f"{arm}.log").read_text()[-2500:], flush=True)
    print((work / "patched.log").read_text()[-600:])
    found = {arm: json.loads((work / f"{arm}.json").read_text()) for arm in PATCHES if (work / f"{arm}.json").exists()}
    Path(args.out).write_text(json.dumps({"arms": found}))
    verdict = judge(found)
    from overlay.ledger import read_run

    counts = read_run(str(work / "counts"))[1] if (work / "counts").is_dir() else {}
    Path(args.out).write_text(json.dumps({"verdict": verdict, "counts": counts, "arms": found}))
    print(json.dumps(verdict, indent=1))


if __name__ == "__main__":
    main()
