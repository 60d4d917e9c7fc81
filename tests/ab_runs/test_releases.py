"""What the comparison asks of a vLLM is there in the sources of every supported release."""

import re

import pytest

from tests.support import CACHE

RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")
pytestmark = [pytest.mark.releases, pytest.mark.parametrize("release", RELEASES)]


def source(release, *parts):
    root = CACHE / "src" / f"vllm-{release}" / "vllm"
    if not root.exists():
        pytest.skip("the sources of this release are not unpacked here")
    return root.joinpath(*parts).read_text(encoding="utf-8")


def test_completions_return_ids_and_prompt_logprobs(release):
    text = source(release, "entrypoints", "openai", "completion", "protocol.py")
    for field in (
        "return_token_ids",
        "return_tokens_as_token_ids",
        "prompt_logprobs",
        "ignore_eos",
        "logprobs",
        "seed",
    ):
        assert re.search(rf"^    {field}: ", text, re.M), field
    response = text[text.index("class CompletionResponseChoice") :]
    for field in ("token_ids", "prompt_logprobs", "finish_reason", "logprobs"):
        assert re.search(rf"^    {field}: ", response, re.M), field


def test_tokenize_takes_a_prompt_and_special_tokens(release):
    assert '"/tokenize"' in source(release, "entrypoints", "serve", "tokenize", "api_router.py")
    text = source(release, "entrypoints", "serve", "tokenize", "protocol.py")
    part = text[text.index("class TokenizeCompletionRequest") :]
    assert "add_special_tokens: bool" in part and "    prompt: str" in part


def test_the_engine_says_its_configuration_at_start(release):
    from ab_runs.sample import engine_settings

    text = source(release, "v1", "engine", "core.py")
    line = re.search(r'"(Initializing a V1 LLM engine \(v%s\) with config: %s)"', text)[1]
    said = engine_settings(
        f"INFO {line % (release, 'dtype=torch.bfloat16, quantization=None, enable_prefix_caching=False')}"
    )
    assert said["version"] == release and said["enable_prefix_caching"] == "False"
    config = source(release, "config", "vllm.py")
    assert "enable_prefix_caching={" in config and "compilation_config={" in config


def test_prefix_cache_counters_have_their_names(release):
    text = source(release, "v1", "metrics", "loggers.py")
    for name in ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits", "num_preemptions"):
        assert f'"vllm:{name}"' in text, name


def test_the_load_generator_writes_what_the_verdict_reads(release):
    text = source(release, "benchmarks", "serve.py")
    for field in ("ttfts", "itls", "output_lens", "errors", "duration", "generated_texts", "completed", "failed"):
        assert f'"{field}": ' in text, field
    assert ('"latencies": ' in text) == (release in ("0.32.0", "0.33.0"))
    client = source(release, "benchmarks", "lib", "endpoint_request_func.py")
    assert 'output.output_tokens = usage.get("completion_tokens")' in client and '"include_usage": True' in client


def test_the_jit_monitors_line_is_recognised(release):
    from ab_runs.sample import _COMPILING

    root = CACHE / "src" / f"vllm-{release}" / "vllm"
    if not root.exists():
        pytest.skip("the sources of this release are not unpacked here")
    found = list(root.rglob("jit_monitor.py"))
    assert bool(found) == (release != "0.18.1")
    for file in found:
        said = re.findall(r'"([^"]*during inference: [^"]*)"', file.read_text(encoding="utf-8"))
        assert said and all(_COMPILING.search(line) for line in said)
