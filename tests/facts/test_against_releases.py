"""Runner, asynchronous scheduling and batch limits: our rules against the releases' own code, on random configurations."""

import ast
import inspect
import random
import sys
import types
from functools import cache
from types import SimpleNamespace as Space

import pytest

from overlay.argument_source import from_source
from overlay.detect.runner import Question, choose, has_triton
from overlay.detect.serving import find_serving
from overlay.facts import Build, Hardware, Model, Serving
from overlay.serve_args import MISSING, ServeArgs
from tests.facts.release_code import (
    RELEASES,
    CompilationMode,
    CUDAGraphMode,
    methods,
    names,
    root,
    top_level,
    tree,
)
from tests.facts.test_serve_args import RELEASES as RECORDED
from tests.facts.test_serve_args import grammar as recorded_grammar

pytestmark = pytest.mark.releases
# Releases whose rules were read as well, and whose sources are not fetched for every run: used where they are at hand.
FURTHER = ("0.27.1", "0.30.0", "0.31.0")

ARCHITECTURES = {
    # architecture: (moe, hybrid, attention free)
    "Qwen3ForCausalLM": (False, False, False),
    "LlamaForCausalLM": (False, False, False),
    "Gemma3ForCausalLM": (False, False, False),
    "Qwen3_5ForConditionalGeneration": (False, True, False),
    "Qwen3_5MoeForConditionalGeneration": (True, True, False),
    "DeepseekV2ForCausalLM": (True, False, False),
    "DeepseekV4ForCausalLM": (True, False, False),
    "KimiK3ForConditionalGeneration": (True, True, False),
    "MixtralForCausalLM": (True, False, False),
    "MambaForCausalLM": (False, False, True),
}
METHODS = ("", "", "", "eagle", "eagle3", "mtp", "ngram", "ngram_gpu", "suffix", "medusa", "draft_model", "dspark")
METHODS += ("custom_class",)
RUNNER_PARTS = (
    "use_v2_model_runner",
    "_is_default_v2_model_runner_model",
    "_get_v2_model_runner_unsupported_features",
    "_dflash_needs_multi_kv_group",
    "_is_dflash2_draft",
    "_get_dbo_unsupported_features",
    "_get_v1_model_runner_unsupported_features",
)


class Usage(str):
    value = "of a server"


def sources(release):
    if not root(release).is_dir():
        pytest.skip(f"the sources of vLLM {release} are not here")
    return root(release)


@cache
def grammar(release):
    return recorded_grammar(release) if release in RECORDED else from_source(root(release))


def draw(rng, release):
    """A random server: the words of its command line, its facts, and the same as the release's own configuration objects."""
    name = rng.choice(list(ARCHITECTURES))
    moe, hybrid, free = ARCHITECTURES[name]
    rare = lambda p=0.07: rng.random() < p  # noqa: E731
    method = rng.choice(METHODS)
    pp, tp, pcp = rng.choice([1, 1, 1, 2]), rng.choice([1, 2]), rng.choice([1, 1, 1, 1, 2])
    platform = rng.choice(["cuda", "cuda", "rocm", "cpu"])
    flags = {
        flag: rare()
        for flag in (
            "enable_dbo", "enable_elastic_ep", "enable_return_routed_experts", "enable_prompt_embeds",
            "kv_sharing_fast_prefill", "enable_lora", "enforce_eager",
        )
    }  # fmt: skip
    quantised, mode, sp = rare(0.2), rng.choice([None, None, None, 1, 3]), rare()
    parallel_drafting = bool(method) and rare(0.1)
    processors, external, entry = rare(0.05), rare(0.1), rare(0.05)
    logprobs = rng.choice(["raw_logprobs", "raw_logprobs", "raw_logits"])
    cache_mode = rng.choice([None, None, "align", "none", "all"])
    ec = rare(0.05)
    words = ["m", "-tp", str(tp), "-pp", str(pp), "-pcp", str(pcp), "--logprobs-mode", logprobs]
    words += ["--" + flag.replace("_", "-") for flag, on in flags.items() if on]
    if mode is not None:
        words += ["-cc.mode", str(mode)]
    if sp:
        words += ["-cc.pass_config.enable_sp", "true"]
    if method:
        words += ["--speculative-config.method", method, "--speculative-config.num_speculative_tokens=2"]
    if parallel_drafting:
        words += ["--speculative-config.parallel_drafting", "true"]
    if processors:
        words += ["--logits-processors", "a.b"]
    if external:
        words += ["--distributed-executor-backend", "external_launcher"]
    if cache_mode:
        words += ["--mamba-cache-mode", cache_mode]
    if ec:
        words += ["--ec-transfer-config", '{"ec_role": "ec_both"}']
    args = ServeArgs.parse(words, grammar(release))
    if args.error:  # an option that this release does not have yet
        return None
    environ = rng.choice([{}, {}, {}, {}, {"VLLM_USE_V2_MODEL_RUNNER": rng.choice("01")}])
    build = Build(
        distribution="vllm", version=release, public=release, root=str(sources(release)),
        triton=rng.choice(["3.5.0", "3.5.0", "3.5.0", None]), triton_backends=("nvidia", "amd"),
        entry_points={"vllm.logits_processors": ("a = b",)} if entry else {},
    )  # fmt: skip
    model = Model(
        name="m", architectures=(name,), moe=moe, hybrid=hybrid, attention_free=free, quantization="fp8" if quantised else "",
        mla=name.startswith("Deepseek"), diffusion=False, speculators=False, pooling=False, encoder_decoder=False,
        multimodal="Conditional" in name, max_position=4096, rope_scaled=False,
    )  # fmt: skip
    return args, build, Hardware(platform=platform, memory=80 << 30, name="H100", arch="sm90"), model, environ


