"""Requests under real grammars among others, through the release's own manager, scheduler, bitmask and sampler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support import applied
from tests.testbeds import grammars
from tests.v1 import lab
from tests.v1.checks.block_table import counted, spent
from tests.v1.checks.preparation import assert_twins
from tests.v1.checks.sampler import device_path

PATCHES = ("block-table-dirty", "unchanged-copies", "decode-input-prep", "greedy-native-dtype")
VOCABULARY = 512
STEPS = 36
RELEASES = ("0.18.1", "0.32.0", "0.33.0")  # the oldest, the installed and the newest: seconds each


class GrammarLab(lab.Lab):
    """A lab whose tokens the release's sampler takes from random bf16 logits, under the bitmask of the step's grammars."""

    def __init__(self, seed: int) -> None:
        import torch
        from vllm.v1.structured_output import StructuredOutputManager

        super().__init__(seed)
        self.tokenizer = grammars.save_tokenizer(Path(self.config.model_config.tokenizer))
        self.config.model_config.skip_tokenizer_init = False
        self.config.structured_outputs_config.disable_any_whitespace = True
        manager = StructuredOutputManager(self.config)
        manager._use_async_grammar_compilation = False  # a thread's grammar would be ready at a step of its own choice
        self.scheduler.structured_output_manager = manager
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.requests: dict[str, Any] = {}
        self.kinds: dict[str, dict[str, Any]] = {}
        self.masks: list[tuple[tuple[str, ...], bytes, Any]] = []  # (requests, bitmask, logits under it) of each such step
        self.deferred = 0
        add = self.scheduler.add_request

        def compile_and_add(request: Any) -> None:
            self.requests[request.request_id] = request
            manager.grammar_init(request)
            add(request)

        self.scheduler.add_request = compile_and_add

    def add(self, length: int | None = None, tokens: int | None = None, **params: Any) -> str:
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.structured_output.utils import choice_as_grammar

        length, tokens = self.random.choice((1, 5, 17, 40, 100)), self.random.choice((10, 30, 40))
        if self.names % 2:
            return super().add(length, tokens)
        kind = grammars.KINDS[len(self.kinds) % len(grammars.KINDS)]
        # what the engine's front end does: a choice becomes a grammar, the backend is noted
        wanted = StructuredOutputsParams(**({"grammar": choice_as_grammar(kind["choice"])} if "choice" in kind else kind))
        wanted._backend = "xgrammar"
        name = super().add(length, tokens, structured_outputs=wanted, stop_token_ids=[grammars.EOS])
        self.kinds[name] = kind
        return name

    def draw(self, output: Any) -> Any:
        import torch
        from vllm.v1.structured_output.utils import apply_grammar_bitmask

        if output.pending_structured_output_tokens:  # the bitmask follows from the tokens of the step before
            self.deferred += 1
            while self.pending:
                self.tell()
        batch = self.runner.input_batch
        logits = torch.randn(batch.num_reqs, VOCABULARY, generator=self.generator).to(torch.bfloat16)
        grammar = self.scheduler.get_grammar_bitmask(output)
        if grammar is not None:
            with nothing_pinned():
                apply_grammar_bitmask(output, grammar, batch, logits)
            names = tuple(grammar.structured_output_request_ids)
            self.masks.append((names, grammar.grammar_bitmask.tobytes(), logits.clone()))
        return self.runner.sampler(logits, batch.sampling_metadata).sampled_token_ids


@contextmanager
def nothing_pinned() -> Iterator[None]:
    """0.18.1 pins the rows' numbers wherever it runs."""
    import torch

    original = torch.tensor
    torch.tensor = lambda *args, **kwargs: original(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory"})
    try:
        yield
    finally:
        torch.tensor = original


def history(seed: int, steps: int, patches: tuple[str, ...], release: str) -> tuple[GrammarLab, list[dict[str, Any]]]:
    from patches._lib.v1_decode_shadow import snapshot

    seen = []
    with ExitStack() as stack:
        stack.enter_context(device_path())
        for patch in patches:
            stack.enter_context(applied(patch, version=release))
        world = GrammarLab(seed)
        for _ in range(7):
            world.add()
        for _ in range(steps):
            returned = world.step()
            if returned is not None:
                seen.append(snapshot(world.runner, returned))
    return world, seen


def assert_obeyed(world: GrammarLab) -> set[str]:
    """Every output under a grammar obeys it, as far as it goes. The kinds of which one came to its end."""
    ended = set()
    for name, kind in world.kinds.items():
        request = world.requests[name]
        tokens = list(request.output_token_ids)
        assert request.status.name != "FINISHED_ERROR", name
        assert grammars.accepted(kind, world.tokenizer, VOCABULARY, tokens) == len(tokens), (kind, tokens)
        if request.status.name == "FINISHED_STOPPED":
            text = world.tokenizer.decode(tokens[:-1])
            assert grammars.obeys(kind, text), (kind, text)
            ended |= set(kind)
    return ended


def check_requests_under_grammars_get_what_the_stock_twin_gives_them(release: str) -> dict[str, Any]:
    import torch

    if release not in RELEASES:
        return {}
    before = {p: counted(p) for p in PATCHES}
    patched, ours = history(5, STEPS, PATCHES, release)
    events = {p: spent(p, before[p]) for p in PATCHES}
    stock, theirs = history(5, STEPS, (), release)
    assert_twins(ours, theirs)
    assert len(patched.masks) == len(stock.masks) > 20
    for (names, bitmask, logits), (others, other, masked) in zip(patched.masks, stock.masks, strict=True):
        assert names == others and bitmask == other and torch.equal(logits, masked)
    said = [{n: (r.status.name, list(r.output_token_ids)) for n, r in w.requests.items()} for w in (patched, stock)]
    assert said[0] == said[1]
    ended = assert_obeyed(patched)
    assert len(ended) > 1 and patched.deferred == stock.deferred > 15
    assert events["greedy-native-dtype"]["hit"] > 20 and events["decode-input-prep"]["hit"] > 10, events
    return events | {"masked": len(patched.masks), "deferred": patched.deferred}
