"""Version strings as vendors write them, and ranges over the public part."""

import random

import pytest

from overlay.versions import in_range, parse, parse_range

REAL = [
    # raw, public, tags, vendor
    (
        "0.11.0+das.opt1.rc2.dtk2604.20260128.g0bf89b0c",
        "0.11.0",
        ("das", "opt1", "rc2", "dtk2604", "20260128", "g0bf89b0c"),
        "hygon",
    ),
    ("0.18.1+das.dtk2604", "0.18.1", ("das", "dtk2604"), "hygon"),
    ("0.21.0+das.1a2b3c4.dtk2604", "0.21.0", ("das", "1a2b3c4", "dtk2604"), "hygon"),
    ("0.18.0+empty", "0.18.0", ("empty",), ""),
    ("0.11.2.dev673+g839868462.rocm700", "0.11.2.dev673", ("g839868462", "rocm700"), "rocm"),
    ("0.32.0+cpu", "0.32.0", ("cpu",), "cpu"),
    ("0.26.0+cu129", "0.26.0", ("cu129",), "cuda"),
    ("0.19.0rc1", "0.19.0rc1", (), ""),
    ("v0.33.0", "0.33.0", (), ""),
    ("0.10.1.post1", "0.10.1.post1", (), ""),
    ("0.23.0_local", None, (), ""),
]
UNKNOWN = ["dev", "0.18.0-hotfix", "0.1.dev2922+gbb3f938cb", "0.0.0.dev0", "", "unknown", "0.18", "latest"]


@pytest.mark.parametrize(("raw", "public", "tags", "vendor"), REAL)
def test_real_version_strings(raw, public, tags, vendor):
    version = parse(raw)
    assert (version.public, version.tags, version.vendor) == (public, tags, vendor)


@pytest.mark.parametrize("raw", UNKNOWN[:6])
def test_what_names_no_release_is_unknown_with_a_reason(raw):
    version = parse(raw)
    assert version.public is None and version.unknown
    assert in_range(version.public, ">=0.18.1,<0.34") is None


def test_rc_in_the_local_part_is_no_prerelease():
    assert in_range(parse("0.11.0+das.opt1.rc2.dtk2604.20260128.g0bf89b0c").public, ">=0.11.0") is True
    assert in_range(parse("0.19.0rc2").public, ">=0.19.0") is False


def test_dev_of_the_next_release_is_neither_release():
    public = parse("0.19.0.dev12+gabc").public
    assert in_range(public, ">=0.19.0") is False
    assert in_range(public, "<0.19.0") is False
    assert in_range(public, "==0.19.0") is False
    assert in_range(public, ">=0.18.1,<0.20") is True


def test_an_empty_range_holds_for_everything():
    assert in_range("0.18.1", "") is True
    assert in_range(None, "") is True


@pytest.mark.parametrize("spec", ["0.18", "=>0.18", ">=0.18 <0.19", ">=abc", ">=0.18+cpu", ">=0.18.*", ">=0.18,,<0.19"])
def test_a_range_that_cannot_be_read_is_an_error_naming_it(spec):
    with pytest.raises(ValueError, match="version range"):
        parse_range(spec)


def test_agrees_with_packaging_on_random_versions_and_ranges():
    """PEP 440 as ``packaging`` has it, over versions and ranges like those of vLLM."""
    specifiers = pytest.importorskip("packaging.specifiers")
    rng = random.Random(7)
    versions = [
        f"{rng.choice([0, 0, 1])}.{rng.randrange(3)}.{rng.randrange(3)}"
        + rng.choice(["", "", "", "a1", "rc1.dev2", "rc0", "rc2", ".post0", ".post1", f".dev{rng.randrange(9)}"])
        for _ in range(300)
    ]
    operators = [">=", "<=", ">", "<", "==", "!="]
    compared = 0
    for _ in range(3000):
        clauses = [rng.choice(operators) + rng.choice(versions) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.2:
            clauses.append(rng.choice(["==", "!="]) + f"0.{rng.randrange(3)}.*")
        spec, version = ",".join(clauses), rng.choice(versions)
        if parse(version).public is None:
            continue
        expected = specifiers.SpecifierSet(spec, prereleases=True).contains(version)
        assert in_range(parse(version).public, spec) is expected, (version, spec)
        compared += 1
    assert compared > 2500
