"""FlashAttention 3 in a captured decode step by the bound on its splits of the KV length.

    python ab_runs/gpu/attention_splits.py --out FILE

One graph of as many layers as the model has, each with a KV cache of its own, so that keys and values come from memory as
in a decode step. Per (heads, batch, context, bound): microseconds a layer, combine kernel included, median of replays in
turns over the bounds. A graph fixes the bound, vLLM's is 32 (``flash_attn_max_num_splits_for_cuda_graph``); within it the
scheduler metadata, computed for each step, choose the number of splits by context. Also recorded: whether the metadata
depend on the ``max_seqlen_k`` they are given (captured with the longest, computed with the step's own).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

MODELS = {"qwen3-0.6b": (28, 16, 8), "qwen3-4b": (36, 32, 8), "llama-3.1-8b tp4": (32, 8, 2)}
PAGE, HEAD, LONGEST = 16, 128, 16384
BOUNDS = (1, 2, 4, 8, 16, 32)


class Step:
    """The attention of one decode step: ``layers`` layers, ``batch`` requests of up to ``room`` tokens."""

    def __init__(self, layers: int, heads: int, kv_heads: int, batch: int, room: int) -> None:
        self.layers, self.heads, self.kv_heads, self.batch = layers, heads, kv_heads, batch
        blocks = batch * -(-room // PAGE)
        make = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.caches = [make(2, blocks, PAGE, kv_heads, HEAD) for _ in range(layers)]
        self.q = make(batch, heads, HEAD)
        self.out = torch.empty_like(self.q)
        self.table = torch.randperm(blocks, device="cuda", dtype=torch.int32).view(batch, -1)
        self.starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        self.lengths = torch.full((batch,), room, device="cuda", dtype=torch.int32)
        self.plan = torch.zeros(1 + -(-batch // 4) * 16, device="cuda", dtype=torch.int32)

    def schedule(self, bound: int, longest: int = LONGEST) -> torch.Tensor:
        return get_scheduler_metadata(
            batch_size=self.batch, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=self.heads, num_heads_kv=self.kv_heads,
            headdim=HEAD, cache_seqlens=self.lengths, qkv_dtype=torch.bfloat16, cu_seqlens_q=self.starts, page_size=PAGE,
            causal=True, window_size=(-1, -1), num_splits=bound,
        )  # fmt: skip

    def store(self, bound: int) -> torch.Tensor:
        """Bring the plan for ``bound`` splits to the place where captured layers read it, as vLLM does."""
        plan = self.schedule(bound)
        self.plan[: len(plan)] = plan
        self.plan[len(plan) :] = 0
        return self.plan[: len(plan)]

    def run(self, bound: int, plan: torch.Tensor) -> None:
        for cache in self.caches:
            flash_attn_varlen_func(
                q=self.q, k=cache[0], v=cache[1], out=self.out, cu_seqlens_q=self.starts, max_seqlen_q=1,
                seqused_k=self.lengths, max_seqlen_k=LONGEST, softmax_scale=HEAD**-0.5, causal=True, window_size=[-1, -1],
                block_table=self.table, scheduler_metadata=plan, fa_version=3, num_splits=bound,
            )  # fmt: skip

    def graph(self, bound: int) -> torch.cuda.CUDAGraph:
        plan = self.store(bound)
        self.run(bound, plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(bound, plan)
        return graph


def measure(graphs: dict[int, torch.cuda.CUDAGraph], step: Step, context: int, turns: int) -> dict[int, float]:
    step.lengths.fill_(context)
    times: dict[int, list[float]] = {bound: [] for bound in graphs}
    for turn in range(turns):
        for bound in graphs if turn % 2 == 0 else reversed(list(graphs)):
            step.store(bound)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graphs[bound].replay()
            begin.record()
            for _ in range(8):
                graphs[bound].replay()
            end.record()
            end.synchronize()
            times[bound].append(1e3 * begin.elapsed_time(end) / 8 / step.layers)
    return {bound: round(statistics.median(found), 3) for bound, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    began, rows, same = time.time(), [], True
    for name, (layers, heads, kv_heads) in MODELS.items():
        for batch in (1, 4, 8):
            if time.time() - began > args.seconds:
                break
            room = LONGEST if batch == 1 else 4096
            step = Step(layers, heads, kv_heads, batch, room)
            graphs = {bound: step.graph(bound) for bound in BOUNDS}
            for context in (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
                if context > room:
                    break
                found = measure(graphs, step, context, args.turns)
                rows.append({"model": name, "batch": batch, "context": context, "us_a_layer": found})
                print(name, batch, context, found, flush=True)
                same = same and all(
                    torch.equal(step.schedule(bound), step.schedule(bound, longest))
                    for bound in (1, 32) for longest in (context, context + 1, 4096)
                )  # fmt: skip
            del step, graphs
            torch.cuda.empty_cache()
    result = {"device": torch.cuda.get_device_name(), "metadata_independent_of_max_seqlen_k": same, "rows": rows}
    print("metadata independent of max_seqlen_k:", same)
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
