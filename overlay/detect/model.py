"""The model, from its ``config.json``: in a folder, or in the Hugging Face cache. Never from the network.

The numbers are read as vLLM's ``ModelArchConfigConvertorBase`` reads them, from the text model where the configuration is
nested. What a model class says of itself (hybrid, M-RoPE, multimodal) is read off the release's own sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overlay.facts import Model

# Nested configurations that hold the language model, in the order in which they are looked for.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config", "talker_config", "decoder")
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention", "sliding", "global"}
_STATE_KEYS = ("linear_num_value_heads", "mamba_d_state", "mamba_expand", "ssm_state_size", "mamba_num_heads", "attn_type_list")
DEFAULT = "Qwen/Qwen3-0.6B"  # what `vllm serve` without MODEL serves


def find_model(
    name: str | None,
    environ: Mapping[str, str],
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    hf_config_path: str | None = None,
    hf_overrides: Any = None,
    root: str | Path | None = None,
) -> tuple[Model, dict[str, str]]:
    """The model's facts, and why they are unknown.

    name: a folder or a Hub name; None is what vLLM serves by default. root: the package ``vllm``, for the questions that
    only the model's class answers.
    """
    name = name or DEFAULT
    folder, reason = _folder(hf_config_path or name, environ, revision, download_dir)
    if folder is None:
        return Model(name=name), {"model": reason}
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        return Model(name=name, path=str(folder)), {"model": f"{file}: {error.strerror or error}"}
    except ValueError as error:
        return Model(name=name, path=str(folder)), {"model": f"{file} is no JSON: {error}"}
    if not isinstance(config, dict):
        return Model(name=name, path=str(folder)), {"model": f"{file}: expected a table"}
    unknown: dict[str, str] = {}
    if isinstance(hf_overrides, Mapping):
        config = {**config, **hf_overrides}
    model = from_config(config, name, str(folder), unknown, Path(root) if root else None)
    return model, unknown


def _folder(
    name: str, environ: Mapping[str, str], revision: str | None, download_dir: str | None
) -> tuple[Path | None, str]:
    """The folder that holds the model's files, and why there is none."""
    local = Path(name).expanduser()
    if local.is_dir():
        return local, ""
    if local.is_file():
        return None, f"{name} is a file: its metadata are not read"
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        return None, f"{name} does not exist"
    if environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return _modelscope(name, environ)
    home = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    cache = download_dir or environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or str(Path(home) / "hub")
    repository = Path(cache).expanduser() / ("models--" + name.replace("/", "--"))
    if not repository.is_dir():
        return None, f"{name} is neither a folder nor in the cache {cache}; nothing is downloaded to find out"
    wanted = revision or "main"
    try:
        commit = (repository / "refs" / wanted).read_text(encoding="utf-8").strip()
    except OSError:
        commit = wanted
    snapshot = repository / "snapshots" / commit
    if (snapshot / "config.json").exists():
        return snapshot, ""
    return None, f"{repository} holds no config.json of revision {wanted}"


