"""Asking one server for its answers: token ids and top log-probabilities, one request at a time, greedy.

Each prompt is asked twice: once with log-probabilities, once without, because a server may take another way to the
same token when nobody asked for them (and some patches act only there). Read in the sources of vLLM 0.18.1 to 0.33.0:
``/v1/completions`` takes ``return_token_ids`` and ``return_tokens_as_token_ids`` in all of them, so that tokens come
back as ids and never as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ab_runs.client import CallError, call
from ab_runs.spec import Exactness, SpecError

DATA = Path(__file__).resolve().parent / "data"


def prompts(settings: Exactness) -> list[str]:
    """The prompts of a spec, the first ``count`` of them. Raises SpecError where the file holds something else."""
    file = DATA / "prompts.yaml" if settings.prompts == "builtin" else Path(settings.prompts)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SpecError(f"exactness.prompts: {file}: {error}") from error
    if not isinstance(content, list) or not content or not all(isinstance(text, str) and text for text in content):
        raise SpecError(f"exactness.prompts: {file}: expected a list of texts")
    return content[: settings.count]


def texts() -> list[dict[str, str]]:
    """The shipped contexts and continuations of the quality figure."""
    return yaml.safe_load((DATA / "texts.yaml").read_text(encoding="utf-8"))


def _id(token: str) -> int:
    kind, _, number = token.partition(":")
    if kind != "token_id" or not number.lstrip("-").isdigit():
        raise CallError(f"the server named the token {token!r} by its text and not by its id")
    return int(number)


def read_answer(answer: Any, logprobs: bool) -> dict[str, Any]:
    """One completion as ``{tokens, prompt_tokens, finish, top}``. Raises CallError where ids or logprobs are missing.

    top: for each output token a mapping of token id (as text, JSON has no other keys) -> log-probability.
    """
    try:
        choice = answer["choices"][0]
        found = {"finish": choice.get("finish_reason"), "prompt_tokens": answer["usage"]["prompt_tokens"]}
        tokens = choice.get("token_ids")
        if logprobs:
            said = choice["logprobs"]
            named = [_id(token) for token in said["tokens"]]
            tokens = named if tokens is None else tokens
            if named != tokens:
                raise CallError("the server's token ids and the tokens of its log-probabilities differ")
            found["top"] = [
                {str(_id(token)): value for token, value in (step or {}).items()} for step in said["top_logprobs"]
            ]
            found["chosen"] = list(said["token_logprobs"])
        if tokens is None:
            raise CallError("the server returns no token ids (return_token_ids is unknown to it)")
        return {**found, "tokens": [int(token) for token in tokens]}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CallError(f"the server's completion lacks {error}") from error


def ask(url: str, served: str, settings: Exactness, timeout: float = 600) -> list[dict[str, Any]]:
    """Every prompt's answer, with log-probabilities and ``plain`` (the ids given without them)."""
    found = []
    for prompt in prompts(settings):
        body = {
            "model": served,
            "prompt": prompt,
            "max_tokens": settings.max_tokens,
            "temperature": 0,
            "seed": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        full = read_answer(
            call(f"{url}/v1/completions", {**body, "logprobs": settings.top_logprobs}, timeout), logprobs=True
        )
        plain = read_answer(call(f"{url}/v1/completions", body, timeout), logprobs=False)
        found.append({"prompt": prompt, **full, "plain": plain["tokens"]})
    return found


def _tokens(url: str, served: str, text: str, special: bool) -> list[int]:
    body = {"model": served, "prompt": text, "add_special_tokens": special}
    try:
        return [int(token) for token in call(f"{url}/tokenize", body, 60)["tokens"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CallError(f"{url}/tokenize: gives no tokens") from error


def quality(url: str, served: str, timeout: float = 600) -> list[dict[str, Any]]:
    """The mean log-probability (nats) of the tokens of each shipped continuation, from ``prompt_logprobs``.

    Context and continuation are tokenised apart, so that every arm scores the same tokens.
    """
    found = []
    for item in texts():
        context = _tokens(url, served, item["context"], True)
        continuation = _tokens(url, served, item["continuation"], False)
        body = {
            "model": served,
            "prompt": [*context, *continuation],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 1,
        }
        answer = call(f"{url}/v1/completions", body, timeout)
        try:
            steps = answer["choices"][0]["prompt_logprobs"][len(context) :]
            values = [float(step[str(token)]["logprob"]) for step, token in zip(steps, continuation, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CallError(f"the server gives no log-probabilities of a prompt ({error})") from error
        found.append({"context": item["context"], "tokens": len(values), "mean_logprob": sum(values) / len(values)})
    return found
