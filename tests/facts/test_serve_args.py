"""``ServeArgs`` against the real parsers of six releases.

The answers in ``data/parser-RELEASE.json`` were given by the releases' own ``vllm serve`` parsers (``record_parsers.py``): to
every line of the corpus, and to every line that ``merge`` made of it. So a merged line that was never put to the real parser
fails.
"""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from overlay.argument_grammar import APPEND, JSON, JSON_OR_STR, Grammar
from overlay.argument_source import from_source
from overlay.serve_args import MISSING, ServeArgs
from tests.facts.corpus import ADDITIONS, LINES
from tests.support import CACHE

DATA = Path(__file__).parent / "data"
RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")
# The converters of these are not looked into: what the real parser makes of the word is another object.
OPAQUE = {"lora_modules", "device_ids", "reasoning_parser", "optimization_level", "gdn_prefill_backend"}


@cache
def recorded(release: str) -> dict:
    return json.loads((DATA / f"parser-{release}.json").read_text())


@cache
def answers(release: str) -> dict[tuple[str, ...], dict]:
    return {tuple(entry["words"]): entry for entry in recorded(release)["answers"]}


@cache
def grammar(release: str) -> Grammar:
    return Grammar.from_json((DATA / f"grammar-{release}.json").read_text())


@pytest.fixture(autouse=True)
def beside_the_config_files(monkeypatch):
    monkeypatch.chdir(DATA / "serve")


def answer(release: str, words: list[str]) -> dict:
    found = answers(release).get(tuple(words))
    assert found is not None, f"the real parser of {release} was never asked about {words}: run record_parsers.py"
    return found


def said(release: str, words: list[str]) -> dict:
    """The values that the real parser takes from ``words``, those without a default's included."""
    return {**recorded(release)["defaults"], **answer(release, words)["values"]}


def compare(release: str, args: ServeArgs) -> None:
    """Every value of ``args`` is what the real parser reads, and what ``args`` has no value for is at its default."""
    real = said(release, list(args.argv))
    given = answer(release, list(args.argv))["values"]
    defaults = recorded(release)["defaults"]
    for dest, value in args.values.items():
        if dest in OPAQUE:
            continue
        assert plain(value) == real[dest], (dest, value, real[dest])
    untouched = set(given) - set(args.values) - {"model_tag"}
    assert not untouched, {dest: (given[dest], defaults[dest]) for dest in untouched}
    model = real["model_tag"] if real["model_tag"] is not None else args.values.get("model")
    assert args.model == model


