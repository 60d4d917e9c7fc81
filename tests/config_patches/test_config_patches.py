"""The patches that only turn vLLM's own knobs: where, with which value, and why not elsewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest

from overlay.facts import Build, Facts, Hardware, Model, Serving
from patches.common import language_model_only, local_argmax_drafts, moe_padding_fills, shared_expert_stream
from patches.cuda import flash_split_limit
from tests.config_patches.sources import RELEASES
from tests.support import CACHE


def facts(release: str = "0.28.0", env: dict[str, str] | None = None, **values: Any) -> Facts:
    """values: model_*, hardware_* and serving fields."""
    model = {k[6:]: v for k, v in values.items() if k.startswith("model_")}
    hardware = {"platform": "cuda", "arch": "sm90", "sms": 132}
    hardware |= {k[9:]: v for k, v in values.items() if k.startswith("hardware_")}
    serving = {k: v for k, v in values.items() if not k.startswith(("model_", "hardware_"))}
    return Facts(Build(public=release), Hardware(**hardware), Model(**model), Serving(**serving), env or {})


def text(release: str, file: str) -> str:
    path = CACHE / "src" / f"vllm-{release}" / "vllm" / file
    if not path.is_file():
        pytest.skip(f"the sources of vLLM {release} are not unpacked")
    return path.read_text()


# -- local-argmax-drafts


def test_drafts_known_to_offer_the_reduction_get_it() -> None:
    for model in ("qwen3_5", "qwen3_5_moe"):
        assert local_argmax_drafts.draft_offers_it(facts(model_model_type=model)) is None
    found = local_argmax_drafts.contribute(facts(), {})
    assert found.args == {"speculative_config.use_local_argmax_reduction": True}


def test_other_drafts_would_stop_the_server_and_do_not_get_it() -> None:
    for model in ("qwen3_next", "deepseek_v3", None):
        assert "get_top_tokens" in (local_argmax_drafts.draft_offers_it(facts(model_model_type=model)) or "")


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_the_draft_class_has_it_in_exactly_the_releases_claimed(release: str) -> None:
    from overlay.versions import in_range

    source = CACHE / "src" / f"vllm-{release}" / "vllm/model_executor/models/qwen3_5_mtp.py"
    if not source.parent.is_dir():
        pytest.skip(f"the sources of vLLM {release} are not unpacked")
    offered = source.is_file() and re.search(r"class Qwen3_5MTP\([^)]*LocalArgmaxMixin", source.read_text()) is not None
    assert offered is in_range(release, local_argmax_drafts.PATCH.condition.vllm)
    config = text(release, "config/speculative.py")
    assert "use_local_argmax_reduction: bool = False" in config


# -- moe-padding-fills


@pytest.mark.parametrize(("release", "set_"), [("0.26.0", False), ("0.28.0", True), ("0.32.0", True), ("0.33.0", True)])
def test_padding_marks_go_where_they_are_on_by_default(release: str, set_: bool) -> None:
    found = moe_padding_fills.contribute(facts(release), {})
    assert (found.env == {"VLLM_MOE_SKIP_PADDING": "0"}) is set_
    assert bool(found.superseded) is not set_


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_the_default_of_the_padding_marks_is_as_claimed(release: str) -> None:
    match = re.search(r'"VLLM_MOE_SKIP_PADDING", "(\d)"', text(release, "envs.py"))
    expected = {"0.18.1": None, "0.23.0": None, "0.26.0": "0"}.get(release, "1")
    assert (match and match[1]) == expected
    if match is None:
        from overlay.versions import in_range

        assert not in_range(release, moe_padding_fills.PATCH.condition.vllm)


def test_only_dense_models_lose_the_marks() -> None:
    assert moe_padding_fills.PATCH.condition.facts["model.moe"] is False


# -- language-model-only


def test_text_only_serving_is_the_users_decision() -> None:
    assert language_model_only.PATCH.default is False
    found = language_model_only.contribute(facts(), {})
    assert found.args == {"language_model_only": True} and "refused" in found.notes[0]


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_the_flag_exists_everywhere(release: str) -> None:
    assert '"--language-model-only"' in text(release, "engine/arg_utils.py")
    assert re.search(r"if self\.language_model_only:\s+return 0", text(release, "config/multimodal.py"))


# -- flash-split-limit


@pytest.mark.parametrize(
    ("heads", "ranks", "limit"), [(1, 1, 128), (2, 1, 64), (4, 1, None), (8, 1, None), (8, 4, 64), (8, 8, 128), (4, 8, 128)]
)
def test_the_bound_follows_the_kv_heads_of_a_rank(heads: int, ranks: int, limit: int | None) -> None:
    found = flash_split_limit.contribute(
        facts(model_num_kv_heads=heads, tensor_parallel=ranks, cudagraph_mode="FULL_AND_PIECEWISE"), {"limit": 0}
    )
    key = "attention_config.flash_attn_max_num_splits_for_cuda_graph"
    assert found.args.get(key) == limit
    assert bool(found.nothing) is (limit is None)


def test_without_full_graphs_the_bound_is_of_no_use() -> None:
    for off in ({"enforce_eager": True}, {"cudagraph_mode": "PIECEWISE"}, {"cudagraph_mode": "NONE"}):
        assert flash_split_limit.contribute(facts(model_num_kv_heads=2, tensor_parallel=1, **off), {}).nothing


def test_the_users_bound_is_taken_as_it_is() -> None:
    found = flash_split_limit.contribute(facts(model_num_kv_heads=8, tensor_parallel=1), {"limit": 96})
    assert list(found.args.values()) == [96]


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_the_knob_and_its_default_are_as_claimed(release: str) -> None:
    assert "flash_attn_max_num_splits_for_cuda_graph: int = 32" in text(release, "config/attention.py")


def test_another_summation_order_is_called_rounding() -> None:
    assert flash_split_limit.PATCH.exactness.value == "rounding"


# -- shared-expert-stream


def test_the_side_stream_is_upstream_and_on() -> None:
    found = shared_expert_stream.contribute(facts(), {})
    assert "256 tokens" in found.superseded and not found.args and not found.env


@pytest.mark.parametrize(
    "env", [{"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1"}, {"VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD": "0"}]
)
def test_a_side_stream_that_is_switched_off_is_said(env: dict[str, str]) -> None:
    found = shared_expert_stream.contribute(facts(env=env), {})
    assert not found.superseded and next(iter(env)) in found.nothing


def test_rocm_has_it_since_030() -> None:
    assert shared_expert_stream.has_the_stream(facts("0.28.0", hardware_platform="rocm"))
    assert shared_expert_stream.has_the_stream(facts("0.32.0", hardware_platform="rocm")) is None
    assert shared_expert_stream.has_the_stream(facts("0.18.1")) is None


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_the_releases_run_it_on_the_platforms_claimed(release: str) -> None:
    envs = text(release, "envs.py")
    assert "VLLM_DISABLE_SHARED_EXPERTS_STREAM: bool = False" in envs
    assert "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD: int = 256" in envs
    if release != "0.18.1":
        order = text(release, "model_executor/layers/fused_moe/runner/shared_experts.py")
        gate = "current_platform.is_cuda_alike()" if release >= "0.30" else "current_platform.is_cuda()"
        assert re.search(rf"should_run_shared_in_aux_stream = \(\s+{re.escape(gate)}", order)
