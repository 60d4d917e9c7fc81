"""Verification steps of K = 4 drafts a request while ``min_tokens`` still masks two stop ids: the steady case of a service."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from ab_runs.micro import Case, Work

DRAFTS, VOCABULARY, STOPS = 4, 4096, {7, 4000}


def cases(device: str) -> Iterable[Case]:
    """Batches of 1 and 8. The vocabulary is small: what is timed is the mask's making, not the size of the logits."""
    for requests in (1, 8):
        yield Case(f"verify {requests} x {DRAFTS} drafts", lambda requests=requests: _verify(device, requests))


def _verify(device: str, requests: int) -> Work:
    import torch
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    processor = MinTokensLogitsProcessor(None, torch.device(device), False)
    # from 0.32 on an entry also says whether the request has structured outputs
    source = inspect.getsource(MinTokensLogitsProcessor)
    more = (False,) if "structured" in source else ()
    processor.min_toks = {row: (1_000_000, [0] * 9, set(STOPS), *more) for row in range(requests)}
    generator = torch.Generator().manual_seed(5)
    fresh = torch.randn(requests * DRAFTS, VOCABULARY, generator=generator).to(device)
    logits = fresh.clone()
    drafts = [DRAFTS] * requests

    def step() -> None:
        processor.apply_with_spec_decode(logits, list(drafts))

    def outputs() -> dict[str, Any]:
        return {"logits": logits}

    return Work(step, outputs, prepare=lambda: logits.copy_(fresh))
