"""``spec-capture-sizes`` against the rules of real releases: what vLLM makes of a list, and what a step then finds."""

from __future__ import annotations

import dataclasses
import enum
import random
import sys
from collections import defaultdict
from itertools import groupby, product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from overlay.facts import Build, Facts, Hardware, Serving
from patches.common import spec_capture_sizes as patch
from tests.config_patches.sources import RELEASES, define

DEFAULTS = {name: option.default for name, option in patch.PATCH.options.items()}
KEY = "compilation_config.cudagraph_capture_sizes"


class Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Release:
    """The capture-size rules of one release, its own code."""

    def __init__(self, release: str) -> None:
        self.release = release
        space: dict[str, Any] = {
            "enum": enum,
            "dataclass": dataclasses.dataclass,
            "replace": dataclasses.replace,
            "defaultdict": defaultdict,
            "product": product,
            "groupby": groupby,
            "logger": Silent(),
            "round_up": lambda x, y: -(-x // y) * y,
        }
        define(release, "config/compilation.py", ["CUDAGraphMode"], space)
        adjust = "adjust_cudagraph_sizes_for_spec_decode"
        define(release, "config/compilation.py", [f"CompilationConfig.{adjust}"], space)
        define(release, "config/vllm.py", ["VllmConfig._set_cudagraph_sizes"], space)
        self.mode = space["CUDAGraphMode"]
        self._adjust, self._set = space[adjust], space["_set_cudagraph_sizes"]
        self.v2 = None
        if release not in ("0.18.1", "0.23.0"):  # 0.23's V2 runner adjusts as V1 does
            file = "v1/worker/gpu/cudagraph_utils.py"
            define(release, file, ["BatchExecutionDescriptor", "CudaGraphManager._init_candidates"], space)
            self.v2 = space["_init_candidates"]

    def sizes(self, facts: Facts, given: Any) -> Any:
        """The compilation config after the release determined the sizes. Raises what the release raises."""
        s = facts.serving
        config = SimpleNamespace(
            cudagraph_mode=self.mode.FULL_AND_PIECEWISE,
            max_cudagraph_capture_size=s.max_cudagraph_capture_size,
            cudagraph_capture_sizes=list(given) if given is not None else None,
            pass_config=SimpleNamespace(enable_sp=False),
            post_init_cudagraph_sizes=lambda: None,
        )
        k = s.num_speculative_tokens
        self._set(
            SimpleNamespace(
                model_config=SimpleNamespace(enforce_eager=False),
                compilation_config=config,
                speculative_config=SimpleNamespace(num_speculative_tokens=k, uses_dynamic_speculative_decoding=lambda: False),
                num_speculative_tokens=k,
                uniform_decode_query_len=1 + k,
                scheduler_config=SimpleNamespace(max_num_seqs=s.max_num_seqs, max_num_batched_tokens=s.max_num_batched_tokens),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
                performance_mode=s.performance_mode,
            )
        )
        return config

    def captured(self, facts: Facts, given: Any) -> list[int]:
        """Tokens of the full decode graphs that the release captures, ascending."""
        config = self.sizes(facts, given)
        query = 1 + facts.serving.num_speculative_tokens
        if self.v2 is not None and facts.serving.runner == "V2":
            manager = SimpleNamespace(
                compilation_config=config,
                cudagraph_mode=self.mode.FULL_AND_PIECEWISE,
                max_num_reqs=facts.serving.max_num_seqs,
                decode_query_len=query,
                vllm_config=SimpleNamespace(speculative_config=None, cache_config=SimpleNamespace(use_kda_recoverssm=False)),
                lora_capture_cases=[0],
                use_breakable_cg=False,
                varlen_decode=False,
                _maybe_ubatch_twin=lambda desc: None,
                _candidates={},
                _capture_descs={},
            )
            self.v2(manager)
            return sorted({d.num_tokens for d in manager._capture_descs.get(self.mode.FULL, [])})
        self._adjust(config, query, *([] if self.release >= "0.30" else [1]))
        return [size for size in config.cudagraph_capture_sizes if size <= query * facts.serving.max_num_seqs]


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the releases ask of the platform: only whether it is a data-centre Blackwell."""
    state = SimpleNamespace(blackwell=False)
    module = ModuleType("vllm.platforms")
    module.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        is_device_capability_family=lambda family: state.blackwell and family == 100
    )
    if "vllm" not in sys.modules:
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    return state


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> Release:
    return Release(request.param)


def facts_of(release: str = "0.26.0", arch: str = "sm90", platform: str = "cuda", **serving: Any) -> Facts:
    values = {
        "num_speculative_tokens": 4,
        "speculative_method": "mtp",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8192,
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "performance_mode": "balanced",
        "runner": "V1",
        "enforce_eager": False,
    }
    return Facts(
        build=Build(public=release),
        hardware=Hardware(platform=platform, arch=arch),
        serving=Serving(**values | serving),
    )


def drawn(rnd: random.Random, release: str) -> Facts:
    return facts_of(
        release,
        num_speculative_tokens=rnd.randint(1, 8),
        max_num_seqs=rnd.choice([1, 2, 3, 5, 8, 16, 33, 64, 100, 256, 512, 1024]),
        max_num_batched_tokens=rnd.choice([16, 64, 300, 512, 2048, 8192, 16384]),
        performance_mode=rnd.choice(["balanced", "balanced", "interactivity"]),
        max_cudagraph_capture_size=rnd.choice([None, None, None, 40, 100, 256]),
        runner=rnd.choice(["V1", "V2"]),
    )


@pytest.mark.releases
def test_the_default_list_is_the_releases_own(release: Release) -> None:
    rnd = random.Random(1)
    for _ in range(400):
        facts = drawn(rnd, release.release)
        assert patch.default_sizes(facts) == release.sizes(facts, None).cudagraph_capture_sizes


@pytest.mark.releases
def test_what_is_left_of_a_list_is_what_the_release_captures(release: Release) -> None:
    rnd = random.Random(2)
    for _ in range(400):
        facts = drawn(rnd, release.release)
        facts = dataclasses.replace(facts, serving=dataclasses.replace(facts.serving, max_cudagraph_capture_size=None))
        query = 1 + facts.serving.num_speculative_tokens
        given = sorted(rnd.sample(range(1, 80), rnd.randint(1, 8)))
        if given[0] > facts.serving.max_num_batched_tokens:
            continue
        try:
            captured = release.captured(facts, given)
        except ValueError:  # no size survives: vLLM does not start
            captured = []
        runner = "V1" if release.v2 is None else facts.serving.runner
        assert patch.kept_sizes(given, query, facts.serving, runner) == captured, (facts.serving, given)


@pytest.mark.releases
def test_every_step_of_a_replica_finds_its_own_graph_and_nothing_is_lost(release: Release) -> None:
    """Through the release's own rules: no list is refused, each wanted size is captured exactly, what the default
    covers stays covered, and what is added is a multiple of 1 + K that some number of requests really has."""
    rnd = random.Random(3)
    seen = 0
    for _ in range(400):
        facts = drawn(rnd, release.release)
        s, query = facts.serving, 1 + facts.serving.num_speculative_tokens
        contribution = patch.contribute(facts, DEFAULTS)
        if KEY not in contribution.args:
            continue
        seen += 1
        sizes = contribution.args[KEY]
        captured = release.captured(facts, sizes)
        wanted = patch.wanted_sizes(query, s.max_num_seqs, s.max_num_batched_tokens, DEFAULTS)
        wanted = [w for w in wanted if s.max_cudagraph_capture_size is None or w <= s.max_cudagraph_capture_size]
        assert set(wanted) <= set(captured)
        base = release.sizes(facts, None).cudagraph_capture_sizes
        assert set(base) <= set(sizes)
        for size in set(sizes) - set(base) - {s.max_cudagraph_capture_size}:
            assert size % query == 0 and size // query <= s.max_num_seqs and size <= s.max_num_batched_tokens
        for n in range(1, min(s.max_num_seqs, 64, wanted[-1] // query) + 1):
            assert n * query in captured
    assert seen > 50


def test_exactly_the_multiples_for_every_number_of_requests() -> None:
    for k, seqs in ((1, 16), (3, 64), (4, 8), (7, 40)):
        wanted = patch.wanted_sizes(1 + k, seqs, 8192, DEFAULTS)
        assert wanted == [n * (1 + k) for n in range(1, seqs + 1)]


def test_large_batches_go_in_steps_and_end_at_the_last_request() -> None:
    counts = [size // 5 for size in patch.wanted_sizes(5, 300, 8192, DEFAULTS)]
    assert counts[:64] == list(range(1, 65))
    assert counts[64:] == [*range(72, 257, 8), *range(272, 300, 16), 300]


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_list_of_the_users_stands_and_the_plan_says_what_it_leaves_out(runner: str) -> None:
    given = (1, 2, 4, 5, 8)
    found = patch.contribute(facts_of(runner=runner, cudagraph_capture_sizes=given), DEFAULTS)
    assert not found.args and "stand" in found.nothing
    note = found.notes[0]
    assert "[5]" in note and "2, 3 ... 8 (7 counts)" in note
    assert "[1, 2, 4, 5, 8, 10, 15, 20, 25, 30, 35, 40]" in note
    covering = (1, 2, 4, 5, 8, 10, 15, 20, 25, 30, 35, 40)
    again = patch.contribute(facts_of(runner=runner, cudagraph_capture_sizes=covering), DEFAULTS)
    assert again.superseded and not again.args


@pytest.mark.parametrize("off", [{"enforce_eager": True}, {"cudagraph_mode": "NONE"}])
def test_eager_mode_means_no_change(off: dict[str, Any]) -> None:
    found = patch.contribute(facts_of(**off), DEFAULTS)
    assert found.nothing and not found.args


def test_sizes_that_cover_already_are_left_alone() -> None:
    assert patch.contribute(facts_of(num_speculative_tokens=7, max_num_seqs=32), DEFAULTS).superseded


def test_the_users_maximum_stands() -> None:
    found = patch.contribute(facts_of(max_cudagraph_capture_size=30), DEFAULTS)
    assert found.args[KEY][-1] == 30
    assert "steps of 7 and more requests" in found.notes[1] and "40 would cover all" in found.notes[1]


def test_a_maximum_above_the_token_budget_leaves_no_list_that_vllm_accepts() -> None:
    found = patch.contribute(facts_of(max_cudagraph_capture_size=100, max_num_batched_tokens=64), DEFAULTS)
    assert not found.args and "accepts no list" in found.nothing


def test_requests_are_counted_per_replica_and_by_the_option() -> None:
    alone = patch.contribute(facts_of(max_num_seqs=16), DEFAULTS)
    replicas = patch.contribute(facts_of(max_num_seqs=16, data_parallel=8), DEFAULTS)
    assert alone.args == replicas.args  # max_num_seqs is a replica's own
    fewer = patch.contribute(facts_of(max_num_seqs=16), DEFAULTS | {"max_requests": 3})
    assert 15 in fewer.args[KEY] and 35 not in fewer.args[KEY]


def test_the_token_limit_is_said() -> None:
    found = patch.contribute(facts_of(max_num_seqs=1024), DEFAULTS)
    assert max(found.args[KEY]) == 2045
    assert any("more than 409 requests" in note for note in found.notes)


def test_ascend_gets_few_graphs() -> None:
    found = patch.contribute(facts_of("0.23.0", platform="ascend", arch="ascend910_93", max_num_seqs=64), DEFAULTS)
    sizes = found.args[KEY]
    assert set(range(5, 85, 5)) <= set(sizes) and 85 not in sizes and 320 in sizes


def test_unknown_numbers_mean_no_change() -> None:
    assert patch.contribute(facts_of(max_num_seqs=None), DEFAULTS).nothing


@pytest.mark.releases
def test_blackwell_keeps_its_higher_ceiling(platform: SimpleNamespace) -> None:
    platform.blackwell = True
    for name in ("0.28.0", "0.32.0", "0.33.0"):
        facts = facts_of(name, arch="sm100", max_num_seqs=512)
        assert patch.default_sizes(facts) == Release(name).sizes(facts, None).cudagraph_capture_sizes
