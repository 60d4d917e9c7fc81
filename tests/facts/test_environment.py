"""The environment check: it warns, names a remedy, and changes nothing."""

import pytest

from overlay.detect.environment import REMOVED, check, known_variables, warnings
from overlay.facts import Build, Hardware
from tests.facts.release_code import RELEASES, root

ENVS = """
environment_variables = {
    # comment
    "VLLM_USE_V2_MODEL_RUNNER": lambda: 1,
    "VLLM_PORT": lambda: 2,
    "VLLM_LOGGING_LEVEL": lambda: 3,
    "VLLM_ROCM_USE_AITER": lambda: 4,
    "VLLM_CPU_KVCACHE_SPACE": lambda: 5,
}
"""
CUDA = Hardware(platform="cuda")


@pytest.fixture
def build(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/envs.py").write_text(ENVS)
    return Build(distribution="vllm", version="0.32.0", root=str(tmp_path / "vllm"))


def kinds(environ, build, hardware=CUDA):
    return {entry.variable: entry.kind for entry in check(environ, build, hardware)}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("VLLM_USE_V2_MODEL_RUNER", "VLLM_USE_V2_MODEL_RUNNER"),
        ("VLLM_USE_V2_MODELRUNNER", "VLLM_USE_V2_MODEL_RUNNER"),
        ("VLM_USE_V2_MODEL_RUNNER", "VLLM_USE_V2_MODEL_RUNNER"),
        ("vllm_logging_level", "VLLM_LOGGING_LEVEL"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("ASCEND_RT_VISIBLE_DEVICE", "ASCEND_RT_VISIBLE_DEVICES"),
    ],
)
def test_a_misspelt_variable_is_named_with_what_was_meant(build, name, meant):
    [entry] = check({name: "1"}, build, CUDA)
    assert entry.kind == "typo" and f"did you mean {meant}?" in entry.text


def test_known_variables_and_strangers_are_left_alone(build):
    environ = {"VLLM_PORT": "8000", "VLLM_SOMETHING_OF_MY_OWN": "1", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"}
    environ |= {"NVIDIA_VISIBLE_DEVICES": "all", "HOME": "/", "OVERLAY_PLAN": "x"}
    assert check(environ, build, CUDA) == []


def test_a_removed_variable_names_its_replacement(build):
    [entry] = check({"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, build, CUDA)
    assert entry.kind == "removed" and "--attention-backend" in entry.text
    [entry] = check({"VLLM_USE_V1": "1"}, build, CUDA)
    assert "nothing takes its place" in entry.text


def test_another_vendors_variable_on_a_stock_build(build):
    [entry] = check({"VLLM_ASCEND_ENABLE_NZ": "1"}, build, CUDA)
    assert entry.kind == "vendor" and "vllm-ascend" in entry.text and "vllm 0.32.0" in entry.text
    with_plugin = Build("vllm", "0.23.0", root=build.root, plugins={"vllm-ascend": "0.23.0"})
    assert check({"VLLM_ASCEND_ENABLE_NZ": "1"}, with_plugin, CUDA) == []


def test_a_plugins_own_list_counts(build, tmp_path):
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend/envs.py").write_text('env_variables = {\n    "VLLM_ASCEND_ENABLE_NZ": lambda: 1,\n}\n')
    with_plugin = Build("vllm", "0.23.0", root=build.root, plugins={"vllm-ascend": "0.23.0"})
    assert kinds({"VLLM_ASCEND_ENABLE_NX": "1"}, with_plugin) == {"VLLM_ASCEND_ENABLE_NX": "typo"}
    assert kinds({"VLLM_ASCEND_ENABLE_NZ": "1"}, with_plugin) == {}


def test_a_variable_of_another_platform(build):
    assert kinds({"VLLM_ROCM_USE_AITER": "1"}, build) == {"VLLM_ROCM_USE_AITER": "platform"}
    assert kinds({"VLLM_ROCM_USE_AITER": "1"}, build, Hardware(platform="dcu")) == {}
    assert kinds({"VLLM_ROCM_USE_AITER": "0"}, build) == {}
    assert kinds({"VLLM_CPU_KVCACHE_SPACE": "4"}, build, Hardware()) == {}  # unknown hardware: no claim


def test_kubernetes_services_that_take_vllms_names(build):
    """A service named ``vllm``: the pod gets VLLM_PORT=tcp://..., which vLLM reads as its own port."""
    environ = {
        "VLLM_SERVICE_HOST": "10.0.0.5", "VLLM_SERVICE_PORT": "8000", "VLLM_SERVICE_PORT_HTTP": "8000",
        "VLLM_PORT": "tcp://10.0.0.5:8000", "VLLM_PORT_8000_TCP": "tcp://10.0.0.5:8000", "VLLM_PORT_8000_TCP_ADDR": "10.0.0.5",
        "VLLM_PORT_8000_TCP_PORT": "8000", "VLLM_PORT_8000_TCP_PROTO": "tcp",
    }  # fmt: skip
    [entry] = check(environ, build, CUDA)
    assert (entry.kind, entry.variable) == ("kubernetes", "VLLM_PORT") and "enableServiceLinks" in entry.text
    other = {"VLLM_QWEN_SERVICE_HOST": "10.0.0.6", "VLLM_QWEN_PORT": "tcp://10.0.0.6:80", "VLLM_QWEN_PORT_80_TCP": "tcp://10.0.0.6:80"}
    assert check(other, build, CUDA) == []
    assert kinds({"OVERLAY_SERVICE_HOST": "10.0.0.7", "OVERLAY_PORT": "tcp://10.0.0.7:1"}, build) == {
        "OVERLAY_SERVICE_HOST": "kubernetes"
    }


def test_it_changes_nothing_and_never_fails(build, tmp_path):
    environ = {"VLLM_USE_V2_MODEL_RUNER": "1"}
    assert warnings(environ, build) and environ == {"VLLM_USE_V2_MODEL_RUNER": "1"}
    assert warnings(environ, Build()) == []  # no vLLM: nothing is known, nothing is claimed
    assert warnings(environ, Build(root=str(tmp_path / "gone"))) == []


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_the_list_of_a_release_is_the_one_in_its_envs_file(release):
    if not root(release).is_dir():
        pytest.skip(f"the sources of vLLM {release} are not here")
    names = known_variables(Build(root=str(root(release))))
    assert len(names) > 200 and {"VLLM_USE_V2_MODEL_RUNNER", "VLLM_PORT", "VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES"} - {
        "CUDA_VISIBLE_DEVICES"
    } <= names


@pytest.mark.releases
def test_what_is_called_removed_was_known_to_an_older_release_and_is_gone():
    known = {release: known_variables(Build(root=str(root(release)))) for release in RELEASES if root(release).is_dir()}
    if len(known) < len(RELEASES):
        pytest.skip("the sources of the releases are not all here")
    before_all = {
        *("VLLM_USE_V1", "VLLM_ATTENTION_BACKEND", "VLLM_ALL2ALL_BACKEND", "VLLM_TORCH_PROFILER_DIR"),
        *("VLLM_FLASH_ATTN_VERSION", "VLLM_USE_TRITON_FLASH_ATTN"),
    }
    for name in REMOVED:
        assert name not in known[RELEASES[-1]], name
        assert any(name in names for names in known.values()) or name in before_all, name


def test_the_installed_releases_own_dictionary_is_what_is_read():
    pytest.importorskip("vllm")
    import vllm.envs

    assert known_variables(Build(root=vllm.__path__[0])) == set(vllm.envs.environment_variables)
