"""What the server will run with: the user's arguments over the release's defaults.

A default that depends on something unknown is unknown. Sources: ``EngineArgs.create_engine_config``,
``VllmConfig.__post_init__`` and ``get_batch_defaults`` of vLLM 0.18.1 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlay import versions
from overlay.detect.runner import Question, choose
from overlay.facts import Build, Hardware, Model, Serving
from overlay.serve_args import MISSING, ServeArgs

GIB = 1 << 30
# Architecture endings and what such a model does unless told otherwise (``vllm.config.model._SUFFIX_TO_DEFAULTS``).
_GENERATE = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
_POOL = ("ForTextEncoding", "Classification", "ClassificationModel", "ForRewardModeling", "RewardModel", "Model")
_MODES = {"NONE": 0, "STOCK_TORCH_COMPILE": 1, "DYNAMO_TRACE_ONCE": 2, "VLLM_COMPILE": 3}
# Speculative methods that stay asynchronous by default, beside EAGLE's and MTP's.
_ASYNC_METHODS = {"eagle", "eagle3", "extract_hidden_states", "mtp", "ngram_gpu"}
_LEVELS = {"O0": 0, "O1": 1, "O2": 2, "O3": 3}


def find_serving(
    args: ServeArgs | None, build: Build, hardware: Hardware, model: Model, environ: Mapping[str, str]
) -> tuple[Serving, dict[str, str]]:
    """The serving facts, and why facts are unknown. args: None where the program is not ``vllm serve``."""
    if args is None:
        return Serving(speculative_method=None, num_speculative_tokens=None), {
            "serving": "the program is not `vllm serve`: it sets its own arguments"
        }
    return _Finder(args, build, hardware, model, environ).find()


class _Finder:
    def __init__(
        self, args: ServeArgs, build: Build, hardware: Hardware, model: Model, environ: Mapping[str, str]
    ) -> None:
        self.args, self.build, self.hardware, self.model, self.environ = args, build, hardware, model, environ
        self.unknown: dict[str, str] = {}

    def get(self, path: str, default: Any = None) -> Any:
        value = self.args.get(path)
        return default if value is MISSING else value

    def whole(self, path: str, default: int | None) -> int | None:
        value = self.get(path, default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default if value is None else None

    def release(self, spec: str) -> bool | None:
        return versions.in_range(self.build.public, spec)

    def find(self) -> tuple[Serving, dict[str, str]]:
        method, tokens = self._speculation()
        compilation, graphs = self._compilation()
        kv = self.get("kv_transfer_config")
        serving = Serving(
            task=self._task(),
            tensor_parallel=self.whole("tensor_parallel_size", 1),
            pipeline_parallel=self.whole("pipeline_parallel_size", 1),
            data_parallel=self.whole("data_parallel_size", 1),
            decode_context_parallel=self.whole("decode_context_parallel_size", 1),
            prefill_context_parallel=self.whole("prefill_context_parallel_size", 1),
            speculative_method=method,
            num_speculative_tokens=tokens,
            draft_sample_method=self.get("speculative_config.draft_sample_method") or "greedy",
            adaptive_verification=bool(self.get("speculative_config.enable_adaptive_verification", False)),
            lora=bool(self.get("enable_lora", False)),
            enforce_eager=bool(self.get("enforce_eager", False)),
            prompt_embeds=bool(self.get("enable_prompt_embeds", False)),
            ubatching=self._ubatching(),
            routed_experts=bool(self.get("enable_return_routed_experts", False)),
            kv_transfer=bool(kv) or self.get("kv_offloading_size") is not None,
            compilation_mode=compilation,
            cudagraph_mode=graphs,
            cudagraph_capture_sizes=self._sizes(),
            max_cudagraph_capture_size=self.whole("compilation_config.max_cudagraph_capture_size", None),
            performance_mode=self.get("performance_mode") or self._default_performance_mode(),
            batch_invariant=self._flag("VLLM_BATCH_INVARIANT"),
            quantization=self.get("quantization") or self.model.quantization,
        )
        serving = replace(serving, executor=self._executor(serving), prefix_caching=self._prefix_caching(serving.task))
        serving = replace(serving, max_model_len=self._max_model_len())
        seqs, batched = self._batch(serving)
        serving = replace(serving, max_num_seqs=seqs, max_num_batched_tokens=batched)
        answer = choose(Question(self.build, self.hardware, self.model, serving, self.environ, self.get))
        serving = replace(serving, runner=answer.runner, runner_reason=answer.reason)
        if answer.runner is None:
            self.unknown["serving.runner"] = answer.reason
        serving = replace(serving, async_scheduling=self._async(serving))
        if self.args.error:
            self.unknown["serving"] = f"vLLM will refuse the command line: {self.args.error}"
        return serving, self.unknown

    def _flag(self, variable: str) -> bool:
        return self.environ.get(variable, "0").strip().lower() not in ("", "0", "false")

    def _task(self) -> str | None:
        runner, convert = self.get("runner", "auto"), self.get("convert", "auto")
        if runner in ("generate", "pooling"):
            return runner
        if convert not in ("auto", "none") or self.model.pooling:
            return "pooling"
        for name in self.model.architectures:
            if name.endswith(_GENERATE):
                return "generate"
            if name.endswith(_POOL):
                return "pooling"
        self.unknown["serving.task"] = self.unknown.get("serving.task") or "the model's architecture does not tell"
        return None

    def _speculation(self) -> tuple[str | None, int | None]:
        """(method, tokens): ("", 0) where speculation is off, None for what only the draft model's files would tell."""
        table = self.get("speculative_config")
        parts = {key: self.get(f"speculative_config.{key}") for key in ("method", "model", "num_speculative_tokens")}
        if not table and all(value is None for value in parts.values()):
            if self.model.speculators:
                self.unknown["serving.speculative_method"] = "the checkpoint turns speculation on (speculators_config)"
                self.unknown["serving.num_speculative_tokens"] = self.unknown["serving.speculative_method"]
                return None, None
            return "", 0
        method, draft, tokens = parts["method"], parts["model"], parts["num_speculative_tokens"]
        if method is None and draft in ("ngram", "[ngram]"):
            method = "ngram"
        if method is None:
            self.unknown["serving.speculative_method"] = f"vLLM works it out from the draft model {draft!r}"
        elif method == "[ngram]":
            method = "ngram"
        elif str(method).endswith("_mtp"):
            method = "mtp"  # vLLM renames the methods of single models
        if not isinstance(tokens, int):
            tokens = self.model.mtp_layers if method == "mtp" and draft is None and self.model.mtp_layers else None
            if tokens is None:
                self.unknown["serving.num_speculative_tokens"] = "vLLM takes it from the draft model"
        return method, tokens

    def _compilation(self) -> tuple[int | None, str | None]:
        """(compilation mode, CUDA graph mode) before a back end lowers the latter."""
        eager, platform = bool(self.get("enforce_eager", False)), self.hardware.platform
        level = self.get("optimization_level", 2)
        level = _LEVELS.get(str(level).upper(), int(level) if str(level).isdigit() else None)
        mode = self.get("compilation_config.mode")
        if mode is None and "compilation_config.mode" not in self.unknown:
            mode = None if level is None else 3 if level > 0 else 0
        mode = _MODES.get(str(mode).upper(), int(mode) if str(mode).isdigit() else None)
        graphs = self.get("compilation_config.cudagraph_mode")
        graphs = str(graphs).upper() if graphs is not None else None
        if eager:
            return 0, "NONE"
        if platform == "cpu":
            lora = bool(self.get("enable_lora", False))
            return (0 if lora else 2 if mode == 3 else mode), "NONE"
        if graphs is None and platform in ("cuda", "rocm", "dcu") and not self._own_platform():
            graphs = {None: None, 0: "NONE", 1: "PIECEWISE"}.get(level, "FULL_AND_PIECEWISE")
        if graphs is not None and mode not in (3, None) and "PIECEWISE" in graphs:
            graphs = "FULL" if self.get("compilation_config.cudagraph_mode") and graphs == "FULL_AND_PIECEWISE" else "NONE"
        if graphs is None:
            self.unknown["serving.cudagraph_mode"] = "the platform sets its own"
        if mode is None:
            self.unknown["serving.compilation_mode"] = "the platform or the optimisation level sets it"
        return mode, graphs

    def _sizes(self) -> tuple[int, ...] | None:
        """The user's capture sizes in tokens; None where the user gave none."""
        given = self.get("compilation_config.cudagraph_capture_sizes")
        if isinstance(given, (list, tuple)) and all(isinstance(size, int) for size in given):
            return tuple(given)
        return None

    def _default_performance_mode(self) -> str | None:
        if "performance_mode" in self.args.grammar.by_dest:
            return "balanced"
        self.unknown["serving.performance_mode"] = "this release has no such option"
        return None

    def _own_platform(self) -> bool:
        return "vllm.platform_plugins" in self.build.entry_points or bool(self.build.plugins)

    def _ubatching(self) -> bool:
        if self.hardware.platform == "cpu":
            return False
        return bool(self.get("enable_dbo", False)) or (self.whole("ubatch_size", 0) or 0) > 1

    def _executor(self, serving: Serving) -> str | None:
        given = self.get("distributed_executor_backend")
        if given is not None:
            return str(given)
        sizes = (serving.tensor_parallel, serving.pipeline_parallel, serving.data_parallel)
        if any(size is None for size in sizes):
            return None
        if all(size == 1 for size in sizes):
            return "mp" if self.hardware.platform == "cpu" else "uni"
        if self.get("data_parallel_backend") == "ray":
            return "ray"
        if any(name in self.environ for name in ("RAY_JOB_ID", "RAY_ADDRESS", "RAY_CLUSTER_ADDRESS")):
            self.unknown["serving.executor"] = "a Ray cluster may be in reach"
            return None
        return "mp"

    def _prefix_caching(self, task: str | None) -> bool | None:
        given = self.get("enable_prefix_caching")
        if given is not None:
            return bool(given)
        reason = ""
        if task != "generate":
            reason = "of a pooling model, the pooler's type decides" if task else "unknown what the model does"
        elif self.model.hybrid is None or self.model.encoder_decoder is None:
            reason = "the kind of attention is unknown"
        elif self.model.hybrid:
            if (old := self.release("<0.26")) is None:
                reason = "of a hybrid model, the release decides"
            else:
                return not old
        elif self.model.attention_free is None:
            reason = "the kind of attention is unknown"
        else:
            return not (self.model.attention_free or self.model.encoder_decoder)
        self.unknown["serving.prefix_caching"] = reason
        return None

    def _max_model_len(self) -> int | None:
        given = self.get("max_model_len")
        if isinstance(given, int) and given > 0:
            return given
        if given is not None:
            self.unknown["serving.max_model_len"] = "vLLM fits it to the memory (auto)"
            return None
        if self.model.max_position is None or self.model.rope_scaled is not False:
            self.unknown["serving.max_model_len"] = "vLLM derives it from the model's RoPE scaling"
            return None
        return self.model.max_position

    def _batch(self, serving: Serving) -> tuple[int | None, int | None]:
        """(max_num_seqs, max_num_batched_tokens), by ``get_batch_defaults`` for the API server."""
        seqs, batched = self.get("max_num_seqs"), self.get("max_num_batched_tokens")
        seqs = seqs if isinstance(seqs, int) else None
        batched = batched if isinstance(batched, int) else None
        if seqs is not None and batched is not None:
            return seqs, batched
        tp, pp = serving.tensor_parallel, serving.pipeline_parallel
        default = self._batch_defaults(tp * pp if tp and pp else None)
        if isinstance(default, str):
            for fact, value in (("max_num_seqs", seqs), ("max_num_batched_tokens", batched)):
                if value is None:
                    self.unknown[f"serving.{fact}"] = default
            return seqs, batched
        twice = 2 if self.get("performance_mode") == "throughput" else 1
        found_seqs = seqs if seqs is not None else default[0] * twice
        found_batched = batched if batched is not None else default[1] * twice
        if batched is None:
            length = serving.max_model_len
            if self.get("enable_chunked_prefill") is False or self.model.encoder_decoder:
                found_batched = max(length, found_batched) if length else None
            if found_batched is not None and length is None and found_seqs * 64 < found_batched:
                found_batched = None
            elif found_batched is not None and length is not None:
                found_batched = min(found_seqs * length, found_batched)
            if found_batched is None:
                self.unknown["serving.max_num_batched_tokens"] = "it depends on max_model_len, which is unknown"
        if seqs is None and found_batched is not None:
            found_seqs = min(found_seqs, found_batched)
        return found_seqs, found_batched

    def _batch_defaults(self, world: int | None) -> tuple[int, int] | str:
        platform, memory, name = self.hardware.platform, self.hardware.memory, (self.hardware.name or "").lower()
        if world is None:
            return "the parallel sizes are unknown"
        if platform == "cpu":
            return 128 * world, 2048 * world
        if platform not in ("cuda", "rocm", "dcu", "ascend", "musa", "maca"):
            return "the platform's defaults are unknown"
        if memory is None or (memory >= 70 * GIB and not name):
            return "the defaults go by the device's memory and name, which are unknown"
        if memory >= 160 * GIB:
            if (large := self.release(">=0.28")) is None or (not large and self.release(">0.27.1")):
                return "the release's defaults for devices with 160 GiB are unknown"
            return 1024, 16384 if large else 8192
        if memory >= 70 * GIB and "a100" not in name:
            if self.release(">=0.33") is not False and platform != "cuda":
                return "the release's defaults for this device were not read"
            return 1024, 8192
        return 256, 2048

    def _async(self, serving: Serving) -> bool | None:
        """``scheduler_config.async_scheduling`` as ``VllmConfig.__post_init__`` settles it."""
        if self.hardware.platform == "cpu":
            return False
        given = self.get("async_scheduling")
        if given is not None:
            return bool(given)
        reason = ""
        method = serving.speculative_method
        old = self.release("<0.19")
        new = self.release(">=0.31")
        if old is None or new is None:
            reason = "the release's rule is unknown"
        elif serving.task is None and not old:
            reason = "unknown whether the model generates or pools"
        elif serving.task == "pooling" and not old:
            return False
        elif method is None:
            reason = "the speculative method is unknown"
        elif serving.executor not in ("uni", "mp", "external_launcher"):
            reason = f"whether the executor {serving.executor} supports it is unknown"
        elif self.hardware.platform in (None, "musa", "maca", "mlu", "kunlun", "gaudi", "tpu"):
            reason = "the platform's rule is unknown"
        elif self.hardware.platform in ("rocm", "dcu") and serving.ubatching and self.get("all2all_backend"):
            reason = "dual batch overlap with this all-to-all on ROCm"
        else:
            v1_rules = True
            if self.release(">=0.33"):
                if serving.runner is None:
                    reason = "the runner is unknown"
                v1_rules = serving.runner == "V1"
            elif new and (serving.pipeline_parallel or 1) > 1 and serving.runner is None:
                reason = "the runner is unknown"
            if not reason:
                if v1_rules and method not in ("", *self._async_methods()):
                    return False
                if v1_rules and method and self.get("speculative_config.disable_padded_drafter_batch"):
                    return False
                return not (new and serving.runner == "V1" and (serving.pipeline_parallel or 1) > 1)
        self.unknown["serving.async_scheduling"] = reason
        return None

    def _async_methods(self) -> set[str]:
        methods = set(_ASYNC_METHODS)
        if self.release(">=0.23"):
            methods.add("dflash")
        if self.release(">=0.26"):
            methods.add("dspark")
        if self.release(">=0.28"):
            methods.add("draft_model")
        return methods
