"""greedy-native-dtype against this release's ``Sampler`` and ``RejectionSampler``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support import applied
from tests.v1.checks.block_table import counted, spent
from tests.v1.lab import known

VOCABULARY = 211
PATCH = "greedy-native-dtype"


@contextmanager
def device_path() -> Iterator[None]:
    """From 0.32 on the CPU platform has a greedy kernel of its own for float32: take the one of devices instead."""
    from vllm.v1.sample import sampler

    platform = getattr(sampler, "current_platform", None)
    if platform is None:
        yield
        return

    class Device:
        def __getattr__(self, name: str) -> Any:
            return getattr(platform, name)

        @staticmethod
        def is_cpu() -> bool:
            return False

    sampler.current_platform = Device()
    try:
        yield
    finally:
        sampler.current_platform = platform


def metadata(requests: int, **changes: Any) -> Any:
    """A greedy batch that asks for nothing; ``changes`` are fields, or entries of the always present processors."""
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata

    device = torch.device("cpu")
    bias, minimum = LogitBiasLogitsProcessor(None, device, False), MinTokensLogitsProcessor(None, device, False)
    tail = (False,) if changes.pop("four", False) else ()
    if changes.pop("bias", False):
        bias.biases = {0: {5: 40.0}}
        bias.bias_tensor = torch.tensor([40.0])
        bias.logits_slice = (torch.tensor([0], dtype=torch.int32), torch.tensor([5], dtype=torch.int32))
    if changes.pop("minimum", False):
        minimum.min_toks = {0: (9, [], {7}, *tail)}
        minimum.logits_slice = (torch.tensor([0], dtype=torch.int32), torch.tensor([7], dtype=torch.int32))
    processors = [minimum, bias, *changes.pop("processors", ())]
    zeros = torch.zeros(requests)
    values: dict[str, Any] = {
        "temperature": None,
        "all_greedy": True,
        "all_random": False,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": torch.zeros(requests, 1, dtype=torch.int64),
        "frequency_penalties": zeros,
        "presence_penalties": zeros,
        "repetition_penalties": zeros + 1,
        "output_token_ids": [[] for _ in range(requests)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(processors),
        "spec_token_ids": [[] for _ in range(requests)],
        "logprob_token_ids": None,
        "thinking_budget_state_holder": None,
    }
    return SamplingMetadata(**known(SamplingMetadata.__init__, values | changes))


def rows(rnd: random.Random, number: int, dtype: Any) -> Any:
    """Random rows with many ties, some infinities, some NaN."""
    import torch

    generator = torch.Generator().manual_seed(rnd.randrange(1 << 30))
    logits = (torch.randn(number, VOCABULARY, generator=generator) * 3).round() / 2
    for row in range(number):
        kind = rnd.random()
        if kind < 0.1:
            logits[row] = 0.0
            logits[row, ::2] = -0.0
        elif kind < 0.2:
            logits[row, rnd.randrange(VOCABULARY)] = float("inf")
        elif kind < 0.3:
            logits[row] = float("-inf")
        elif kind < 0.4:
            for _ in range(2):
                logits[row, rnd.randrange(VOCABULARY)] = float("nan")
    return logits.to(dtype)


def drafts(rnd: random.Random, requests: int) -> Any:
    """Speculation's metadata with the row indices as the runner makes them; a request may have no draft."""
    import torch
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    lengths = [rnd.choice((0, 1, 2, 3)) for _ in range(requests)]
    ids = [[rnd.randrange(VOCABULARY) for _ in range(n)] for n in lengths]
    made = SpecDecodeMetadata.make_dummy(ids, torch.device("cpu"))
    target, bonus, row = [], [], 0
    for n in lengths:
        target += range(row, row + n)
        bonus.append(row + n)
        row += n + 1
    made.target_logits_indices = torch.tensor(target, dtype=torch.int32)
    made.bonus_logits_indices = torch.tensor(bonus, dtype=torch.int32)
    return made


def _samplers() -> tuple[Any, Any]:
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    sampler = Sampler()
    return sampler, RejectionSampler(sampler)