def release_config(args, build, hardware, model, serving):
    """The objects that ``VllmConfig.use_v2_model_runner`` reads."""

    def get(path, default=None):
        value = args.get(path)
        return default if value is MISSING or value is None else value

    spec = None
    if serving.speculative_method:
        spec = Space(
            method=serving.speculative_method, parallel_drafting=bool(get("speculative_config.parallel_drafting")),
            enable_adaptive_verification=False, use_heterogeneous_vocab=False, draft_model_config=None,
            disable_padded_drafter_batch=False,
        )  # fmt: skip
    mode = get("mamba_cache_mode")
    if mode is None:
        mode = "align" if serving.prefix_caching and (model.hybrid or model.attention_free) else "none"
    parts = Space(
        model_config=Space(
            runner_type=serving.task, architectures=list(model.architectures), is_moe=model.moe, is_hybrid=model.hybrid,
            is_quantized=bool(model.quantization), is_attention_free=model.attention_free, use_mla=model.mla,
            has_inner_state=model.hybrid or model.attention_free, logits_processors=get("logits_processors"),
            enable_prompt_embeds=bool(get("enable_prompt_embeds")), logprobs_mode=get("logprobs_mode", "raw_logprobs"),
            enable_return_routed_experts=bool(get("enable_return_routed_experts")), is_diffusion=False,
        ),
        speculative_config=spec,
        parallel_config=Space(
            prefill_context_parallel_size=serving.prefill_context_parallel, tensor_parallel_size=serving.tensor_parallel,
            pipeline_parallel_size=serving.pipeline_parallel, enable_dbo=bool(get("enable_dbo")) and hardware.platform != "cpu",
            enable_elastic_ep=bool(get("enable_elastic_ep")), use_ubatching=bool(serving.ubatching), all2all_backend="x",
            distributed_executor_backend=get("distributed_executor_backend", "mp"),
        ),
        compilation_config=Space(
            mode=CompilationMode(get("compilation_config.mode", 3)), cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            pass_config=Space(enable_sp=bool(get("compilation_config.pass_config.enable_sp"))),
        ),
        cache_config=Space(mamba_cache_mode=mode, kv_sharing_fast_prefill=bool(get("kv_sharing_fast_prefill"))),
        ec_transfer_config=get("ec_transfer_config"), lora_config=True if serving.lora else None,
        attention_config=Space(hisparse_config=None),
    )  # fmt: skip
    return vars(parts)


@pytest.mark.parametrize("release", RELEASES[1:] + FURTHER)
def test_runner_is_the_one_that_the_releases_own_code_chooses(release, monkeypatch):
    rng = random.Random(20)
    sources(release)
    decided = {"V1": 0, "V2": 0, None: 0}
    platform = Space(is_rocm=lambda: False, is_unspecified=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=platform))
    scope = names(envs=Space(), HAS_TRITON=None, current_platform=platform)
    scope["lru_cache"] = lambda function: function
    wanted = ("DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES", "default_v2_model_runner_architectures")
    wanted += ("ROCM_DEFAULT_MRV1_ARCHITECTURES", "ROCM_EXCLUDED_V2_MODEL_RUNNER_ARCHITECTURES")
    top_level(release, "config/vllm.py", wanted, scope)
    theirs_class = methods(release, "config/vllm.py", "VllmConfig", RUNNER_PARTS, scope)
    for _ in range(500):
        drawn = draw(rng, release)
        if drawn is None:
            continue
        args, build, hardware, model, environ = drawn
        serving, _ = find_serving(args, build, hardware, model, environ)
        decided[serving.runner] += 1
        if serving.runner is None:
            continue
        platform.is_rocm = lambda h=hardware: h.platform == "rocm"
        forced = bool(int(environ["VLLM_USE_V2_MODEL_RUNNER"])) if environ else None
        scope.update(envs=Space(VLLM_USE_V2_MODEL_RUNNER=forced), HAS_TRITON=has_triton(build, hardware))
        found = {"vllm.logits_processors": [1]} if "vllm.logits_processors" in build.entry_points else {}
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group, found=found: found.get(group, []))
        made = theirs_class()
        made.__dict__.update(release_config(args, build, hardware, model, serving))
        theirs = "V2" if made.use_v2_model_runner else "V1"
        assert serving.runner == theirs, (serving.runner_reason, args.argv, model, hardware.platform, environ, build.triton)
    assert decided["V1"] > 50 and decided["V2"] > 15 and decided[None] < 100, decided


