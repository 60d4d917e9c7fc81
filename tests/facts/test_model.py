"""The model's facts from its files: folders, the Hub's cache, and names with no network."""

import json

import pytest

from overlay.detect.model import class_traits, find_model, from_config, text_config
from tests.facts.release_code import RELEASES, root

QWEN35 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text", "dtype": "bfloat16", "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
        "max_position_embeddings": 262144, "layer_types": ["linear_attention", "full_attention"], "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [11, 11, 10]}, "linear_num_value_heads": 48,
        "tie_word_embeddings": False,
    },
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "torch_dtype": "bfloat16", "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000,
    "max_position_embeddings": 32768, "quantization_config": {"quant_method": "FP8"},
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27,
    "num_attention_heads": 16, "n_routed_experts": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "vocab_size": 102400,
    "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 40},
}  # fmt: skip


def facts(config, root=None):
    unknown = {}
    return from_config(config, "m", "/m", unknown, root), unknown


def test_nested_configuration():
    found, unknown = facts(QWEN35)
    assert (found.hidden_size, found.num_layers, found.head_dim, found.vocab_size) == (5120, 64, 256, 248320)
    assert (found.model_type, found.text_model_type, found.dtype) == ("qwen3_5", "qwen3_5_text", "bfloat16")
    assert (found.hybrid, found.mrope, found.moe, found.multimodal) == (True, True, False, True)
    assert (found.mtp_layers, found.xdrope, found.mla, found.quantization) == (1, False, False, "")
    assert found.rope_scaled is False and found.tie_word_embeddings is False
    assert "model.attention_free" in unknown  # only the class says it


def test_mixture_of_experts_and_quantisation():
    found, _ = facts(MIXTRAL)
    assert found.moe is True and found.quantization == "fp8" and found.head_dim == 128 and found.dtype == "bfloat16"


def test_latent_attention_and_scaled_positions():
    found, _ = facts(DEEPSEEK)
    assert (found.mla, found.head_dim, found.mtp_layers, found.rope_scaled) == (True, 576, 1, True)


def test_the_innermost_language_model_is_read():
    inner = {"hidden_size": 8, "num_hidden_layers": 2}
    assert text_config({"thinker_config": {"text_config": inner, "hidden_size": 1}}) is inner
    assert text_config({"vision_config": {"hidden_size": 3}, "hidden_size": 8})["hidden_size"] == 8


def test_what_the_file_leaves_open_is_unknown_with_the_reason():
    found, unknown = facts({"model_type": "strange"})
    assert found.hidden_size is None and "known key" in unknown["model.hidden_size"]
    assert found.architectures == () and "names none" in unknown["model.architectures"]
    assert found.dtype is None and "weights' own" in unknown["model.dtype"]