def _modelscope(name: str, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    cache = Path(environ.get("MODELSCOPE_CACHE") or Path.home() / ".cache" / "modelscope" / "hub").expanduser()
    for base in (cache / "models", cache, cache / "hub" / "models"):
        for spelling in (name, name.replace(".", "___")):
            if (base / spelling / "config.json").exists():
                return base / spelling, ""
    return None, f"{name} is not in the ModelScope cache {cache}; nothing is downloaded to find out"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: the nested one where there is one, else the whole."""
    for key in TEXT_CONFIGS:
        inner = config.get(key)
        if isinstance(inner, Mapping) and ("hidden_size" in inner or "text_config" in inner or "num_hidden_layers" in inner):
            return text_config(inner)
    return config


def from_config(
    config: Mapping[str, Any], name: str, path: str, unknown: dict[str, str], root: Path | None = None
) -> Model:
    """The facts of a parsed ``config.json``. What it leaves open goes into ``unknown`` with the reason."""
    text = text_config(config)

    def number(*keys: str) -> int | None:
        for key in keys:
            value = text.get(key)
            if isinstance(value, (list, tuple)) and value:
                value = value[0] if len({*map(str, value)}) == 1 else None
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    architectures = tuple(config.get("architectures") or text.get("architectures") or ())
    hidden, heads = number("hidden_size", "n_embd", "d_model"), number("num_attention_heads", "n_head", "num_heads")
    head_dim = number("head_dim", "hidden_size_per_head")
    if not head_dim and hidden and heads:
        head_dim = hidden // heads
    if text.get("kv_lora_rank") and text.get("qk_rope_head_dim"):  # multi-head latent attention: one latent per token
        head_dim = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    experts = [text[key] for key in _EXPERTS if text.get(key)]
    moe = bool(experts) or any(
        isinstance(block, Mapping) and block.get("block_type") == "moe" for block in text.get("block_configs") or ()
    )
    traits = class_traits(root, architectures) if root else None
    layers = number("num_hidden_layers", "n_layer", "num_layers")
    found = Model(
        name=name,
        path=path,
        architectures=architectures,
        model_type=config.get("model_type"),
        text_model_type=text.get("model_type"),
        dtype=_dtype(config, text),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", "ffn_dim", "n_inner"),
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=number(*_KV_HEADS) or heads,
        head_dim=head_dim,
        vocab_size=number("vocab_size"),
        max_position=number("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
        rope_scaled=_rope_scaled(text),
        tie_word_embeddings=_tied(config, text),
        moe=moe,
        hybrid=_hybrid(config, text, traits),
        mrope=_mrope(config, text),
        xdrope=_rope(text).get("type") == "xdrope" or "xdrope_section" in _rope(text),
        mla="kv_lora_rank" in text and bool(text.get("kv_lora_rank")),
        multimodal=_multimodal(config, traits),
        encoder_decoder=bool(config.get("is_encoder_decoder") or text.get("is_encoder_decoder")),
        attention_free="IsAttentionFree" in traits if traits is not None else None,
        diffusion=config.get("canvas_length") is not None,
        speculators=config.get("speculators_config") is not None,
        pooling=(Path(path) / "modules.json").is_file(),
        mtp_layers=next((text[key] for key in _MTP_LAYERS if isinstance(text.get(key), int)), 0),
        quantization=_quantization(config, text),
    )
    if not architectures:
        unknown["model.architectures"] = f"{path}/config.json names none"
    for fact in ("hidden_size", "num_layers", "num_attention_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position"):
        if getattr(found, fact) is None:
            unknown[f"model.{fact}"] = f"{path}/config.json does not say it under a known key"
    if found.hybrid is None:
        unknown["model.hybrid"] = f"neither config.json nor the sources of {', '.join(architectures)} say it"
    if found.multimodal is None:
        unknown["model.multimodal"] = f"the sources of {', '.join(architectures)} were not found"
    if found.attention_free is None:
        unknown["model.attention_free"] = f"the sources of {', '.join(architectures)} were not found"
    if found.dtype is None:
        unknown["model.dtype"] = f"{path}/config.json does not say it; vLLM reads the weights' own"
    return found


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    vision = config.get("vision_config") if isinstance(config.get("vision_config"), Mapping) else {}
    for table in (config, text, vision):
        for key in ("dtype", "torch_dtype"):
            if isinstance(table.get(key), str):
                return table[key].removeprefix("torch.")
    return None


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool | None:
    for table in (text, config):
        if isinstance(table.get("tie_word_embeddings"), bool):
            return table["tie_word_embeddings"]
    return None


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(text.get(key), Mapping):
            return text[key]
    return {}


def _rope_scaled(text: Mapping[str, Any]) -> bool:
    """Whether RoPE stretches the positions beyond ``max_position``, so that vLLM derives another maximum length."""
    rope = _rope(text)
    kind = rope.get("rope_type", rope.get("type", "default"))
    return kind not in ("default", "mrope") or "factor" in rope


def _mrope(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """vLLM's test: an ``mrope_section`` in the RoPE parameters of the text or thinker model."""
    return any("mrope_section" in _rope(table) for table in (config, text))


def _hybrid(config: Mapping[str, Any], text: Mapping[str, Any], traits: frozenset[str] | None) -> bool | None:
    """Attention and recurrent layers mixed, by vLLM's rule: the class says so, and not every layer is attention."""
    types = config.get("layer_types")
    all_attention = isinstance(types, list) and all(kind in ("attention", "full_attention") for kind in types)
    if traits is not None:
        return "IsHybrid" in traits and not all_attention
    types = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(types, list):
        return any(kind not in _ATTENTION for kind in types)
    return True if any(key in text for key in _STATE_KEYS) else None


def _multimodal(config: Mapping[str, Any], traits: frozenset[str] | None) -> bool | None:
    if traits is not None:
        return "SupportsMultiModal" in traits
    if any(isinstance(config.get(key), Mapping) for key in ("vision_config", "audio_config", "visual")):
        return True
    return None


def _quantization(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    for table in (config, text):
        for key in ("quantization_config", "compression_config"):
            if isinstance(quantization := table.get(key), Mapping):
                method = str(quantization.get("quant_method", "")).lower().replace("compressed_tensors", "compressed-tensors")
                return method or "unnamed"
    return ""


# --- what the model's class says --------------------------------------------------------------------------------------

TRAITS = frozenset(("IsHybrid", "IsAttentionFree", "HasInnerState", "SupportsMultiModal", "SupportsMRoPE", "SupportsXDRoPE"))
# An interface that brings another along (``vllm/model_executor/models/interfaces.py``).
_IMPLIED = {"SupportsMultiModalPruning": {"SupportsMultiModal"}, "SupportsQuant": set()}


_LEAVES = frozenset(("Module", "Protocol", "ABC", "Generic", "SupportsLoRA", "SupportsPP", "SupportsQuant", "SupportsEagle3"))


def class_traits(root: Path, architectures: tuple[str, ...]) -> frozenset[str] | None:
    """Which of ``TRAITS`` the model's class inherits, from the release's sources; None where they cannot be read."""
    try:
        registry = (root / "model_executor/models/registry.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    texts: dict[Path, str] = {}
    for architecture in architectures:
        at = registry.find(f'"{architecture}":')
        found = re.compile(r'"\w+":\s*\(\s*"([\w.]+)",\s*"(\w+)"').match(registry, at) if at >= 0 else None
        if found:
            seen: set[str] = set()
            if _walk(root, _model_file(root, found[1]), found[2], seen, texts, 0):
                return frozenset(seen & TRAITS)
    return None


def _model_file(root: Path, module: str) -> Path:
    base = root / "model_executor/models" / module if not module.startswith("vllm.") else root.joinpath(*module.split(".")[1:])
    file = base.with_suffix(".py")
    return file if file.is_file() else base / "__init__.py"


_CLASS = re.compile(r"\nclass (\w+)(?:\(([^)]*)\))?\s*:")
_IMPORT = re.compile(r"^[ \t]*from (\.*)([\w.]*) import (?:\(([^)]*)\)|([^\n(]+))", re.MULTILINE)


def _walk(root: Path, file: Path, name: str, seen: set[str], texts: dict[Path, str], depth: int) -> bool:
    """Collect the names of all base classes of ``name`` in ``file``. False where the class cannot be found."""
    if file not in texts:
        try:
            texts[file] = "\n" + file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            texts[file] = ""
    source = texts[file]
    at = source.find(f"\nclass {name}")
    while at >= 0 and ((found := _CLASS.match(source, at)) is None or found[1] != name):
        at = source.find(f"\nclass {name}", at + 1)
    if at < 0:
        imported = _imported(root, file, source, name)
        return depth < 12 and imported is not None and _walk(root, *imported, seen, texts, depth + 1)
    for base in _bases(found[2] or ""):  # type: ignore[index]
        if base in seen:
            continue
        seen |= {base, *_IMPLIED.get(base, ())}
        if base not in TRAITS and base not in _LEAVES and depth < 12:
            _walk(root, file, base, seen, texts, depth + 1)
    return True


def _bases(text: str) -> Iterator[str]:
    text = re.sub(r"\[[^\[\]]*\]|#.*", "", text)
    for part in text.split(","):
        base = part.strip()
        if base and "=" not in base:
            yield base.rpartition(".")[2]


def _imported(root: Path, file: Path, source: str, name: str) -> tuple[Path, str] | None:
    """The file and name behind an imported class, where it lies in the package."""
    if name not in source:
        return None
    for found in _IMPORT.finditer(source):
        dots, module, many, one = found.groups()
        names = many or one
        if name not in names:
            continue
        for entry in re.sub(r"#.*", "", names).split(","):
            original, _, alias = (part.strip() for part in entry.strip().partition(" as "))
            if (alias or original) != name:
                continue
            if dots:
                base = file.parents[len(dots) - 1]
            elif module.split(".")[0] == "vllm":
                base, module = root, module.partition(".")[2]
            else:
                return None
            target = base.joinpath(*module.split(".")) if module else base
            path = target.with_suffix(".py")
            return (path if path.is_file() else target / "__init__.py"), original
    return None
