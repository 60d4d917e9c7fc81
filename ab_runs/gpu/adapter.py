"""A LoRA adapter of random weights for a model with random weights: PEFT's two files, from the model's ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANK = 16
# What a projection adds is about this many times its input's size (root mean square). Dummy weights are so small that the
# last token's embedding alone decides the next one; from about 10 on the adapter does.
GAIN = 30.0


def projections(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """``self_attn.q_proj`` and the like -> (output, input) of the whole weight, not of a rank's shard.

    Raises ValueError for a model that is not a plain dense decoder: its layers have other names.
    """
    if "text_config" in config or config.get("layer_types") and set(config["layer_types"]) != {"full_attention"}:
        raise ValueError("adapters are made for plain dense decoders only")
    if any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError("adapters are made for models without experts only")
    hidden, inner, heads = (int(config[name]) for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head = int(config.get("head_dim") or hidden // heads)
    kv = int(config.get("num_key_value_heads") or heads) * head
    return {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def make(config: Mapping[str, Any], folder: Path, seed: int = 0) -> Path:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` (bf16) for every layer into ``folder``; returns it.

    The same seed gives the same adapter in every process. Raises ValueError as ``projections``.
    """
    import torch
    from safetensors.torch import save_file

    found = projections(config)
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int, size: float) -> Any:
        return (torch.randn(rows, columns, generator=generator) * size).bfloat16()

    tensors = {}
    for layer in range(int(config["num_hidden_layers"])):
        for name, (outputs, inputs) in found.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = weight(RANK, inputs, inputs**-0.5)
            tensors[f"{prefix}.lora_B.weight"] = weight(outputs, RANK, GAIN * RANK**-0.5)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "", "bias": "none",
        "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0, "target_modules": [name.rpartition(".")[2] for name in found],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(said, indent=1))
    return folder