def plain(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", LINES)
def test_reads_a_line_as_the_real_parser_does(release, name):
    args = ServeArgs.parse(LINES[name], grammar(release))
    real = answer(release, LINES[name])
    if "error" in real:  # a value that only the option's own converter refuses is vLLM's to refuse
        assert args.error or re.search(r"argument --?[\w-]+|pydantic", real["error"][0]), real["error"]
    else:
        assert not args.error
        compare(release, args)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("added", ADDITIONS)
def test_merged_lines_give_the_real_parser_what_the_merge_says(release, added):
    """Ours at every leaf that the user left free, the user's at every other, and nothing else moved."""
    checked = 0
    for name, line in LINES.items():
        before = ServeArgs.parse(line, grammar(release))
        words, kept = before.merge(ADDITIONS[added])
        if before.error:
            assert words == line and len(kept) >= len(ADDITIONS[added]), name
        elif "error" not in answer(release, line):
            check_merge(release, name, before, words, kept, ADDITIONS[added])
            checked += 1
    assert checked > 40


def check_merge(release, name, before, words, kept, added):
    real, stock = said(release, words), said(release, list(before.argv))
    compare(release, ServeArgs.parse(words, grammar(release)))
    # vLLM takes --served-model-name only behind a leading MODEL; nothing else in the corpus stands in a merge's way
    assert not [e for e in kept if "cannot be added" in e.reason and "--served-model-name" not in e.reason], (name, kept)
    keeping = {entry.path for entry in kept}
    for path, ours in leaves(added):
        if path in keeping:
            assert at(real, path) == at(stock, path), (name, path, words)
        else:
            assert at(real, path) == ours, (name, path, words)
    for path, theirs in leaves(before.values):
        assert at(real, path) == at(stock, path), (name, path, theirs, words)
    changed = {dest for dest in real if real[dest] != stock[dest]}
    assert changed <= {path.partition(".")[0] for path, _ in leaves(added)}, (name, words)


def leaves(table, prefix=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def at(values, path):
    """The value at a dotted path; None where it is not set."""
    for part in path.split("."):
        if not isinstance(values, dict) or part not in values:
            return None
        values = values[part]
    return values


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_grammar_is_the_real_parsers(release):
    real = recorded(release)["grammar"]
    mine = grammar(release).by_dest
    assert set(real) == set(mine)
    for dest, argument in mine.items():
        found = {"strings": sorted(argument.strings), "nargs": argument.nargs, "action": argument.action}
        assert found == real[dest], dest


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_source_gives_the_recorded_grammar(release):
    root = CACHE / "src" / f"vllm-{release}" / "vllm"
    if not root.is_dir():
        pytest.skip(f"the sources of vLLM {release} are not here")
    assert from_source(root).arguments == grammar(release).arguments


def test_installed_release_is_read_like_its_own_parser():
    """The grammar from the source of the installed vLLM has every option that its own parser has, and no other."""
    vllm = pytest.importorskip("vllm")
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    real = make_arg_parser(FlexibleArgumentParser())
    mine = from_source(Path(vllm.__file__).parent)
    strings = dict(real._option_string_actions)
    assert set(strings) == {text for argument in mine.arguments for text in argument.strings}
    for argument in mine.arguments:
        for text in argument.strings:
            assert strings[text].dest == argument.dest
            assert strings[text].nargs == argument.nargs


# --- what get and merge promise, whatever the release ------------------------------------------------------------------


@pytest.fixture
def parse():
    return lambda *words: ServeArgs.parse(words, grammar("0.32.0"))


def test_get_finds_a_leaf_under_either_of_its_names(parse):
    assert parse("m", "--cudagraph-capture-sizes", "1", "2").get("compilation_config.cudagraph_capture_sizes") == [1, 2]
    assert parse("m", "-cc.cudagraph_capture_sizes=[1,2]").get("cudagraph_capture_sizes") == [1, 2]
    assert parse("m", "--spec-tokens", "3").get("speculative_config.num_speculative_tokens") == 3
    assert parse("m").get("speculative_config.method") is MISSING


def test_users_sizes_stand_in_every_spelling(parse):
    for words in (
        ["--cudagraph-capture-sizes", "1", "2"],
        ["--compilation-config", '{"cudagraph_capture_sizes": [1, 2]}'],
        ['--compilation_config={"cudagraph_capture_sizes": [1, 2]}'],
        ["-cc.cudagraph_capture_sizes", "[1, 2]"],
        ["--compilation-config.cudagraph_capture_sizes+=1"],
        ["-cc", '{"cudagraph_capture_sizes": [1, 2]}'],
    ):
        merged, kept = parse("m", *words).merge({"compilation_config.cudagraph_capture_sizes": [4]})
        assert merged == ["m", *words]
        assert [entry.path for entry in kept] == ["compilation_config.cudagraph_capture_sizes"]


def test_an_equal_value_is_no_conflict(parse):
    words, kept = parse("m", "--max-num-seqs", "8").merge({"max_num_seqs": 8})
    assert words == ["m", "--max-num-seqs", "8"] and kept == []


def test_json_of_the_user_is_completed_where_it_stands(parse):
    words, _ = parse("m", '-cc={"mode": 3}', "--seed", "1").merge({"compilation_config.cudagraph_mode": "NONE"})
    assert words == ["m", '-cc={"mode": 3, "cudagraph_mode": "NONE"}', "--seed", "1"]
    assert sum(word.startswith(("-cc", "--compilation")) for word in words) == 1


def test_dotted_keys_are_joined_in_their_own_spelling(parse):
    words, _ = parse("m", "-cc.mode", "3").merge({"compilation_config.cudagraph_mode": "NONE"})
    assert words == ["m", "-cc.mode", "3", "-cc.cudagraph_mode", '"NONE"']


def test_what_vllm_drops_is_said(parse):
    [line] = parse("m", "-cc", '{"cudagraph_capture_sizes": [1]}', "-cc.mode", "3").warnings
    assert "drops -cc" in line and "dotted keys" in line
    [line] = parse("m", "--config=flat.yaml").warnings
    assert "as two words" in line
    [line] = parse("m", "--config", "flat.yaml").warnings
    assert "enable-prefix-caching: false" in line and "--no-enable-prefix-caching" in line
    [line] = parse("m", "-O.mode=3").warnings
    assert "-cc.mode=3" in line


def test_an_option_that_the_release_lacks_is_kept_out(parse):
    words, kept = parse("m").merge({"no_such_option": 1, "max_num_seqs": 4})
    assert words == ["m", "--max-num-seqs", "4"]
    assert kept[0].path == "no_such_option" and "no option --no-such-option" in kept[0].reason


def test_additions_stay_in_front_of_a_double_dash(parse):
    words, _ = parse("--seed", "1", "--", "m").merge({"max_num_seqs": 4})
    assert words == ["--seed", "1", "--max-num-seqs", "4", "--", "m"]
    assert ServeArgs.parse(words, grammar("0.32.0")).model == "m"


def test_every_json_option_takes_keys_in_every_release():
    for release in RELEASES:
        for name in ("compilation_config", "speculative_config", "kv_transfer_config", "additional_config", "hf_overrides"):
            argument = grammar(release).by_dest[name]
            assert argument.kind in (JSON, JSON_OR_STR) and argument.action != APPEND
