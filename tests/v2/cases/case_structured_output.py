"""Requests under real grammars (JSON schema, regular expression, choice, EBNF) among others, in whole histories.

vLLM's own manager compiles and advances the grammars, its scheduler hands out the bitmasks, the V2 runner's worker applies
them. What each patch does in a step with a bitmask is counted: no tail is replayed there, and the argmax reads the masked
logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from patches.common import decision_cache, greedy_tail, sampler_staged_writes
from patches.common import decode_input_prep_v2 as prep
from patches.cuda import decode_tail_graph as tail
from tests.support import applied
from tests.testbeds import grammars
from tests.v2.cases.case_tail_graph import all_applied
from tests.v2.cases.engine import VOCAB, Engine, Trace, assert_equal, counted, external, stock_run

GREEDY = (6, "structured greedy", 4)
COUNTED = {"tail": tail.count, "prep": prep.count, "greedy": greedy_tail.count}

# (names of the requests under a grammar, what each of COUNTED counted) of a step that sampled
Step = tuple[tuple[str, ...], dict[str, dict[str, int]]]


@contextmanager
def by_step(engine: Engine) -> Iterator[list[Step]]:
    """What the patches counted in each step, from its inputs to its tokens. Enter it behind the patches."""
    kind = type(engine.runner)
    sample, prepare = kind.sample, kind.prepare_inputs
    steps: list[Step] = []
    before: dict[str, dict[str, int]] = {}

    def prepares(runner: Any, *args: Any, **kwargs: Any) -> Any:
        before.update({name: counters.all() for name, counters in COUNTED.items()})
        return prepare(runner, *args, **kwargs)

    def samples(runner: Any, hidden: Any, batch: Any, grammar: Any) -> Any:
        found = sample(runner, hidden, batch, grammar)
        events = {
            name: {k: v - before[name].get(k, 0) for k, v in counters.all().items() if v != before[name].get(k, 0)}
            for name, counters in COUNTED.items()
        }
        if engine.trace is not None:
            names = () if grammar is None else tuple(map(external, grammar.structured_output_request_ids))
            steps.append((names, events))
        return found

    with pytest.MonkeyPatch.context() as spies:
        spies.setattr(kind, "sample", samples)
        spies.setattr(kind, "prepare_inputs", prepares)
        yield steps


def assert_obeyed(engine: Engine, trace: Trace) -> set[str]:
    """Every output under a grammar obeys it, as far as it goes. The kinds of which one came to its end."""
    ended = set()
    assert trace.grammars
    for name, grammar in trace.grammars.items():
        for tokens, _, reason in trace.outputs.get(name, ()):
            assert reason in ("stop", "length"), f"{name}: {reason}"
            assert grammars.accepted(grammar, engine.tokenizer, VOCAB, tokens) == len(tokens), f"{name}: {grammar}, {tokens}"
            if reason == "stop":
                assert tokens[-1] == grammars.EOS
                text = engine.tokenizer.decode(tokens[:-1])
                assert grammars.obeys(grammar, text), f"{name}: {grammar}, {text!r}"
                ended |= set(grammar)
    return ended


def test_the_judges_of_outputs_refuse_wrong_ones(qwen: Engine) -> None:
    right = ['{"colour": "red", "sizes": [1], "round": true}', "ab12-f00", "blue", "f(abc)+12;"]
    wrong = ['{"colour": "red", "sizes": [], "round": true}', "ab1-f00", "blu", "f(abc)+12"]
    for kind, good, bad in zip(grammars.KINDS, right, wrong, strict=True):
        assert grammars.obeys(kind, good) and not grammars.obeys(kind, bad)
        tokens = qwen.tokenizer.encode(good)
        assert grammars.accepted(kind, qwen.tokenizer, VOCAB, tokens) == len(tokens)
        tokens = qwen.tokenizer.encode(bad) + [grammars.EOS]
        assert grammars.accepted(kind, qwen.tokenizer, VOCAB, tokens) < len(tokens)


@pytest.mark.parametrize(("seed", "kind", "pad_to"), [GREEDY, (5, "structured", 1)])
def test_histories_with_captured_tails(asynchronous: Engine, seed: int, kind: str, pad_to: int) -> None:
    """Under asynchronous scheduling: a step with a bitmask is prepared before, and sampled after, the tokens before it."""
    stock = stock_run(asynchronous, seed, kind, pad_to)
    with all_applied(asynchronous), applied("decision-cache"), by_step(asynchronous) as steps:
        patched = asynchronous.run(seed, kind, pad_to)
    assert_equal(stock, patched)
    assert assert_obeyed(asynchronous, patched)
    assert stock.deferred == patched.deferred > 20
    masked = [(names, events) for names, events in steps if names]
    assert [names for names, _ in masked] == [names for names, *_ in patched.masks], "a bitmask that nobody applied"
    assert len(masked) > 20
    for _, events in masked:
        assert len(events["tail"]) == 1
        assert set(events["tail"]) <= {"refused: structured output", "refused: inputs prepared by the original"}
        assert sum(events["greedy"].values()) == 1  # the sampler ran, behind the bitmask
    assert any("refused: structured output" in events["tail"] for _, events in masked)
    assert any("hit" in events["prep"] for _, events in masked)
    plain = [events for names, events in steps if not names]
    if kind == "structured greedy":
        assert any("hit" in events["greedy"] for _, events in masked)
        assert any("hit" in events["tail"] for events in plain)
    else:
        assert any("refused: temperature" in events["greedy"] for _, events in masked)


def test_under_speculation(speculating: Engine) -> None:
    """Several rows of bitmask a request: two patches work there, the others see speculation."""
    stock = stock_run(speculating, 4, "structured speculative")
    with ExitStack() as stack:
        for name in ("sampler-staged-writes", "decode-input-prep-v2", "greedy-tail", "decision-cache"):
            stack.enter_context(applied(name))
        writes, kept = (stack.enter_context(counted(p.count)) for p in (sampler_staged_writes, decision_cache))
        steps = stack.enter_context(by_step(speculating))
        patched = speculating.run(4, "structured speculative")
    assert_equal(stock, patched)
    assert assert_obeyed(speculating, patched)
    assert any(rows > len(names) for names, rows, *_ in patched.masks), "no draft under a grammar"
    assert writes["hit: sampler"] > 0 and kept["hit"] > 0
    for _, events in steps:
        assert "hit" not in events["prep"] and "hit" not in events["greedy"]


def test_a_tail_that_ignored_the_grammar_would_be_noticed(asynchronous: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the comparison with the original, and by the outputs themselves."""
    stock = stock_run(asynchronous, *GREEDY)
    refusal = tail._refusal
    monkeypatch.setattr(tail, "_refusal", lambda runner, args, kwargs: refusal(runner, (*args[:2], None), kwargs))
    with all_applied(asynchronous), by_step(asynchronous) as steps:
        patched = asynchronous.run(*GREEDY)
    taken = [events["tail"] for names, events in steps if names]
    assert any("hit" in events or "refused: not captured yet" in events for events in taken)
    with pytest.raises(AssertionError):
        assert_equal(stock, patched)
    with pytest.raises(AssertionError):
        assert_obeyed(asynchronous, patched)