def test_the_variable_alone_decides_in_0_18_1():
    sources("0.18.1")
    rng = random.Random(3)
    seen = set()
    for _ in range(50):
        drawn = draw(rng, "0.18.1")
        if drawn is None:
            continue
        args, build, hardware, model, environ = drawn
        serving, _ = find_serving(args, build, hardware, model, environ)
        assert serving.runner == ("V2" if environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else "V1")
        seen.add(serving.runner)
    assert seen == {"V1", "V2"}


@pytest.mark.parametrize("release", RELEASES + FURTHER)
def test_async_scheduling_is_what_the_releases_own_code_settles(release):
    """The statements of ``VllmConfig.__post_init__`` from the executor's class to the end of the choice."""
    sources(release)
    grammar(release)
    init = next(
        function
        for owner in tree(release, "config/vllm.py").body
        if isinstance(owner, ast.ClassDef) and owner.name == "VllmConfig"
        for function in owner.body
        if isinstance(function, ast.FunctionDef) and function.name == "__post_init__"
    )
    first = next(i for i, node in enumerate(init.body) if ast.unparse(node).startswith("executor_backend ="))
    last = next(
        i
        for i, node in enumerate(init.body)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "self.scheduler_config.async_scheduling"
    )
    code = compile(ast.fix_missing_locations(ast.Module(init.body[first : last + 1], [])), release, "exec")
    literals = names()
    speculative = tree(release, "config/speculative.py")
    import typing

    literals["Literal"] = typing.Literal
    wanted = ("MTPModelTypes", "DFlashModelTypes", "DSparkModelTypes", "EagleModelTypes", "NgramGPUTypes")
    top_level(release, "config/speculative.py", wanted, literals)
    assert speculative
    rng = random.Random(5)
    outcomes = {True: 0, False: 0, None: 0}
    for _ in range(300):
        drawn = draw(rng, release)
        if drawn is None or drawn[2].platform == "cpu":
            continue
        args, build, hardware, model, environ = drawn
        serving, _ = find_serving(args, build, hardware, model, environ)
        outcomes[serving.async_scheduling] += 1
        if serving.async_scheduling is None:
            continue
        config = release_config(args, build, hardware, model, serving)
        config["parallel_config"].distributed_executor_backend = serving.executor
        made = Space(**config, scheduler_config=Space(async_scheduling=None), use_v2_model_runner=serving.runner == "V2")
        scope = {
            **literals, "self": made, "Executor": Space(get_class=lambda config: Space(supports_async_scheduling=lambda: True)),
            "current_platform": Space(is_rocm=lambda h=hardware: h.platform == "rocm"),
        }  # fmt: skip
        exec(code, scope)
        assert serving.async_scheduling == made.scheduler_config.async_scheduling, (args.argv, serving)
    assert outcomes[True] > 25 and outcomes[False] > 15, outcomes


