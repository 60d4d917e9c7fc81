"""What an engine of a comparison is: its settings and its requests, read from one word of ``--plan``.

    MODEL:CONFIG[+WORD...]      qwen3-0.6b:plain   qwen3-0.6b:plain+spec   qwen3.5-27b:eager+layers8

CONFIG is ``plain`` (no inductor, full decode graphs), ``default`` (vLLM's own) or ``eager``. Words:

``spec``       n-gram speculation, 4 drafts, on prompts that repeat, with weights scaled so that drafts are taken and rejected
``mixed``      min_tokens, logit_bias, penalties, log-probabilities and a sampled request among plain ones, ending one by one
``layersN``    the model's first N layers
``recapture``  the graphs are captured anew whenever patches come or go (V1): a patch that shares what a graph reads needs that
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIZES = [1, 2, 4, 8, 16]
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}},
    "default": {},
    "eager": {"enforce_eager": True},
}
# Served as text only, a multimodal model needs no processor's files. What decides about M-RoPE is mrope_section in the text
# configuration, which that leaves alone. FlashInfer's prefill kernel would be compiled at run time, from sources that are not
# everywhere. Few requests: each holds Mamba blocks, and vLLM wants as many blocks as max_num_seqs.
OF_MODEL: dict[str, dict[str, Any]] = {
    "qwen3.5-27b": {
        "language_model_only": True,
        "gdn_prefill_backend": "triton",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
        "kv_cache_memory_bytes": 3 * 2**30,
    },
}
DRAFTS = 4
SPECULATION = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

Requests = list[tuple[list[int], dict[str, Any]]]  # (prompt's token ids, fields of SamplingParams)


class Refused(Exception):
    """A plan that cannot be run; the message says why."""


@dataclass
class Scenario:
    """One engine. requests: (batch, tokens) -> the requests that are sent together. vary: factors on the layers' dummy weights,
    one comparison each. needs: patch -> counters that must have moved in the patched arm, or the comparison proves nothing.
    """

    model: str
    settings: dict[str, Any]
    requests: Callable[[int, int], Requests]
    vary: tuple[float, ...] = (40.0,)
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    recapture: bool = False
    speculates: bool = False


def steady(batch: int, tokens: int) -> Requests:
    """Equal greedy requests: 32 random tokens each, ``tokens`` to generate."""
    rnd = random.Random(7)
    params = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    return [([rnd.randrange(10, 500) for _ in range(32)], dict(params)) for _ in range(batch)]


def repeating(batch: int, tokens: int) -> Requests:
    """Prompts of four tokens again and again, so that the lookup always finds drafts."""
    params = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    return [([100 + i, 200, 300, 400] * 12, dict(params)) for i in range(batch)]


def mixed(batch: int, tokens: int) -> Requests:
    """Constraints of every kind that the samplers' gates tell apart, among plain requests.

    The first reason that a gate finds hides the others, so requests end in the order in which it looks: the sampled one, log-
    probabilities, penalties, then the minimum is reached, then the bias ends, and what is left is plain.
    """
    rnd = random.Random(11)
    plain = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    stops = sorted(rnd.sample(range(10, 40000), 100))  # so that the minimum forbids something
    kinds: list[dict[str, Any]] = [
        plain | {"min_tokens": tokens // 2, "stop_token_ids": stops},
        plain | {"logit_bias": {100: 4.0, 200: -4.0, 300: 50.0}, "max_tokens": tokens * 5 // 8},
        plain,
        plain | {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2, "max_tokens": tokens * 3 // 8},
        plain | {"logprobs": 2, "max_tokens": tokens // 4},
        plain | {"temperature": 0.8, "seed": 5, "max_tokens": tokens // 8},
        plain,
        plain,
    ]
    prompts = [[rnd.randrange(10, 500) for _ in range(32)] for _ in range(batch)]
    return [(prompt, dict(kinds[i % len(kinds)])) for i, prompt in enumerate(prompts)]


def mixed_repeating(batch: int, tokens: int) -> Requests:
    """The greedy parameters of ``mixed`` on prompts that repeat; vLLM takes no bias under speculation."""
    greedy = {"temperature": 0.0, "ignore_eos": True}
    made = [{k: v for k, v in params.items() if k not in ("logit_bias", "seed")} | greedy for _, params in mixed(batch, tokens)]
    return [(prompt, params) for (prompt, _), params in zip(repeating(batch, tokens), made, strict=True)]


def misled(requests: Callable[[int, int], Requests], answers: list[tuple[int, ...]]) -> Callable[[int, int], Requests]:
    """``requests`` whose prompts mislead the lookup, every second one: three tokens of the request's own earlier answer stand
    at the front with another continuation, and the lookup takes the first place it finds. So drafts are refused wherever the
    answer comes by there again, and taken elsewhere.
    """

    def made(batch: int, tokens: int) -> Requests:
        found = requests(batch, tokens)
        for i in range(0, min(batch, len(answers)), 2):
            prompt, params = found[i]
            found[i] = ([*answers[i][5:8], 11, 12, 13, 14, *prompt], params)
        return found

    return made


def scenario(word: str, runner: str, models: Path) -> Scenario:
    """The engine that ``word`` of ``--plan`` names, for ``runner`` (V1 or V2). Raises Refused."""
    model, _, rest = word.partition(":")
    config, *words = rest.split("+")
    if config not in CONFIGS:
        raise Refused(f"{word}: {config!r} is none of {', '.join(CONFIGS)}")
    known = {"spec", "mixed", "recapture"}
    layers = [w for w in words if re.fullmatch(r"layers\d+", w)]
    if unknown := set(words) - known - set(layers):
        raise Refused(f"{word}: unknown: {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))} and layersN")
    found = Scenario(model, {"max_model_len": 4096, **CONFIGS[config], **OF_MODEL.get(model, {})}, steady)
    if "mixed" in words:
        found.requests = mixed
        found.needs |= _needs_of_mixed(runner)
    if "spec" in words:
        if runner == "V2":
            raise Refused(f"{word}: the V2 runner of vLLM 0.26.0 does not speculate by n-gram; use v1_decode.py")
        found.requests = mixed_repeating if "mixed" in words else repeating
        found.speculates = True
        found.vary = (1.0, 8.0, 40.0)  # from a model that repeats itself to one that never does
        found.needs["greedy-native-dtype"] = ("speculation",)
        if "mixed" in words:
            reasons = ("logprobs", "penalties", "min tokens")
            found.needs["greedy-native-dtype"] += tuple(f"refused: speculation: {reason}" for reason in reasons)
            found.needs["min-tokens-mask-cache"] = ("hit",)
        found.settings |= {"speculative_config": SPECULATION, "disable_log_stats": False}
        if config == "plain":
            plain = CONFIGS["plain"]["compilation_config"]
            sizes = [size * (1 + DRAFTS) for size in SIZES]
            found.settings["compilation_config"] = {**plain, "cudagraph_capture_sizes": sizes}
    if layers:
        found.settings["hf_overrides"] = cut(json.loads((models / model / "config.json").read_text()), int(layers[0][6:]))
    if "recapture" in words:
        if runner == "V2" or config == "eager":
            raise Refused(f"{word}: graphs are captured anew on the V1 runner only, and only where there are graphs")
        found.recapture = True
    if model.startswith("qwen3.5"):
        if runner == "V1":
            found.needs["mrope-pinned-copy"] = ("hit",)
            if found.speculates is False:
                found.needs["decode-input-prep"] = ("hit", "shadow equal")
                # in graphs that were captured without it, every group reads buffers of its own
                if found.recapture or config == "eager":
                    found.needs["gdn-metadata-once"] = ("hit",)
    elif runner == "V1" and not found.speculates:
        found.needs.setdefault("greedy-native-dtype", ("hit", "fused argmax"))
        found.needs["decode-input-prep"] = ("hit",)
    return found


def _needs_of_mixed(runner: str) -> dict[str, tuple[str, ...]]:
    if runner == "V2":
        return {"greedy-tail": ("hit", "refused: temperature", "refused: logprobs", "refused: logits processing")}
    reasons = ("not all greedy", "logprobs", "penalties", "min tokens", "logit bias")
    return {"greedy-native-dtype": ("hit", *(f"refused: {reason}" for reason in reasons))}


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """``hf_overrides`` that leave the first ``layers`` layers of a model's ``config.json``. Raises Refused where a kind of
    layer would be gone: that would be another model.
    """
    text = config.get("text_config", config)
    if not 0 < layers <= text["num_hidden_layers"]:
        raise Refused(f"layers{layers}: the model has {text['num_hidden_layers']} layers")
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    kinds = text.get("layer_types")
    if kinds:
        changes["layer_types"] = kinds[:layers]
        if gone := set(kinds) - set(kinds[:layers]):
            raise Refused(f"layers{layers}: leaves no layer of kind {', '.join(sorted(gone))}")
    return {"text_config": changes} if text is not config else changes


def missing(needs: Mapping[str, tuple[str, ...]], counters: Mapping[str, Mapping[str, int]], shadow: bool) -> list[str]:
    """The counters that had to move and did not. shadow: whether patches compared with the original."""
    return [
        f"{patch}: {event}"
        for patch, events in needs.items()
        for event in events
        if (shadow or not event.startswith("shadow")) and not counters.get(patch, {}).get(event)
    ]