def _same(mine: Any, theirs: Any) -> None:
    import torch

    assert mine.sampled_token_ids.dtype is theirs.sampled_token_ids.dtype
    assert mine.sampled_token_ids.shape == theirs.sampled_token_ids.shape
    assert mine.sampled_token_ids.is_contiguous()
    assert torch.equal(mine.sampled_token_ids, theirs.sampled_token_ids), (mine, theirs)
    assert mine.logprobs_tensors is None and theirs.logprobs_tensors is None


def check_greedy_tokens_equal_the_originals(release: str) -> dict[str, Any]:
    import torch

    sampler, _ = _samplers()
    before, several = counted(PATCH), 0
    with device_path():
        for seed in range(40):
            rnd = random.Random(seed)
            requests = rnd.choice((1, 1, 2, 5, 8))
            several += requests > 1
            logits = rows(rnd, requests, rnd.choice((torch.bfloat16, torch.float16)))
            kept = logits.clone()
            theirs = sampler(logits.clone(), metadata(requests))
            with applied(PATCH, version=release):
                _same(sampler(logits, metadata(requests)), theirs)
            assert torch.equal(logits.nan_to_num(9.0), kept.nan_to_num(9.0)), "the logits were changed"
    events = spent(PATCH, before)
    # Triton's interpreter stands in for a device: the kernel of one launch ran for every batch of several requests
    assert 10 < several < 40 and events == {"hit": 40, "fused argmax": several}, events
    return events


def check_without_the_kernel_pytorchs_argmax_gives_the_tokens(release: str) -> dict[str, Any]:
    """Too many rows, no Triton, or a kernel that does not run: the other way, with the same tokens."""
    import torch

    from patches._lib import argmax
    from patches.common import greedy_native_dtype as patch

    sampler, _ = _samplers()

    def fails(logits: Any) -> Any:
        raise RuntimeError("does not compile")

    before, real, kept = counted(PATCH), argmax.argmax, patch._kernel
    with device_path():
        try:
            cases = ((65, None, real), (2, False, real), (1, False, real), (3, None, fails), (2, None, fails))
            for number, kernel, function in cases:
                patch._kernel, argmax.argmax = kernel, function
                logits = rows(random.Random(number), number, torch.bfloat16)
                theirs = sampler(logits.clone(), metadata(number))
                with applied(PATCH, version=release):
                    _same(sampler(logits, metadata(number)), theirs)
        finally:
            argmax.argmax, patch._kernel = real, kept
    events = spent(PATCH, before)
    assert events == {"hit": 5, "no fused argmax: RuntimeError": 2}, events
    return events


def check_speculation_accepts_the_originals_tokens(release: str) -> dict[str, Any]:
    import torch

    _, rejection = _samplers()
    before = counted(PATCH)
    with device_path():
        for seed in range(25):
            rnd = random.Random(100 + seed)
            requests = rnd.randrange(1, 6)
            spec = drafts(rnd, requests)
            number = sum(spec.num_draft_tokens)
            logits = rows(rnd, number + requests, rnd.choice((torch.bfloat16, torch.float16)))
            # some drafts are what the target says, so that they are accepted
            best = logits.float().argmax(-1)[spec.target_logits_indices.long()].to(torch.int32)
            take = torch.tensor([rnd.random() < 0.7 for _ in range(number)], dtype=torch.bool)
            spec.draft_token_ids = torch.where(take, best, spec.draft_token_ids)
            theirs = rejection(spec, None, logits.clone(), metadata(requests))
            with applied(PATCH, version=release):
                _same(rejection(spec, None, logits, metadata(requests)), theirs)
    events = spent(PATCH, before)
    assert events == {"hit": 25, "speculation": 25}, events
    return events