def write(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_a_folder(tmp_path):
    found, unknown = find_model(str(write(tmp_path / "m", MIXTRAL)), {})
    assert found.architectures == ("MixtralForCausalLM",) and found.path == str(tmp_path / "m")
    assert "model" not in unknown


@pytest.mark.parametrize(
    ("content", "said"), [("{broken", "is no JSON"), ("[]", "expected a table"), (None, "No such file")]
)
def test_a_folder_whose_configuration_cannot_be_read(tmp_path, content, said):
    folder = tmp_path / "m"
    folder.mkdir()
    if content is not None:
        write(folder, content)
    found, unknown = find_model(str(folder), {})
    assert found.architectures == () and said in unknown["model"]


def cached(home, name="org/model", commit="c0ffee", ref="main"):
    repository = home / "hub" / ("models--" + name.replace("/", "--"))
    write(repository / "snapshots" / commit, MIXTRAL)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    return home


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"])
def test_a_name_in_the_hubs_cache(tmp_path, variable):
    home = cached(tmp_path / ("huggingface" if variable == "XDG_CACHE_HOME" else "home"))
    value = {"HF_HOME": home, "HF_HUB_CACHE": home / "hub", "XDG_CACHE_HOME": tmp_path}[variable]
    found, _ = find_model("org/model", {variable: str(value)})
    assert found.architectures == ("MixtralForCausalLM",) and found.path.endswith("snapshots/c0ffee")


def test_a_revision_in_the_cache(tmp_path):
    home = cached(cached(tmp_path), commit="beef", ref="v2")
    assert find_model("org/model", {"HF_HOME": str(home)}, revision="v2")[0].path.endswith("beef")
    assert find_model("org/model", {"HF_HOME": str(home)}, revision="c0ffee")[0].path.endswith("c0ffee")
    found, unknown = find_model("org/model", {"HF_HOME": str(home)}, revision="v3")
    assert found.path is None and "revision v3" in unknown["model"]


def test_download_dir_and_modelscope(tmp_path):
    cached(tmp_path)
    assert find_model("org/model", {}, download_dir=str(tmp_path / "hub"))[0].architectures
    write(tmp_path / "ms" / "models" / "org/Qwen3___5", QWEN35)
    environ = {"VLLM_USE_MODELSCOPE": "True", "MODELSCOPE_CACHE": str(tmp_path / "ms")}
    assert find_model("org/Qwen3.5", environ)[0].model_type == "qwen3_5"


def test_a_name_that_is_nowhere_is_unknown_and_not_fetched(tmp_path, monkeypatch):
    import socket

    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("the network was asked"))
    found, unknown = find_model("org/other", {"HF_HOME": str(tmp_path)})
    assert found.name == "org/other" and "nothing is downloaded" in unknown["model"]
    assert "does not exist" in find_model("./nowhere", {})[1]["model"]


def test_a_sentence_transformers_folder_pools(tmp_path):
    folder = write(tmp_path / "m", MIXTRAL)
    assert find_model(str(folder), {})[0].pooling is False
    (folder / "modules.json").write_text("[]")
    assert find_model(str(folder), {})[0].pooling is True


def test_overrides_of_the_command_line_count(tmp_path):
    folder = write(tmp_path / "m", MIXTRAL)
    found, _ = find_model(str(folder), {}, hf_overrides={"architectures": ["LlamaForCausalLM"]})
    assert found.architectures == ("LlamaForCausalLM",)


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("architecture", "traits"),
    [
        ("Qwen3_5ForConditionalGeneration", {"IsHybrid", "SupportsMRoPE", "SupportsMultiModal"}),
        ("Qwen3ForCausalLM", set()),
        ("Qwen3NextForCausalLM", {"IsHybrid", "HasInnerState"}),
        ("MambaForCausalLM", {"IsAttentionFree", "HasInnerState"}),
        ("Qwen2_5_VLForConditionalGeneration", {"SupportsMRoPE", "SupportsMultiModal"}),
        ("LlamaForCausalLM", set()),
    ],
)
def test_what_a_class_says_of_itself_is_read_off_the_release(release, architecture, traits):
    if not root(release).is_dir():
        pytest.skip(f"the sources of vLLM {release} are not here")
    assert class_traits(root(release), (architecture,)) == traits


def test_traits_are_those_of_the_live_classes():
    """The installed release's registry agrees with what is read off its source, for many architectures."""
    pytest.importorskip("vllm")
    from pathlib import Path

    import vllm
    from vllm.model_executor.models import interfaces
    from vllm.model_executor.models.registry import ModelRegistry

    names = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3NextForCausalLM", "MambaForCausalLM", "BambaForCausalLM")
    names += ("FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "LlavaForConditionalGeneration")
    compared = 0
    for name in names:
        live = ModelRegistry._try_load_model_cls(name)
        if live is None:  # its imports are not installed here
            continue
        compared += 1
        read = class_traits(Path(vllm.__path__[0]), (name,))
        assert ("IsHybrid" in read) == interfaces.is_hybrid(live), name
        assert ("IsAttentionFree" in read) == interfaces.is_attention_free(live), name
        assert ("SupportsMultiModal" in read) == bool(interfaces.supports_multimodal(live)), name
    assert compared >= 5