@pytest.mark.parametrize("release", RELEASES + FURTHER)
def test_batch_limits_are_those_of_the_releases_own_code(release, monkeypatch):
    sources(release)
    rng = random.Random(8)
    devices = [("NVIDIA H200", 140), ("NVIDIA A100-SXM4-80GB", 80), ("NVIDIA L4", 23), ("NVIDIA B200", 179)]
    devices += [(None, None), ("cpu", 0)]
    usage = Space(OPENAI_API_SERVER=Usage("api"), LLM_CLASS=Usage("llm"))
    monkeypatch.setitem(sys.modules, "vllm.usage.usage_lib", types.SimpleNamespace(UsageContext=usage))
    compared = 0
    scheduler = Space(
        DEFAULT_MAX_NUM_BATCHED_TOKENS=2048, DEFAULT_MAX_NUM_SEQS=128, DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP=1
    )
    scope = names(SchedulerConfig=scheduler)
    limits = "_set_default_max_num_seqs_and_batched_tokens_args"
    theirs_class = methods(release, "engine/arg_utils.py", "EngineArgs", ("get_batch_defaults", limits), scope)
    takes = inspect.signature(getattr(theirs_class, limits)).parameters
    extra = {"parallel_config": Space(use_batched_dp_moe=False)} if "parallel_config" in takes else {}
    for _ in range(300):
        name, memory = rng.choice(devices)
        platform = "cpu" if name == "cpu" else "cuda"
        hardware = Hardware(platform=platform, name=name, memory=memory << 30 if memory is not None else None)
        length = rng.choice([64, 2048, 32768])
        words = ["m", "--max-model-len", str(length)]
        for option, values in (("-tp", (1, 2)), ("-pp", (1, 2)), ("--max-num-seqs", (None, None, 3, 700)),
                               ("--max-num-batched-tokens", (None, None, 512, 20000)),
                               ("--performance-mode", (None, None, "throughput"))):  # fmt: skip
            value = rng.choice(values)
            words += [option, str(value)] if value is not None else []
        args = ServeArgs.parse(words, grammar(release))
        build = Build(distribution="vllm", version=release, public=release, root=str(root(release)))
        model = Model(architectures=("LlamaForCausalLM",), encoder_decoder=False, hybrid=False, attention_free=False)
        serving, unknown = find_serving(args, build, hardware, model, {})
        if name is None:
            if args.values.get("max_num_seqs") is None:
                assert serving.max_num_seqs is None and "memory" in unknown["serving.max_num_seqs"]
            continue
        device = Space(
            get_device_total_memory=lambda m=memory: m << 30, get_device_name=lambda n=name: n, is_tpu=lambda: False,
            is_cpu=lambda p=platform: p == "cpu", is_cuda=lambda p=platform: p == "cuda", is_rocm=lambda: False,
            is_device_capability=lambda *a: False, is_device_capability_family=lambda *a: False,
        )  # fmt: skip
        scope["current_platform"] = device
        made = theirs_class()
        values = args.values
        made.__dict__.update(
            pipeline_parallel_size=values.get("pipeline_parallel_size", 1),
            tensor_parallel_size=values.get("tensor_parallel_size", 1),
            max_num_batched_tokens=values.get("max_num_batched_tokens"), max_num_seqs=values.get("max_num_seqs"),
            performance_mode=values.get("performance_mode", "balanced"), enable_chunked_prefill=True,
        )  # fmt: skip
        config = Space(max_model_len=length, is_multimodal_model=False, is_mm_prefix_lm=False)
        getattr(made, limits)(usage.OPENAI_API_SERVER, config, **extra)
        if serving.max_num_seqs is None or serving.max_num_batched_tokens is None:
            continue
        ours = (serving.max_num_seqs, serving.max_num_batched_tokens)
        assert ours == (made.max_num_seqs, made.max_num_batched_tokens), words
        compared += 1
    assert compared > 120


def test_an_unknown_rule_is_no_guess(tmp_path):
    """Another release's source: neither runner, unless the variable settles it."""
    (tmp_path / "config").mkdir()
    source = "class VllmConfig:\n    @property\n    def use_v2_model_runner(self):\n        return 7\n"
    (tmp_path / "config/vllm.py").write_text(source)
    build = Build(distribution="vllm", version="0.40.0", public="0.40.0", root=str(tmp_path))
    ask = lambda environ: choose(Question(build, Hardware(), Model(), Serving(), environ, lambda path: None))  # noqa: E731
    assert ask({}).runner is None and "none of the known releases" in ask({}).reason
    assert ask({"VLLM_USE_V2_MODEL_RUNNER": "1"}).runner == "V2"
    assert ask({"VLLM_USE_V2_MODEL_RUNNER": "yes"}).runner is None


def test_triton_counts_as_usable_where_the_installed_vllm_says_so():
    """A CPU build needs Triton's CPU back end, installed or not; without it the runner is V1."""
    pytest.importorskip("vllm")
    from vllm.triton_utils import HAS_TRITON

    from overlay.detect.build import find_build

    build = find_build()[0]
    assert has_triton(build, Hardware(platform="cpu")) is HAS_TRITON
    without = Build(triton="3.5.0", triton_backends=("amd", "nvidia"))
    assert has_triton(without, Hardware(platform="cpu")) is False
    assert has_triton(Build(triton="3.5.0", triton_backends=("cpu",)), Hardware(platform="cpu")) is True
    assert has_triton(without, Hardware(platform="cuda")) is True
    assert has_triton(Build(), Hardware(platform="cuda")) is False
    assert has_triton(without, Hardware(platform="ascend")) is None
