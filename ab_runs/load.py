"""The load of one boot: a warm-up, then ``vllm bench serve`` of the installed build, and what its result says.

TPOT comes from token counts, ``(E2E - TTFT) / (tokens - 1)`` per request, never from stream chunks: under speculation
a chunk carries several tokens. Read in the sources of vLLM 0.18.1 to 0.33.0: the counts in ``output_lens`` are the
server's own (``usage.completion_tokens``); ``latencies`` is written since 0.32, before that E2E is TTFT plus the gaps
between chunks, which is the same sum.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ab_runs.client import CallError, call
from ab_runs.spec import Workload


class BenchError(Exception):
    """A result that cannot be used. The message says what is missing and what was found."""


@dataclass(frozen=True)
class Bench:
    """One result of ``vllm bench serve``, by request in the order sent. Times in seconds.

    ttft, latency: of each request. tokens: output tokens of each, 0 where it failed. errors: of those that failed.
    duration: of the whole load. texts: the answers, empty where the result has none. reported: the build's own mean
    TPOT (ms).
    """

    ttft: tuple[float, ...]
    latency: tuple[float, ...]
    tokens: tuple[int, ...]
    errors: tuple[str, ...]
    duration: float
    texts: tuple[str, ...] = ()
    reported: float | None = None

    @property
    def failed(self) -> list[int]:
        return [i for i, (count, error) in enumerate(zip(self.tokens, self.errors, strict=True)) if error or not count]

    def tpot(self) -> np.ndarray:
        """Seconds per output token after the first, of each request that gave two or more. Shape: (requests,)"""
        bad = set(self.failed)
        return np.array(
            [
                (end - first) / (count - 1)
                for i, (first, end, count) in enumerate(zip(self.ttft, self.latency, self.tokens, strict=True))
                if count > 1 and i not in bad
            ]
        )

    def figures(self) -> dict[str, float]:
        """What a boot is judged by: TPOT and TTFT in milliseconds, throughput in output tokens a second.

        Raises BenchError where no request gave two tokens.
        """
        tpot = self.tpot() * 1000
        bad = set(self.failed)
        ttft = np.array([value for i, value in enumerate(self.ttft) if i not in bad]) * 1000
        if not len(tpot):
            raise BenchError("no request gave two output tokens or more, so there is no TPOT")
        return {
            "mean_tpot": float(tpot.mean()),
            "p99_tpot": float(np.percentile(tpot, 99)),
            "mean_ttft": float(ttft.mean()),
            "p99_ttft": float(np.percentile(ttft, 99)),
            "output_throughput": sum(self.tokens) / self.duration,
        }


def parse(content: Any) -> Bench:
    """Read a result written with ``--save-result --save-detailed``. Raises BenchError that names missing fields."""
    if not isinstance(content, dict):
        raise BenchError("the result of vllm bench serve is no mapping")
    needed = ["ttfts", "output_lens", "duration"]
    missing = [name for name in needed if name not in content]
    if "latencies" not in content and "itls" not in content:
        missing.append("latencies (or itls)")
    if missing:
        raise BenchError(
            f"the result of vllm bench serve lacks {', '.join(missing)}; it holds {', '.join(sorted(content))}. "
            "This build writes another format than vLLM 0.18.1 to 0.33.0 do"
        )
    try:
        ttft = tuple(float(value) for value in content["ttfts"])
        tokens = tuple(int(value) for value in content["output_lens"])
        if "latencies" in content:
            latency = tuple(float(value) for value in content["latencies"])
        else:
            latency = tuple(first + sum(gaps) for first, gaps in zip(ttft, content["itls"], strict=True))
        errors = tuple(str(value or "") for value in content.get("errors") or [""] * len(tokens))
        duration = float(content["duration"])
        texts = tuple(str(text) for text in content.get("generated_texts") or ())
    except (TypeError, ValueError) as error:
        raise BenchError(f"the result of vllm bench serve holds something else than numbers: {error}") from error
    if not len(ttft) == len(tokens) == len(latency) == len(errors):
        raise BenchError("the result of vllm bench serve holds lists of different lengths")
    if not duration > 0:
        raise BenchError(f"the result of vllm bench serve says a duration of {duration} s")
    reported = content.get("mean_tpot_ms")
    return Bench(ttft, latency, tokens, errors, duration, texts, float(reported) if reported is not None else None)


def two_ratios(root: Path | None) -> bool:
    """Whether the build at ``root`` (the package ``vllm``) takes ranges of input and output apart (0.23 and later do).

    Before, one ratio holds for both, and the output lengths vary with the inputs'.
    """
    if root is None:
        return True
    files = [*root.glob("benchmarks/datasets.py"), *root.glob("benchmarks/datasets/*.py")]
    return any("_resolve_range_ratios" in file.read_text(encoding="utf-8", errors="replace") for file in files)


def bench_flags(
    workload: Workload,
    *,
    model: str,
    served: str,
    port: int,
    seed: int,
    folder: Path,
    ratios: bool,
    serve: Sequence[str],
) -> list[str]:
    """The flags behind ``vllm bench serve``. serve: the server's flags, of which tokenizer settings are taken over.

    The ready check is left out (``--ready-check-timeout-sec 0``, the default in 0.18.1 to 0.33.0): it would send the
    first measured prompt once more.
    """
    flags = ["--backend", "openai", "--endpoint", "/v1/completions", "--host", "127.0.0.1", "--port", str(port)]
    flags += ["--model", model, "--served-model-name", served, "--seed", str(seed)]
    flags += ["--num-prompts", str(workload.requests), "--max-concurrency", str(workload.concurrency)]
    flags += ["--temperature", str(workload.temperature), "--ready-check-timeout-sec", "0"]
    if workload.request_rate:
        flags += ["--request-rate", str(workload.request_rate)]
    if not any(flag.split("=")[0] == "--dataset-name" for flag in workload.extra):
        flags += ["--dataset-name", "random", "--random-output-len", str(workload.output_len)]
        if workload.input_range:
            low, high = workload.input_range
            ratio = (high - low) / (high + low)
            both = f'{{"input": {ratio:.6f}, "output": 0.0}}' if ratios else f"{ratio:.6f}"
            flags += ["--random-input-len", str((low + high) // 2), "--random-range-ratio", both]
        else:
            flags += ["--random-input-len", str(workload.input_len)]
    words = iter(serve)
    for word in words:
        name, _, value = word.replace("_", "-").partition("=")
        if name == "--trust-remote-code":
            flags.append(name)
        elif name in ("--tokenizer", "--tokenizer-mode"):
            flags += [name, word.partition("=")[2] if value else next(words, "")]
    flags += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99", "--disable-tqdm"]
    flags += ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "bench.json"]
    return [*flags, *workload.extra]


def warm_up(url: str, served: str, workload: Workload, seed: int, vocabulary: int | None, timeout: float) -> int:
    """Send requests of the measured shape and concurrency, with other random tokens. How many were answered.

    They fill what a first request fills (kernels compiled or loaded, autotuning, allocations) and cannot warm a
    prefix cache for the measured prompts. Raises CallError where one of them fails.
    """
    number = workload.warmup_requests
    draw = random.Random(seed + 104729)
    top = max(300, min(vocabulary or 5000, 20000))
    lengths = [
        draw.randint(*workload.input_range) if workload.input_range else workload.longest_input for _ in range(number)
    ]
    bodies = [
        {
            "model": served,
            "prompt": [draw.randrange(256, top) for _ in range(length)],
            "max_tokens": workload.output_len,
            "temperature": workload.temperature,
            "ignore_eos": True,
        }
        for length in lengths
    ]
    with ThreadPoolExecutor(max_workers=workload.concurrency) as pool:
        answers = list(pool.map(lambda body: call(f"{url}/v1/completions", body, timeout), bodies))
    if any("choices" not in answer for answer in answers):
        raise CallError(f"{url}/v1/completions: a warm-up request was not answered")
    return len(answers)
