"""The decode products of a model: which (N, K) its unquantised layers have on one rank. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCABULARY_PAD = 64  # vLLM pads the vocabulary to a multiple of this before it shards it


@dataclass(frozen=True)
class Product:
    """One weight [n, k] of a rank: which layers, and how often a decode step runs it."""

    name: str
    n: int
    k: int
    count: int


def products(config: Mapping[str, Any], tp: int = 1) -> list[Product]:
    """The products of a dense or hybrid decoder from its ``config.json`` (nested text configurations included).

    Layers of experts are left out: they do not go through the unquantised GEMM. Raises ValueError, naming the key, where
    the configuration does not say enough.
    """
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ValueError("text_config is no object")

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            if isinstance(text.get(name), int):
                return text[name]
        if default is None:
            raise ValueError(f"the model's configuration has no {names[0]}: give the shapes with --shapes")
        return default

    hidden, layers = number("hidden_size"), number("num_hidden_layers")
    heads = number("num_attention_heads")
    kv_heads = number("num_key_value_heads", default=heads)
    head = number("head_dim", default=hidden // heads)
    kv_local, heads_local = max(1, kv_heads // tp), heads // tp
    kinds = text.get("layer_types") or ["full_attention"] * layers
    linear_layers = sum(kind == "linear_attention" for kind in kinds)
    attention_layers = layers - linear_layers
    gated = bool(text.get("attn_output_gate", linear_layers > 0))
    query = heads_local * head * (2 if gated else 1)
    found = [
        Product("attention qkv", query + 2 * kv_local * head, hidden, attention_layers),
        Product("attention o", hidden, heads_local * head, attention_layers),
    ]
    if linear_layers:
        key = number("linear_num_key_heads") * number("linear_key_head_dim")
        value = number("linear_num_value_heads") * number("linear_value_head_dim")
        found += [
            Product("gdn qkvz", (2 * key + 2 * value) // tp, hidden, linear_layers),
            Product("gdn ba", 2 * number("linear_num_value_heads") // tp, hidden, linear_layers),
            Product("gdn out", hidden, value // tp, linear_layers),
        ]
    experts = any(text.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if not experts:
        inner = number("intermediate_size") // tp
        found += [
            Product("gate_up", 2 * inner, hidden, layers),
            Product("down", hidden, inner, layers),
        ]
    vocabulary = number("vocab_size")
    padded = -(-vocabulary // VOCABULARY_PAD) * VOCABULARY_PAD
    found.append(Product("lm_head", padded // tp, hidden, 1))
    return found


def gated_mlps(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(hidden, inner) of a dense model's MLP with SiLU and a gate, as one rank of one has it; empty for others."""
    text = config.get("text_config") or config
    experts = any(text.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    hidden, inner = text.get("hidden_size"), text.get("intermediate_size")
    if experts or text.get("hidden_act") != "silu" or not isinstance(hidden, int) or not isinstance(inner, int):
        return []
    return [(hidden, inner)]


def normed(config: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """What a patch fuses with the norm in front (``normed-layer-qwen3``): ("normed", n, k) for the attention's product and
    ("normed_mlp", hidden, inner); empty for other models.
    """
    if config.get("model_type") != "qwen3" or not gated_mlps(config):
        return []
    ((hidden, inner),) = gated_mlps(config)
    return [("normed", products(config)[0].n, hidden), ("normed_mlp", hidden, inner)]
