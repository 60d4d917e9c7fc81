"""Speculation through the real server, on repetitive text so that drafts are accepted and rejected."""

from __future__ import annotations

import signal

import pytest

from overlay.ledger import read_run
from tests.server import Server
from tests.support import ROOT

pytestmark = pytest.mark.serve

SPECULATION = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
PROMPTS = [
    "one two three four one two three four one two three four one two",
    "The cat sat on the mat. The cat sat on the mat. The cat sat on",
    "print(1)\nprint(2)\nprint(3)\nprint(4)\nprint(",
]
MIXES = [{}, {"min_tokens": 24}, {"min_tokens": 40, "stop_token_ids": [198, 216]}, {"min_tokens": 10, "frequency_penalty": 0.4}]


def answers(server: Server) -> list[list[int]]:
    found = [server.complete(prompt, 40, **mix)["token_ids"] for mix in MIXES for prompt in PROMPTS]
    # several at once, with and without min_tokens: rows move, drafts differ in length
    return found + batch(server)


def batch(server: Server) -> list[list[int]]:
    import httpx

    body = {"model": "m", "prompt": PROMPTS, "max_tokens": 24, "min_tokens": 24, "temperature": 0, "return_token_ids": True}
    choices = httpx.post(f"{server.base}/v1/completions", json=body, timeout=300).json()["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def test_answers_under_speculation_equal_the_stock_servers_and_the_mask_cache_is_hit():
    flags = ["--speculative-config", SPECULATION]
    with Server([*flags, "--overlay-config", str(ROOT / "configs/off.yaml")]).wait_healthy() as server:
        stock = answers(server)
        stock_exit = server.stop(signal.SIGTERM)
    with Server([*flags, "--overlay-patches", "+min-tokens-mask-cache,+block-table-dirty"]).wait_healthy() as server:
        assert answers(server) == stock
        receipts, counters = read_run(str(server.run))
        assert server.stop(signal.SIGTERM) == stock_exit
    worker = next(r for r in receipts if "worker" in r["role"])
    assert worker["patches"]["min-tokens-mask-cache"]["verified"] is True
    assert counters[worker["pid"]]["min-tokens-mask-cache"]["hit"] > 5, counters
