"""Facts of a running worker, from vLLM's own configuration objects: what the plan could only predict, or not know at all
(another program than the server chose its own model and arguments).
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from overlay.facts import Build, Facts, Hardware, Model, Serving


def from_dict(content: dict[str, Any]) -> Facts:
    """Facts from ``Facts.to_dict()``, as the orders carry them."""

    def make(cls: Any, values: dict[str, Any]) -> Any:
        known = {field.name for field in fields(cls)}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known})

    return Facts(
        build=make(Build, content["build"]),
        hardware=make(Hardware, content["hardware"]),
        model=make(Model, content["model"]),
        serving=make(Serving, content["serving"]),
        env=content.get("env", {}),
        unknown=content.get("unknown", {}),
    )


def live(planned: Facts, worker: Any, runner: str | None) -> Facts:
    """The planned facts with everything that this worker's configuration knows better.

    A value that this release's configuration does not have stays as planned.
    """
    config = getattr(worker, "vllm_config", None)
    if config is None:
        return planned
    serving = replace(planned.serving, **_serving(config, runner))
    return replace(planned, serving=serving, model=_model(planned.model, config, planned.build))


def _serving(config: Any, runner: str | None) -> dict[str, Any]:
    parallel, scheduler = config.parallel_config, config.scheduler_config
    model, compilation = config.model_config, config.compilation_config
    speculative = config.speculative_config
    outputs = getattr(config, "aux_output_config", model)  # from 0.32; the model's own before
    found = {
        "runner": runner,
        "tensor_parallel": getattr(parallel, "tensor_parallel_size", None),
        "pipeline_parallel": getattr(parallel, "pipeline_parallel_size", None),
        "data_parallel": getattr(parallel, "data_parallel_size", None),
        "decode_context_parallel": getattr(parallel, "decode_context_parallel_size", None),
        "prefill_context_parallel": getattr(parallel, "prefill_context_parallel_size", None),
        "ubatching": getattr(parallel, "use_ubatching", getattr(parallel, "enable_dbo", None)),
        "async_scheduling": getattr(scheduler, "async_scheduling", None),
        "max_num_seqs": getattr(scheduler, "max_num_seqs", None),
        "max_num_batched_tokens": getattr(scheduler, "max_num_batched_tokens", None),
        "max_model_len": getattr(model, "max_model_len", None),
        "enforce_eager": getattr(model, "enforce_eager", None),
        "prompt_embeds": getattr(model, "enable_prompt_embeds", None),
        "routed_experts": getattr(outputs, "enable_return_routed_experts", None),
        "task": {"generate": "generate", "pooling": "pooling"}.get(getattr(model, "runner_type", "")),
        "quantization": getattr(model, "quantization", None),
        "prefix_caching": getattr(config.cache_config, "enable_prefix_caching", None),
        "lora": config.lora_config is not None,
        "kv_transfer": config.kv_transfer_config is not None,
        "speculative_method": "" if speculative is None else getattr(speculative, "method", None),
        "num_speculative_tokens": 0 if speculative is None else getattr(speculative, "num_speculative_tokens", None),
        "cudagraph_mode": getattr(getattr(compilation, "cudagraph_mode", None), "name", None),
        "batch_invariant": _batch_invariant(),
        "compilation_mode": int(compilation.mode) if getattr(compilation, "mode", None) is not None else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _batch_invariant() -> bool | None:
    try:
        from vllm import envs

        return bool(envs.VLLM_BATCH_INVARIANT)
    except (ImportError, AttributeError):  # named otherwise in this release
        return None


def _model(planned: Model, config: Any, build: Build) -> Model:
    if planned.architectures:
        return planned
    from overlay.detect.model import from_config

    hf = config.model_config.hf_config
    root = Path(build.root) if build.root else None
    name = str(config.model_config.model)
    return from_config(hf.to_dict(), name, name, {}, root)
