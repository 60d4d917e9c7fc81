"""Answers and quality of a model with real weights, stock against the measured kernels, on the GPU at hand.

    python ab_runs/gpu/gemm_quality.py --model DIR --tables DIR --out FILE

Three arms (``arms.py``) side by side: ``stock``; ``again``, stock once more: the control; ``kernels``, gemm-tiles and the
fused forms alone through ``launch.py --overlay-exec``. Each is an engine in one process, eager: it reads English text in
steps of 16 and of 1 token, so that every product of the model, lm_head included, has 16 or 1 rows, and records each token's
log probability; and it decodes prompts one request at a time with the two best log probabilities of every token.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ab_runs.gpu import arms  # noqa: E402
from ab_runs.gpu.gemm_serve import setting  # noqa: E402

ARMS = ("stock", "again", "kernels")
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
    """One arm. Writes what it has after every answer and every text, so that a time limit costs the rest only."""
    import gc

    import torch
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    result: dict[str, Any] = {"quality": {}, "greedy": []}
    began = time.monotonic()

    def keep(what: str) -> None:
        temporary = Path(f"{args.out}.part")
        temporary.write_text(json.dumps(result))
        temporary.replace(args.out)
        print(f"{time.monotonic() - began:.0f} s: {what}", flush=True)

    def read(engine: LLM, rows: int, pieces: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        scores = result["quality"][str(rows)] = []
        for piece in texts(tokenizer, pieces, args.length):
            output = engine.generate([{"prompt_token_ids": piece}], params, use_tqdm=False)[0]
            found = output.prompt_logprobs
            scores.append([entry[token].logprob for token, entry in zip(piece[1:], found[1:], strict=True)])
            keep(f"{len(scores)} of {pieces} texts in steps of {rows}")

    def answer(engine: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=96, logprobs=2)
        for question in QUESTIONS[: args.answers]:
            ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
            ids = ids["input_ids"] if not isinstance(ids, list) else ids
            output = engine.generate([{"prompt_token_ids": list(ids)}], params, use_tqdm=False)[0].outputs[0]
            best = [sorted((entry.logprob for entry in step.values()), reverse=True)[:2] for step in output.logprobs]
            result["greedy"].append({"tokens": list(output.token_ids), "best": best, "text": output.text})
            keep(f"{len(result['greedy'])} of {args.answers} answers")

    for rows, pieces in ((16, args.pieces), (1, args.single)):
        settings = {
            "enforce_eager": True,
            "attention_backend": "TRITON_ATTN",  # takes a head size of 64 everywhere
            "max_model_len": 1024,
            "max_num_seqs": 1,
            "max_num_batched_tokens": rows,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": 2**29,
            "seed": 0,
            "disable_log_stats": True,
            **dict(args.setting),
        }
        engine = LLM(model=args.model, **settings)
        keep(f"an engine for steps of {rows}")
        read(engine, rows, pieces)
        if rows == 16:
            answer(engine)
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    os._exit(0)  # an engine in this process may not end by itself


def judge(found: dict[str, dict]) -> dict:
    """Differences of mean log probability (nats) with a bootstrap interval over texts, and every first divergence.

    Compared is what both arms of a pair have. ``near_ties``: every divergence is where stock's two best log probabilities lie
    no further apart than twice the largest difference that the arm makes to any token's.
    """
    stock, verdict = found["stock"], {}
    chance = random.Random(0)
    for arm in (name for name in ARMS if name != "stock" and name in found):
        entry: dict = {"quality": {}, "divergences": []}
        for rows, scores in stock["quality"].items():
            pairs = list(zip(scores, found[arm]["quality"].get(rows, []), strict=False))
            if not pairs:
                continue
            differences = [statistics.fmean(b) - statistics.fmean(a) for a, b in pairs]
            draws = sorted(statistics.fmean(chance.choices(differences, k=len(differences))) for _ in range(2000))
            mean = -statistics.fmean(x for piece, _ in pairs for x in piece)
            entry["quality"][rows] = {
                "texts": len(pairs), "tokens": sum(len(piece) for piece, _ in pairs), "stock_nll": mean,
                "stock_perplexity": math.exp(mean), "change_of_mean_logprob": statistics.fmean(differences),
                "interval_95": [draws[50], draws[1949]],
                "largest_token_difference": max(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)),
            }  # fmt: skip
        same = 0
        answers = list(zip(stock["greedy"], found[arm]["greedy"], strict=False))
        for number, (a, b) in enumerate(answers):
            at = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=False)) if x != y), None)
            if at is None:
                same += 1
            else:
                gap = a["best"][at][0] - a["best"][at][1]
                entry["divergences"].append({"prompt": number, "token": at, "stock_gap_nats": gap})
        entry["equal_answers"] = f"{same} of {len(answers)}"
        gaps = [divergence["stock_gap_nats"] for divergence in entry["divergences"]]
        entry["largest_gap_nats"] = max(gaps, default=0.0)
        noise = max((part["largest_token_difference"] for part in entry["quality"].values()), default=0.0)
        entry["near_ties"] = max(gaps, default=0.0) <= 2 * noise
        verdict[arm] = entry
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--out", required=True)
    parser.add_argument("--pieces", type=int, default=24, help="texts read 16 tokens a step")
    parser.add_argument("--single", type=int, default=8, help="texts read one token a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--answers", type=int, default=16, help="prompts of 96 tokens, at most 16")
    parser.add_argument("--limit", type=float, default=400, help="end every arm after this many seconds")
    parser.add_argument("--setting", type=setting, action="append", default=[], metavar="KEY=VALUE", help="of vLLM's LLM")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the arms are ended too
    compare(args)


def compare(args: argparse.Namespace) -> None:
    """Run the arms side by side, and judge what they wrote."""
    work = Path(tempfile.gettempdir()) / "gemm-quality"
    work.mkdir(parents=True, exist_ok=True)
    running: dict[str, subprocess.Popen] = {}
    end = time.monotonic() + args.limit
    problems: dict[str, list[str]] = {}
    try:
        for arm in ARMS:
            (work / f"{arm}.json").unlink(missing_ok=True)
            program = [__file__, "--child", "--model", args.model, "--out", str(work / f"{arm}.json")]
            program += ["--pieces", str(args.pieces), "--single", str(args.single)]
            program += ["--length", str(args.length), "--answers", str(args.answers)]
            for key, value in args.setting:
                program += ["--setting", f"{key}={json.dumps(value)}"]
            running[arm] = subprocess.Popen(
                arms.command(arm, program, work / "runs" / arm, args.tables),
                env=arms.environment(VLLM_CACHE_ROOT=str(work / f"cache-{arm}"), VLLM_ENABLE_V1_MULTIPROCESSING="0"),
                stdout=(work / f"{arm}.log").open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        for arm, process in running.items():
            try:
                if code := process.wait(max(1.0, end - time.monotonic())):
                    problems.setdefault(arm, []).append(f"it ended with {code}: {tail(work / f'{arm}.log', 2500)}")
            except subprocess.TimeoutExpired:
                problems.setdefault(arm, []).append(f"stopped at the time limit: {tail(work / f'{arm}.log', 200)}")
            print(f"{arm}: {tail(work / f'{arm}.log', 100)}", flush=True)
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    proofs = {arm: arms.proof(arm, work / "runs" / arm) for arm in ARMS}
    found = {arm: json.loads((work / f"{arm}.json").read_text()) for arm in ARMS if (work / f"{arm}.json").exists()}
    for arm, proof in proofs.items():
        problems[arm] = problems.get(arm, []) + proof["problems"]
    verdict = judge(found) if "stock" in found else {}
    content = {"verdict": verdict, "problems": problems, "proofs": proofs, "arms": found}
    Path(args.out).write_text(json.dumps(content))
    print(json.dumps(verdict, indent=1))
    print(f"kernels: {arms.describe(proofs['kernels'])}")
    for arm in ARMS:
        arms.warn(arm, problems[arm])


def tail(log: Path, size: int) -> str:
    return log.read_text(errors="replace").strip()[-size:]


if __name__ == "__main__":
    main()
