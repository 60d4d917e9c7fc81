"""Compiler options and variables: added only where the build knows them, with a cache key of their own."""

from __future__ import annotations

import types

import pytest

from overlay.facts import Build, Facts, Hardware, Serving


@pytest.fixture
def image(tmp_path):
    """Folders as in an image: ``image(option)`` has a compiler configuration that names ``option``."""

    def make(option: str = "") -> Facts:
        (tmp_path / "vllm").mkdir(exist_ok=True)
        configs = tmp_path / "torch_npu" / "dynamo" / "npugraph_ex" / "configs"
        configs.mkdir(parents=True, exist_ok=True)
        (configs / "npugraphex_config.py").write_text(f"class CompilerConfig:\n    {option or 'x'} = None\n")
        return Facts(
            build=Build(root=str(tmp_path / "vllm"), plugins={"vllm_ascend": "0.23.0"}),
            hardware=Hardware(platform="ascend", arch="ascend910_93"),
            serving=Serving(speculative_method="mtp", num_speculative_tokens=4, cudagraph_mode="FULL_DECODE_ONLY"),
        )

    return make


def test_static_kernels_with_mtp_only_together_with_super_kernel(image):
    from dataclasses import replace

    from patches.ascend import ascend_static_kernel as static
    from patches.ascend import ascend_super_kernel as super_kernel

    with_it = image("super_kernel_optimize")
    without = image()  # the same folders; the last call decides what they hold
    assert "MTP" in static.contribute(without, {}).nothing
    assert "super_kernel_optimize" in super_kernel.compiler_without_it(without)
    plain = replace(without, serving=Serving(speculative_method="", cudagraph_mode="FULL_DECODE_ONLY"))
    assert static.contribute(plain, {}).args == {static.OPTION: True}
    image("super_kernel_optimize")
    assert static.contribute(with_it, {}).args == {static.OPTION: True}
    assert super_kernel.compiler_without_it(with_it) is None
    eager = replace(with_it, serving=Serving(enforce_eager=True))
    assert "no graphs" in static.contribute(eager, {}).nothing


def test_fused_mc2_leaves_a_value_of_the_users(image):
    from dataclasses import replace

    from patches.ascend import ascend_fused_mc2 as patch

    facts = image()
    assert patch.contribute(facts, {}).env == {"VLLM_ASCEND_ENABLE_FUSED_MC2": "1"}
    assert "512" in " ".join(patch.contribute(facts, {}).notes)
    set_already = replace(facts, env={"VLLM_ASCEND_ENABLE_FUSED_MC2": "2"})
    assert patch.contribute(set_already, {}).superseded and not patch.contribute(set_already, {}).env


@pytest.mark.ascend
def test_the_option_goes_through_vllm_ascends_own_door(world):
    from vllm_ascend.compilation import compiler_interface

    from tests.support import applied

    given = []

    class Knows:
        super_kernel_optimize = None

    def process(config, content):
        given.append(content["options"])

    vllm_config = types.SimpleNamespace(
        speculative_config=None,
        scheduler_config=types.SimpleNamespace(max_num_seqs=8),
        compilation_config=types.SimpleNamespace(cudagraph_capture_sizes=[1, 5, 20, 40]),
        parallel_config=types.SimpleNamespace(local_world_size=1, data_parallel_size_local=1),
    )
    on = types.SimpleNamespace(enable_static_kernel=True, enable_npugraph_ex=True)
    off = types.SimpleNamespace(enable_static_kernel=False, enable_npugraph_ex=True)
    compiler_interface._configure_backend(Knows(), on, vllm_config, process_kwargs_options=process)
    (stock,) = given
    assert stock["_vllm_aclnn_static_kernel_sym_range"] == [1, 5]  # the captured sizes that 8 requests can need
    with applied("ascend-super-kernel"):
        for config, compilation, expected in (
            (Knows(), on, [stock, {"super_kernel_optimize": True}]),
            (object(), on, [stock]),
            (Knows(), off, [{k: v for k, v in stock.items() if "static" not in k}]),
        ):
            given.clear()
            compiler_interface._configure_backend(config, compilation, vllm_config, process_kwargs_options=process)
            assert given == expected


@pytest.mark.ascend
def test_the_option_is_in_the_compile_hash(world):
    from vllm_ascend.compilation.compiler_interface import AscendCompiler

    from tests.support import applied

    compiler = AscendCompiler()
    stock = compiler.compute_hash(world.vllm_config)
    assert stock == compiler.compute_hash(world.vllm_config)
    with applied("ascend-super-kernel"):
        mixed = compiler.compute_hash(world.vllm_config)
        assert mixed == compiler.compute_hash(world.vllm_config)
    assert mixed != stock and len(mixed) == len(stock) and compiler.compute_hash(world.vllm_config) == stock


@pytest.mark.ascend
def test_capture_sizes_without_multiples_of_five_leave_steps_without_a_graph(world):
    """vLLM's own adjustment: what the published 42 ms came from, and what was set in its place."""
    from vllm.config import CompilationConfig

    def kept(sizes):
        config = CompilationConfig(cudagraph_capture_sizes=list(sizes), max_cudagraph_capture_size=max(sizes))
        config.adjust_cudagraph_sizes_for_spec_decode(5, 1)
        return config.cudagraph_capture_sizes

    assert kept([1, 2, 4, 5, 8]) == [5]
    assert kept([5, 20, 40]) == [5, 20, 40]
