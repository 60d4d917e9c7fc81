"""A facts file: read back as written, and every mistake named with file, key and what was expected."""

import json

import pytest

from overlay.facts import Build, Facts, FactsError, Hardware, Model, Serving, load_facts


def load(tmp_path, text, name="facts.yaml"):
    file = tmp_path / name
    file.write_text(text)
    return load_facts(file)


def test_what_was_written_is_read_back(tmp_path):
    facts = Facts(
        build=Build(distribution="vllm", version="0.18.1+das.dtk2604", public="0.18.1", local="das.dtk2604", vendor="hygon",
                    tags=("das", "dtk2604"), plugins={"vllm_hcu": "1"}, entry_points={"vllm.general_plugins": ("a = b",)}),
        hardware=Hardware(platform="dcu", arch="gfx936", count=1, mig=False, features=("x",)),
        model=Model(architectures=("A",), moe=False, hidden_size=8),
        serving=Serving(runner="V1", tensor_parallel=1, cudagraph_capture_sizes=(1, 2), lora=False),
        env={"VLLM_X": "1"},
    )  # fmt: skip
    for name, text in (("f.json", json.dumps(facts.to_dict())), ("f.yaml", json.dumps(facts.to_dict()))):
        again = load(tmp_path, text, name)
        for section in ("build", "hardware", "model", "serving", "env"):
            assert getattr(again, section) == getattr(facts, section)


def test_what_is_left_out_is_unknown_and_not_a_default(tmp_path):
    facts = load(tmp_path, "hardware: {platform: dcu}\n")
    assert facts.hardware.platform == "dcu" and facts.hardware.arch is None
    assert "not given in" in facts.why_unknown("hardware.arch")
    assert facts.serving.speculative_method is None  # not "": that would claim that speculation is off
    assert facts.serving.num_speculative_tokens is None
    assert "not given in" in facts.why_unknown("serving.lora")


def test_the_public_version_and_the_vendor_come_from_the_version(tmp_path):
    build = load(tmp_path, "build: {version: 0.18.1+das.dtk2604}\n").build
    assert (build.public, build.local, build.vendor, build.tags) == ("0.18.1", "das.dtk2604", "hygon", ("das", "dtk2604"))
    facts = load(tmp_path, "build: {version: dev}\n")
    assert facts.build.public is None and "'dev' is not a version" in facts.why_unknown("build.public")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hardwar: {}", "hardwar: no such section; did you mean hardware?"),
        ("hardware: {platfrom: dcu}", "hardware.platfrom: no such fact; did you mean platform?"),
        ("hardware: {zzz: 1}", "hardware.zzz: no such fact (there are platform"),
        ("hardware: {count: many}", "hardware.count: expected a whole number, found the text 'many'"),
        ("hardware: {count: true}", "hardware.count: expected a whole number, found the truth value True"),
        ("hardware: {mig: 1}", "hardware.mig: expected true or false, found the number 1"),
        ("serving: {lora: 'no'}", "serving.lora: expected true or false, found the text 'no'"),
        ("build: {version: 0.18}", "build.version: expected a text, found the number 0.18 (put it into quotes"),
        ("model: {architectures: LlamaForCausalLM}", "model.architectures: expected a list of texts"),
        ("model: {architectures: [1]}", "model.architectures: expected a list of texts"),
        ("serving: {cudagraph_capture_sizes: [a]}", "serving.cudagraph_capture_sizes: expected a list of whole numbers"),
        ("build: {plugins: {vllm_hcu: 1.5}}", "build.plugins.vllm_hcu: expected a text (in quotes), found the number"),
        ("hardware: [1]", "hardware: expected a table, found the list"),
        ("env: {A: 1}", "env.A: expected a text (in quotes), found the number"),
        ("- a", "expected a table with build, hardware, model, serving"),
        ("hardware: {a", "no YAML"),
        ("build: {tags: null}", "build.tags: expected a list of texts, found nothing"),
    ],
)
def test_a_mistake_names_file_key_and_what_was_expected(tmp_path, text, said):
    with pytest.raises(FactsError) as error:
        load(tmp_path, text)
    assert said in str(error.value) and "facts.yaml" in str(error.value) and "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FactsError, match="no-such.yaml: cannot read the facts file: No such file"):
        load_facts(tmp_path / "no-such.yaml")
    with pytest.raises(FactsError, match="no JSON"):
        load(tmp_path, "a: 1", "facts.json")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FactsError, match="cannot read"):
        load_facts(tmp_path / "binary.yaml")