def _refusals(release: str) -> dict[str, tuple[dict[str, Any], Any]]:
    """reason -> (what to change in the metadata, logits dtype)."""
    import torch
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    class Custom(MinTokensLogitsProcessor):
        pass

    class Holder:
        def has_tracked_requests(self) -> bool:
            return True

        def update_state(self, *args: Any, **kwargs: Any) -> None:
            pass

        def apply_to_logits(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
            return logits

    half = torch.bfloat16
    mask = torch.zeros(2, VOCABULARY, dtype=torch.bool)
    mask[:, :100] = True
    four = tuple(map(int, release.split("."))) >= (0, 32, 0)
    found: dict[str, tuple[dict[str, Any], Any]] = {
        "not all greedy": ({"all_greedy": False, "temperature": torch.zeros(2)}, half),
        "logits dtype": ({}, torch.float32),
        "logprobs": ({"max_num_logprobs": 2}, half),
        "penalties": ({"no_penalties": False}, half),
        "allowed token ids": ({"allowed_token_ids_mask": mask}, half),
        "bad words": ({"bad_words_token_ids": {0: [[3]]}}, half),
        "min tokens": ({"minimum": True, "four": four}, half),
        "logit bias": ({"bias": True}, half),
        "a custom logits processor": ({"processors": [Custom(None, torch.device("cpu"), False)]}, half),
    }
    if release != "0.18.1":
        found["thinking budget"] = ({"thinking_budget_state_holder": Holder()}, half)
        found["logprobs "] = ({"logprob_token_ids": {0: [1, 2]}}, half)
    return found


def check_each_gate_condition_takes_the_original(release: str) -> dict[str, Any]:
    """Broken once each: the original's answer (tokens, log-probabilities) comes back, counted under its reason."""
    import torch

    sampler, _ = _samplers()
    seen = {}
    with device_path():
        for reason, (changes, dtype) in _refusals(release).items():
            logits = rows(random.Random(3), 2, torch.float32).nan_to_num(0.0).clamp(-9, 9).to(dtype)
            theirs: Any = _outcome(sampler, logits.clone(), metadata(2, **dict(changes)))
            before = counted(PATCH)
            with applied(PATCH, version=release):
                mine = _outcome(sampler, logits.clone(), metadata(2, **dict(changes)))
            events = spent(PATCH, before)
            assert events == {f"refused: {reason.strip()}": 1}, (reason, events)
            assert mine == theirs, reason
            seen[reason] = mine[0] if isinstance(mine, tuple) else mine
    return seen


def check_speculation_refuses_what_it_cannot_prove(release: str) -> dict[str, Any]:
    import torch
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    class OtherSampler(Sampler):
        pass

    class OtherRejection(RejectionSampler):
        pass

    sampler, rejection = _samplers()
    rnd = random.Random(5)
    spec = drafts(rnd, 2)
    logits = rows(rnd, sum(spec.num_draft_tokens) + 2, torch.bfloat16).nan_to_num(0.0)
    seen = {}
    with device_path():
        cases: list[tuple[str, Any, dict[str, Any]]] = [
            ("refused: speculation: another sampler", OtherRejection(sampler), {}),
            ("refused: speculation: another sampler", RejectionSampler(OtherSampler()), {}),
            ("refused: speculation: logprobs", rejection, {"max_num_logprobs": 1}),
            ("refused: speculation: logit bias", rejection, {"bias": True}),
        ]
        for event, instance, changes in cases:
            theirs = _outcome(instance, spec, None, logits.clone(), metadata(2, **dict(changes)))
            before = counted(PATCH)
            with applied(PATCH, version=release):
                mine = _outcome(instance, spec, None, logits.clone(), metadata(2, **dict(changes)))
            events = spent(PATCH, before)
            assert events.get(event) == 1 and "hit" not in events, events
            assert mine == theirs, event
            seen[event] = events
        for name in ("synthetic_mode", "use_fly"):
            other = RejectionSampler(sampler)
            setattr(other, name, True)
            before = counted(PATCH)
            with applied(PATCH, version=release):
                _outcome(other, spec, None, logits.clone(), metadata(2))
            events = spent(PATCH, before)
            assert events.get("refused: speculation: another acceptance rule") == 1, events
    return seen


def _outcome(function: Any, *args: Any) -> Any:
    """Tokens and log-probabilities as lists, or the exception's type (some paths want a device)."""
    import torch

    torch.manual_seed(0)
    try:
        output = function(*args)
    except Exception as error:
        return type(error).__name__
    tensors = output.logprobs_tensors
    parts = () if tensors is None else tuple(t.tolist() for t in tensors if isinstance(t, torch.Tensor))
    return output.sampled_token_ids.tolist(), parts
