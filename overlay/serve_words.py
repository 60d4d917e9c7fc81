"""The words of a ``vllm serve`` command line, prepared as vLLM's ``FlexibleArgumentParser`` prepares them for argparse.

Follows ``vllm/utils/argparse_utils.py`` (0.18.1 to 0.33.0) step by step: ``--model`` moves to the front, ``--config FILE`` is
put behind MODEL (``--config=FILE`` is not read, vllm#43252), underscores of option names become dashes, ``-O3`` is an
optimisation level, dotted keys are gathered into one JSON value a spelling, at the end. Each word remembers which word of the
command line it came from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlay.argument_grammar import Grammar


class Word(str):
    """A word with its origin: its place on the command line, or None. dotted: gathered from dotted keys.

    argparse takes ``--flag=value`` apart with ``split`` or ``partition``: the parts keep the origin.
    """

    origin: int | None = None
    dotted: bool = False

    @classmethod
    def of(cls, text: str, origin: int | None, dotted: bool = False) -> Word:
        word = cls(text)
        word.origin, word.dotted = origin, dotted
        return word

    def split(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [Word.of(part, self.origin, self.dotted) for part in str(self).split(*args, **kwargs)]

    def partition(self, separator: str) -> Any:
        return tuple(Word.of(part, self.origin, self.dotted) for part in str(self).partition(separator))

    def __str__(self) -> str:
        return "".join(self)


@dataclass
class Prepared:
    words: list[Word] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str = ""


def prepare(argv: Sequence[str], grammar: Grammar) -> Prepared:
    """``argv`` (behind ``serve``) as argparse gets it. What vLLM would raise on is in ``error``."""
    result = Prepared()
    words = [Word.of(text, at) for at, text in enumerate(argv)]
    try:
        words = _model_first(words)
        _named_without_model(words)
        words = _config_file(words, result)
        result.words = _dotted(_dashes(words, grammar, result), grammar)
    except ValueError as error:
        result.error = str(error)
    return result


def _model_first(words: list[Word]) -> list[Word]:
    at = next((i for i, word in enumerate(words) if re.match(r"^--model(=.+|$)", word)), None)
    if at is None:
        return words
    if words[at] != "--model":
        return [Word.of(words[at][len("--model=") :], words[at].origin), *words[:at], *words[at + 1 :]]
    if at + 1 == len(words):
        raise ValueError("--model: expected one argument")
    return [words[at + 1], *words[:at], *words[at + 2 :]]


def _named_without_model(words: list[Word]) -> None:
    """vLLM wants MODEL first where ``--served-model-name``, which takes several values, could swallow it."""
    if not words or not words[0].startswith("-") or any(re.match(r"^--config(=.+|$)", word) for word in words):
        return
    if any(re.match(r"^--served[-_]model[-_]name(=.+|$)", word) for word in words):
        raise ValueError("with --served-model-name, the model comes first: MODEL --served-model-name NAME")


def _config_file(words: list[Word], result: Prepared) -> list[Word]:
    for word in words:
        if word.startswith("--config="):
            result.warnings.append(f"vLLM does not read {word}: write --config FILE, as two words (vllm#43252)")
    if "--config" not in words:
        return words
    at = words.index("--config")
    if words.count("--config") > 1:
        raise ValueError("--config: more than one file given")
    if at + 1 == len(words):
        raise ValueError("--config: expected a file")
    added = _from_file(words[at + 1], result)
    has_model = bool(words) and not words[0].startswith("-")
    if not has_model and "--model" not in added:
        raise ValueError("no model: give it as the first word or as `model` in the --config file")
    front = 1 if has_model else 0
    return [*words[:front], *added, *words[front:at], *words[at + 2 :]]


def _from_file(file: str, result: Prepared) -> list[Word]:
    """The words that a ``--config`` file stands for."""
    path = str(file)
    if path.split(".")[-1] not in ("yaml", "yml"):
        raise ValueError(f"--config {path}: vLLM reads .yaml and .yml files only")
    try:
        content = read_yaml(Path(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: expected a table of options, found {type(content).__name__}")
    words: list[str] = []
    for key, value in content.items():
        name = f"--{key}"
        if isinstance(value, bool):
            if value:
                words.append(name)
            else:
                result.warnings.append(
                    f"--config {path}: vLLM drops `{key}: false`; give --no-{str(key).replace('_', '-')} on the command line"
                )
        elif isinstance(value, list):
            if value:
                words += [name, *map(str, value)]
        elif isinstance(value, dict):
            words += [name, json.dumps(value)]
        else:
            words += [name, str(value)]
    return [Word.of(text, None) for text in words]


_NAME = re.compile(r"(?<=--)[^\.]*")


def _dashes(words: list[Word], grammar: Grammar, result: Prepared) -> list[Word]:
    """Underscores of option names to dashes, and the short forms of ``-O``."""
    short = "--compilation-config" if grammar.dash_o == "--compilation-config" else "--optimization-level"
    done: list[Word] = []
    for at, word in enumerate(words):
        if word.startswith("--help="):
            done.append(Word.of("--help", word.origin))
        elif word.startswith("--"):
            key, equals, value = str(word).partition("=")
            key = _NAME.sub(lambda found: found[0].replace("_", "-"), key, count=1)
            done.append(Word.of(f"{key}{equals}{value}", word.origin))
        elif word.startswith("-O") and word != "-O" and (short != "--compilation-config" or word[2] != "."):
            level = word[3:] if word[2] == "=" else word[2:]
            if level.startswith("."):
                result.warnings.append(f"this release takes {word} for an optimisation level; write -cc{level}")
            done += [Word.of(short, word.origin), Word.of(level, word.origin)]
        elif word == "-O" and at + 1 < len(words) and words[at + 1] in ("0", "1", "2", "3"):
            done.append(Word.of(short, word.origin))
        else:
            done.append(word)
    return done


def _dotted(words: list[Word], grammar: Grammar) -> list[Word]:
    """Dotted keys gathered into one JSON value a spelling of the option, behind everything else."""
    gathered: dict[str, dict[str, Any]] = {}
    kept: list[Word] = []
    skip = False
    for at, word in enumerate(words):
        if skip:
            skip = False
            continue
        name, equals, value = str(word).partition("=")
        if not word.startswith("-") or "." not in (name if equals else word):
            kept.append(word)
            continue
        if not equals:
            if at + 1 == len(words):
                raise ValueError(f"{word}: expected a value")
            value, skip = str(words[at + 1]), True
        if name.endswith("+"):
            name, value = name[:-1], json.dumps(value.split(","))
        option, *keys = name.split(".")
        nested: Any = _value(value, grammar)
        for key in reversed(keys):
            nested = {key: nested}
        _update(gathered.setdefault(option, {}), nested)
    for option, table in gathered.items():
        kept += [Word.of(option, None, True), Word.of(json.dumps(table), None, True)]
    return kept


def _value(text: str, grammar: Grammar) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        if grammar.suffixes and text.lower() != "auto":
            try:
                return human_int(text)
            except ValueError:
                return text
        return text


def _update(table: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            _update(table[key], value)
        elif isinstance(value, list) and isinstance(table.get(key), list):
            table[key] += value
        else:
            table[key] = value


_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_int(text: str) -> int:
    """``1k`` is 1000, ``1K`` is 1024, ``25.6k`` is 25600, ``auto`` is -1. Raises ValueError."""
    text = text.strip()
    if text.lower() == "auto":
        return -1
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text)
    if found is None:
        return int(text)
    number, suffix = found.groups()
    return int(float(number) * _DECIMAL[suffix]) if suffix in _DECIMAL else int(number) * _BINARY[suffix]


def read_json(text: str, suffixes: bool = True) -> Any:
    """A JSON value; with ``suffixes``, bare numbers may end in k, m, g, t or K, M, G, T. Raises ValueError."""
    try:
        return json.loads(text)
    except ValueError as error:
        if not suffixes:
            raise ValueError(f"not JSON: {error}") from error
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b", lambda found: str(human_int(found[0])), parts[at])
    try:
        return json.loads("".join(parts))
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error

def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file. Raises OSError, ValueError."""
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
