"""Which model runner, V1 or V2, a release chooses for a model and its flags.

The choice is ``VllmConfig.use_v2_model_runner``. Its rules changed with nearly every release, so the installed source decides
which of the rules below apply: the property and its helpers are compared with those that the rules were written from. A
source that none of them fits makes the runner unknown, unless VLLM_USE_V2_MODEL_RUNNER settles it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay.facts import Build, Hardware, Model, Serving

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
V1, V2 = "V1", "V2"
_PARTS = (
    "use_v2_model_runner",
    "_is_default_v2_model_runner_model",
    "_get_v2_model_runner_unsupported_features",
    "_dflash_needs_multi_kv_group",
    "_get_dbo_unsupported_features",
)
# Digest of the sources of _PARTS (see ``source_digest``) -> the release whose rules below they are.
KNOWN = {
    "": "0.18.1",
    "cfd351322566e777": "0.23.0",
    "281b8ec7596055ef": "0.26.0",
    "2d0a9c97500ed2bb": "0.27.1",
    "a7b639ff02f727ef": "0.28.0",
    "d3691f62ec245e94": "0.30.0",
    "8539a0dba5b3eb5d": "0.31.0",
    "e2bcc9c58560e9fa": "0.32.0",
    "6e737e428552a054": "0.33.0",
}
ENV_ONLY = "0.18.1"  # no property: the variable alone decides


@dataclass(frozen=True)
class Question:
    """All that the choice depends on. get: the user's value at a dotted path of vLLM's options, or None."""

    build: Build
    hardware: Hardware
    model: Model
    serving: Serving
    environ: Mapping[str, str]
    get: Callable[[str], Any]


@dataclass(frozen=True)
class Answer:
    """runner: V1, V2 or None. reason: why; where None, what is not known."""

    runner: str | None
    reason: str


def source_digest(root: str | Path) -> str | None:
    """Digest of the code that makes the choice; "" where the release has no such property, None where it cannot be read."""
    import hashlib

    try:
        text = (Path(root) / "config/vllm.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if "def use_v2_model_runner" not in text:
        return ""
    parts = []
    for name in _PARTS:
        found = re.search(rf"^    def {name}\(.*?(?=^    @|^    def |^\S)", text, re.MULTILINE | re.DOTALL)
        if found:  # text, not a syntax tree: the same for every Python that reads it
            parts.append(" ".join(re.sub(r"^\s*#.*$", "", found[0], flags=re.MULTILINE).split()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def default_architectures(root: str | Path) -> frozenset[str]:
    """``DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES`` of the release (0.23 to 0.28)."""
    return _names(root, "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES")


def _names(root: str | Path, constant: str) -> frozenset[str]:
    """The texts in a constant set of the release's ``config/vllm.py``."""
    try:
        text = (Path(root) / "config/vllm.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return frozenset()
    found = re.search(rf"^{constant}[^=\n]*=\s*(?:frozenset\()?\s*[{{(\[](.*?)[}})\]]", text, re.M | re.S)
    return frozenset(re.findall(r'"(\w+)"', found[1])) if found else frozenset()


def choose(question: Question) -> Answer:
    """The runner that this build will choose. Never guesses: what cannot be decided is None with the reason."""
    build, model = question.build, question.model
    if build.root is None:
        return Answer(None, "no vLLM source to read the rule from")
    forced = _forced(question.environ)
    if isinstance(forced, Answer):
        return forced
    if (answer := _plugin(question, forced)) is not None:
        return answer
    digest = source_digest(build.root)
    release = KNOWN.get(digest) if digest is not None else None
    if release == ENV_ONLY:
        runner = V2 if forced else V1
        return Answer(runner, f"this release takes V2 where {VARIABLE}=1 alone asks for it")
    if release in ("0.32.0", "0.33.0"):
        for option, what in (("attention_config.hisparse_config", "HiSparse"), ("watermark_config", "watermarking")):
            if question.get(option) is not None:
                return Answer(V2, f"{what} needs V2 (rule of {release})")
    if forced is not None and (release is not None or digest is not None):
        return Answer(V2 if forced else V1, f"{VARIABLE}={int(forced)}")
    if release is None:
        return Answer(None, f"{build.root}/config/vllm.py chooses by a rule that is none of the known releases'")
    if release in _MID and (answer := _only_v2(question, release)) is not None:
        return answer
    if release in _OLD | _MID and (answer := _default_model(question, release)) is not None:
        return answer
    if release in _ROCM_V1 and (answer := _rocm_default(question, release)) is not None:
        return answer
    triton = has_triton(build, question.hardware)
    if triton is False:
        return Answer(V1, f"V2 needs Triton, and this build has none for {question.hardware.platform} (rule of {release})")
    if triton is None:
        return Answer(None, f"whether Triton is usable on {question.hardware.platform or 'this hardware'} is unknown")
    unsure = []
    for release_set, what, check in _UNSUPPORTED:
        if release in release_set:
            value = check(question)
            if value:
                return Answer(V1, f"V2 does not support {what} (rule of {release})")
            if value is None:
                unsure.append(what)
    if unsure:
        return Answer(None, f"unknown whether the server uses what V2 does not support: {', '.join(unsure)}")
    return Answer(V2, f"V2 supports this model and these flags (rule of {release}{_name(model)})")


def _name(model: Model) -> str:
    return f", {model.architectures[0]}" if model.architectures else ""


def _forced(environ: Mapping[str, str]) -> bool | None | Answer:
    value = environ.get(VARIABLE)
    if value is None:
        return None
    if re.fullmatch(r"\s*-?\d+\s*", value):
        return bool(int(value))
    return Answer(None, f"{VARIABLE}={value!r} is no number: vLLM will stop at it")


def _plugin(question: Question, forced: bool | None) -> Answer | None:
    """Platforms that bring a rule of their own."""
    names = {name.lower().replace("_", "-"): name for name in question.build.plugins}
    if "vllm-ascend" not in names or question.hardware.platform not in ("ascend", None):
        return None
    root = next((path for path in _beside(question.build.root, "vllm_ascend")), None)
    if root is None:
        return Answer(None, "the sources of vllm-ascend were not found: it decides by a rule of its own")
    if not (root / "patch/platform/patch_use_v2_model_runner.py").is_file():
        return Answer(V1, "vllm-ascend without a V2 runner") if not (root / "worker/v2").is_dir() else None
    if not forced:
        return Answer(V1, f"vllm-ascend takes V2 where {VARIABLE}=1 alone asks for it")
    try:
        worker = (root / "worker/worker.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        worker = ""
    for version in re.findall(r'self\.use_v2_model_runner and vllm_version_is\("([\d.]+)"\)', worker):
        if version == question.build.public:
            return Answer(V1, f"vllm-ascend does not run V2 on vLLM {version}, {VARIABLE}=1 or not")
    return Answer(V2, f"{VARIABLE}=1")


def _beside(root: str | None, package: str) -> list[Path]:
    """Folders of ``package`` beside vLLM or on the path."""
    import sys

    places = [Path(root).parent] if root else []
    places += [Path(entry) for entry in sys.path if entry]
    return [place / package for place in places if (place / package / "__init__.py").is_file()]


def has_triton(build: Build, hardware: Hardware) -> bool | None:
    """``vllm.triton_utils.HAS_TRITON`` as it will be: a CPU build needs Triton's CPU back end."""
    if build.triton is None:
        return False
    if hardware.platform == "cpu":
        return "cpu" in build.triton_backends
    if hardware.platform in ("cuda", "rocm", "dcu"):
        return True
    return None


# --- the rules ---------------------------------------------------------------------------------------------------------


def _only_v2(question: Question, release: str) -> Answer | None:
    """What only V2 runs (0.26 to 0.28), asked before anything else."""
    get, method = question.get, question.serving.speculative_method
    if release in ("0.27.1", "0.28.0") and (question.serving.prefill_context_parallel or 1) > 1:
        return Answer(V2, f"prefill context parallelism runs on V2 only (rule of {release})")
    if method == "dspark":
        return Answer(V2, f"DSpark runs on V2 only (rule of {release})")
    if method == "dflash" or (method is None and question.serving.speculative_method != ""):
        return Answer(None, "the draft model's configuration decides, and it was not read")
    if question.model.diffusion:
        return Answer(V2, f"diffusion models run on V2 only (rule of {release})")
    if (get("hf_overrides") or {}) and isinstance(get("hf_overrides"), str):
        return Answer(None, "--hf-overrides names a function: what it changes is unknown")
    return None


def _rocm_default(question: Question, release: str) -> Answer | None:
    """0.30 and 0.31: on ROCm some models default to V1. None: not this one."""
    if question.hardware.platform not in ("rocm", "dcu"):
        return None if question.hardware.platform else Answer(None, "the platform is unknown")
    listed = _names(question.build.root or "", "ROCM_DEFAULT_MRV1_ARCHITECTURES")
    if not any(name in listed for name in question.model.architectures):
        return None if question.model.architectures else Answer(None, "the model's architecture is unknown")
    if release == "0.30.0":
        return Answer(V1, f"on ROCm, {question.model.architectures[0]} defaults to V1 (rule of {release})")
    return Answer(None, "on ROCm this model defaults to V1 where V1 can serve it, which is not decided here")


def _default_model(question: Question, release: str) -> Answer | None:
    """0.23 to 0.28: V1, unless the model is one of those that default to V2. None: it is."""
    model, serving, rule = question.model, question.serving, f"(rule of {release})"
    if serving.task is None:
        return Answer(None, "unknown whether the model generates or pools")
    if serving.task != "generate":
        return Answer(V1, f"pooling models stay on V1 {rule}")
    if not model.architectures:
        return Answer(None, "the model's architecture is unknown")
    listed = default_architectures(question.build.root or "")
    if release in ("0.27.1", "0.28.0") and question.hardware.platform in ("rocm", "dcu"):
        listed -= {"DeepseekV4ForCausalLM"} if release == "0.28.0" else {"KimiK3ForConditionalGeneration"}
    in_list = any(name in listed for name in model.architectures)
    if release == "0.23.0":
        if not in_list:
            return Answer(V1, f"{model.architectures[0]} is not among the models that default to V2 {rule}")
        if model.moe is None or model.quantization is None:
            return Answer(None, "unknown whether the model is a mixture of experts or quantised")
        if model.moe or model.quantization:
            return Answer(V1, f"mixtures of experts and quantised models stay on V1 {rule}")
        return None
    if model.hybrid is None:
        return Answer(None, "unknown whether the model is hybrid")
    if model.hybrid and not (in_list and release in ("0.27.1", "0.28.0")):
        return Answer(V1, f"hybrid models stay on V1 {rule}")
    if model.attention_free is None:
        return Answer(None, "unknown whether the model is attention-free")
    if model.attention_free:
        return Answer(V1, f"attention-free models stay on V1 {rule}")
    if not in_list and model.moe is None:
        return Answer(None, "unknown whether the model is a mixture of experts")
    if not in_list and model.moe:
        return Answer(V1, f"mixtures of experts other than the listed ones stay on V1 {rule}")
    return None


def _at_all(*values: bool | None) -> bool | None:
    """Three-valued and."""
    if any(value is False for value in values):
        return False
    return None if any(value is None for value in values) else True


def _more_than_one(value: int | None) -> bool | None:
    return None if value is None else value > 1


def _speculates(question: Question) -> bool | None:
    method = question.serving.speculative_method
    return None if method is None else method != ""


def _method_outside(*methods: str) -> Callable[[Question], bool | None]:
    def check(question: Question) -> bool | None:
        method = question.serving.speculative_method
        return None if method is None else method not in ("", *methods)

    return check


def _method_in(*methods: str) -> Callable[[Question], bool | None]:
    def check(question: Question) -> bool | None:
        method = question.serving.speculative_method
        return None if method is None else method in methods

    return check


def _spec_flag(key: str, *, but: tuple[str, ...] = ()) -> Callable[[Question], bool | None]:
    """A flag of ``speculative_config`` that is on, for methods other than ``but``."""

    def check(question: Question) -> bool | None:
        if not _speculates(question):
            return _speculates(question)
        return bool(question.get(f"speculative_config.{key}")) and question.serving.speculative_method not in but

    return check


def _set(option: str) -> Callable[[Question], bool | None]:
    return lambda question: bool(question.get(option))


def _stock_compile(question: Question) -> bool | None:
    return question.get("compilation_config.mode") in (1, "1", "STOCK_TORCH_COMPILE")


def _sequence_parallel(question: Question) -> bool | None:
    asked = bool(question.get("compilation_config.pass_config.enable_sp"))
    return _at_all(asked, _more_than_one(question.serving.tensor_parallel))


def _align_mode(question: Question) -> bool | None:
    state = _or(question.model.hybrid, question.model.attention_free)
    if not state:
        return state
    mode = question.get("mamba_cache_mode")
    if mode is not None:
        return mode == "align"
    return question.serving.prefix_caching  # with prefix caching, "none" becomes "align" or "all"


def _or(first: bool | None, second: bool | None) -> bool | None:
    if first or second:
        return True
    return None if first is None or second is None else False


def _context_parallel(question: Question) -> bool | None:
    return _more_than_one(question.serving.prefill_context_parallel)


def _context_parallel_without_mla(question: Question) -> bool | None:
    mla = question.model.mla
    return _at_all(_context_parallel(question), None if mla is None else not mla)


def _external_pp(question: Question) -> bool | None:
    external = question.get("distributed_executor_backend") == "external_launcher"
    return _at_all(external, _more_than_one(question.serving.pipeline_parallel))


def _eagle3_pp(question: Question) -> bool | None:
    method = question.serving.speculative_method
    eagle3 = None if method is None else method == "eagle3"
    return _at_all(eagle3, _more_than_one(question.serving.pipeline_parallel))


def _adaptive_with(other: Callable[[Question], bool | None]) -> Callable[[Question], bool | None]:
    return lambda question: _at_all(_spec_flag("enable_adaptive_verification")(question), other(question))


def _custom_processors(question: Question) -> bool | None:
    return bool(question.get("logits_processors")) or "vllm.logits_processors" in question.build.entry_points


def _logits_logprobs(question: Question) -> bool | None:
    return question.serving.task == "generate" and question.get("logprobs_mode") in ("raw_logits", "processed_logits")


def _mode_all(question: Question) -> bool | None:
    return question.get("mamba_cache_mode") == "all"


_OLD, _MID, _NEW = {"0.23.0"}, {"0.26.0", "0.27.1", "0.28.0"}, {"0.30.0", "0.31.0", "0.32.0", "0.33.0"}
_ROCM_V1 = {"0.30.0", "0.31.0"}
_PADDED = ("dflash", "dspark")
# (releases, what V2 does not support there, test). After ``_get_v2_model_runner_unsupported_features``.
_UNSUPPORTED: tuple[tuple[set[str], str, Callable[[Question], bool | None]], ...] = (
    (_OLD, "hybrid models with the align cache mode", _align_mode),
    (_OLD, "prefill context parallelism", _context_parallel),
    (_MID, "prefill context parallelism", _context_parallel_without_mla),
    (_OLD | _MID | _ROCM_V1, "stock torch.compile", _stock_compile),
    (_OLD | _MID | _ROCM_V1, "sequence parallelism", _sequence_parallel),
    (_MID | _NEW, "pipeline parallelism with external_launcher", _external_pp),
    (_OLD, "this speculative method", _method_outside("eagle", "eagle3", "mtp")),
    (_MID, "this speculative method", _method_outside("eagle", "eagle3", "mtp", "dflash", "dspark")),
    ({"0.30.0"}, "this speculative method", _method_in("ngram", "ngram_gpu", "draft_model")),
    ({"0.31.0"}, "this speculative method", _method_in("ngram", "ngram_gpu")),
    (_NEW - {"0.33.0"}, "this speculative method", _method_in("suffix", "medusa", "mlp_speculator", "custom_class")),
    ({"0.33.0"}, "this speculative method", _method_in("suffix", "custom_class")),
    (_OLD, "parallel drafting", _spec_flag("parallel_drafting")),
    (_MID | _NEW, "parallel drafting", _spec_flag("parallel_drafting", but=_PADDED)),
    (_OLD | _MID, "EAGLE3 with pipeline parallelism", _eagle3_pp),
    ({"0.28.0"}, "adaptive verification with LoRA", _adaptive_with(lambda question: question.serving.lora)),
    ({"0.28.0"}, "adaptive verification without graphs", _adaptive_with(lambda q: q.serving.enforce_eager)),
    (
        {"0.28.0"},
        "adaptive verification with pipeline parallelism",
        _adaptive_with(lambda question: _more_than_one(question.serving.pipeline_parallel)),
    ),
    (_NEW - _ROCM_V1, "drafts with another vocabulary", _spec_flag("use_heterogeneous_vocab")),
    (_OLD | _MID, "dual batch overlap", _set("enable_dbo")),
    (_NEW, "dual batch overlap", lambda question: question.serving.ubatching),
    (_MID | _ROCM_V1, "elastic expert parallelism", _set("enable_elastic_ep")),
    (_OLD | {"0.26.0", "0.27.1"}, "capture of routed experts", _set("enable_return_routed_experts")),
    (_OLD | _MID | {"0.30.0"}, "custom logits processors", _custom_processors),
    (_OLD | _MID, "prompt embeddings", _set("enable_prompt_embeds")),
    (_OLD, "logprobs of logits", _logits_logprobs),
    (_OLD | _MID, "fast prefill with shared KV", _set("kv_sharing_fast_prefill")),
    (_OLD | {"0.26.0", "0.27.1"}, "EC transfer", _set("ec_transfer_config")),
    (_ROCM_V1, "the cache mode 'all' of recurrent layers", _mode_all),
)
