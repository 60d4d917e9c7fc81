"""Reading and extending vLLM's own command line without overwriting the user's.

``ServeArgs.parse`` reads the words behind ``vllm serve`` as the installed release would: the preparation that its
``FlexibleArgumentParser`` does (``--config`` files, underscores, ``-O3``, dotted keys, list appends), then argparse over the
release's own options (``overlay.argument_grammar``). ``get`` gives the user's values, ``merge`` adds ours at the leaves that
the user left free, in a form that vLLM reads as exactly that.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlay.argument_grammar import (
    APPEND,
    BOOL,
    FLOAT,
    HELP,
    INT,
    JSON,
    JSON_OR_STR,
    OFF,
    ON,
    ON_OFF,
    STR,
    Argument,
    Grammar,
)
from overlay.serve_words import Word, human_int, prepare, read_json


class _Missing:
    """The value of a path that the user has not set."""

    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False


MISSING: Any = _Missing()

# Leaves of vLLM's configuration that an option of its own sets as well; vLLM refuses the two together.
SAME = {
    "compilation_config.cudagraph_capture_sizes": "cudagraph_capture_sizes",
    "compilation_config.max_cudagraph_capture_size": "max_cudagraph_capture_size",
    "speculative_config.method": "spec_method",
    "speculative_config.model": "spec_model",
    "speculative_config.num_speculative_tokens": "spec_tokens",
    "attention_config.backend": "attention_backend",
    "kernel_config.moe_backend": "moe_backend",
    "kernel_config.linear_backend": "linear_backend",
}
_SAME_BACK = {option: leaf for leaf, option in SAME.items()}


@dataclass(frozen=True)
class Kept:
    """A leaf at which the user's value stands. path: dotted. wanted: ours. found: theirs. reason: why it was not changed."""

    path: str
    wanted: Any
    found: Any
    reason: str = "set by the user"


@dataclass(frozen=True)
class _Given:
    """One occurrence of an option. option: its spelling. values: the words of its value; none for flags."""

    argument: Argument
    option: str
    values: tuple[str, ...]


class _Refused(Exception):
    pass


class _Plain(argparse.HelpFormatter):
    """argparse makes a formatter for every option that is added, to check its help; there is none here, and 300 options."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        pass

    def _format_args(self, action: argparse.Action, default_metavar: str | None) -> str:
        return ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise _Refused(message)


@dataclass(frozen=True)
class ServeArgs:
    """What stands behind ``vllm serve``, read as one release reads it.

    argv: the words as given. model: MODEL, by position, ``--model`` or ``--config`` file; None where there is none.
    values: option (``dest``) -> the user's value. unrecognised: words that this release would refuse. error: why it would
    refuse the command line, or "". help: whether ``--help`` is among them. warnings: where vLLM reads something else than the
    user may think.
    """

    argv: tuple[str, ...]
    grammar: Grammar
    model: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    unrecognised: tuple[str, ...] = ()
    error: str = ""
    help: bool = False
    warnings: tuple[str, ...] = ()
    _given: tuple[_Given, ...] = ()

    @classmethod
    def parse(cls, argv: Iterable[str], grammar: Grammar) -> ServeArgs:
        """Read ``argv``, everything behind ``serve``. Never raises for what the user wrote: see ``error``."""
        words = tuple(argv)
        prepared = prepare(words, grammar)
        given: list[_Given] = []
        positional: list[str] = []
        extra: list[str] = []
        error = prepared.error
        if not error:
            try:
                extra = _argparse(prepared.words, grammar, given, positional)
            except _Refused as refused:
                error = str(refused)
        values, problems = _values(given, grammar)
        tag = positional[0] if positional else None
        model = str(tag) if tag is not None else values.get("model")
        return cls(
            argv=words,
            grammar=grammar,
            model=model,
            values=values,
            unrecognised=tuple(map(str, extra)),
            error=error or (f"unrecognized arguments: {' '.join(extra)}" if extra else ""),
            help=any(entry.argument.action == HELP for entry in given),
            warnings=(*prepared.warnings, *_lost(given), *problems),
            _given=tuple(given),
        )

    def get(self, path: str) -> Any:
        """The user's value at a dotted path (``"compilation_config.cudagraph_capture_sizes"``), or MISSING.

        A value that an option of its own sets (``--cudagraph-capture-sizes``, ``--spec-tokens``) is found under both names.
        """
        value = self._at(path)
        if value is MISSING and path in SAME:
            value = self._at(SAME[path])
        if value is MISSING and path in _SAME_BACK:
            value = self._at(_SAME_BACK[path])
        return value

    def _at(self, path: str) -> Any:
        value: Any = self.values
        for part in path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return MISSING
            value = value[part]
        return value

    def merge(self, additions: Mapping[str, Any]) -> tuple[list[str], list[Kept]]:
        """Add values at dotted paths; the user's own leaves stand.

        Returns the new words and the leaves at which the user's other value was kept. A path whose option this release
        does not have, or that cannot be added without changing what vLLM reads elsewhere, is kept out with its reason.
        """
        kept: list[Kept] = []
        wanted: dict[str, dict[tuple[str, ...], Any]] = {}
        for path, value in additions.items():
            for leaf, ours in _leaves(path, value):
                if (reason := self._keep(leaf, ours)) is None:
                    dest, *keys = leaf.split(".")
                    wanted.setdefault(dest, {})[tuple(keys)] = ours
                elif reason.reason:
                    kept.append(reason)
        words, expected = list(self.argv), copy.deepcopy(dict(self.values))
        for dest, leaves in wanted.items():
            words = self._extend(words, dest, leaves)
            for keys, value in leaves.items():
                _put(expected, (dest, *keys), value)
        if wanted:
            again = ServeArgs.parse(words, self.grammar)
            if again.error or again.model != self.model or dict(again.values) != expected:
                reason = "cannot be added without changing what vLLM reads" + (f" ({again.error})" if again.error else "")
                refused = {".".join((dest, *keys)): value for dest, leaves in wanted.items() for keys, value in leaves.items()}
                return list(self.argv), kept + [Kept(path, value, self.get(path), reason) for path, value in refused.items()]
        return words, kept

    def _keep(self, leaf: str, ours: Any) -> Kept | None:
        """Why ``leaf`` must not be set to ``ours``; None where it may be; an empty reason where it is so already."""
        dest, *keys = leaf.split(".")
        found = self.get(leaf)
        if self.error:
            return Kept(leaf, ours, found, f"vLLM will refuse this command line: {self.error}")
        argument = self.grammar.by_dest.get(dest)
        if argument is None:
            return Kept(leaf, ours, found, f"this release has no option --{dest.replace('_', '-')}")
        if found is not MISSING:
            return Kept(leaf, ours, found, "" if _equal(found, ours) else "set by the user")
        for depth in range(1, len(keys) + 1):  # something that is no table stands above the leaf
            above = self._at(".".join((dest, *keys[: depth - 1])))
            if above is not MISSING and not isinstance(above, Mapping):
                return Kept(leaf, ours, above, f"the user set {'.'.join((dest, *keys[: depth - 1]))} as a whole")
        if keys and argument.kind not in (JSON, JSON_OR_STR):
            return Kept(leaf, ours, found, f"{argument.name} takes no keys in this release")
        if argument.action == ON and ours is False:
            return Kept(leaf, ours, found, "")
        return None

    def _extend(self, words: list[str], dest: str, leaves: Mapping[tuple[str, ...], Any]) -> list[str]:
        """``words`` with the leaves of one option added. None of them is set by the user."""
        argument = self.grammar.by_dest[dest]
        if () in leaves:
            return _insert(words, _spell(argument, leaves[()]))
        last = next((entry for entry in reversed(self._given) if entry.argument.dest == dest), None)
        if last is None:
            value: dict[str, Any] = {}
            for keys, leaf in leaves.items():
                _put(value, keys, leaf)
            return _insert(words, [argument.name, json.dumps(value)])
        word = last.values[0]
        if isinstance(word, Word) and word.dotted:  # vLLM gathers dotted keys of one spelling: join them
            added = [(f"{last.option}.{'.'.join(keys)}", json.dumps(leaf)) for keys, leaf in leaves.items()]
            return _insert(words, [text for pair in added for text in pair])
        value = copy.deepcopy(dict(self.values[dest]))
        for keys, leaf in leaves.items():
            _put(value, keys, leaf)
        if isinstance(word, Word) and word.origin is not None:  # the user's own JSON: complete it where it stands
            at = word.origin
            before = self.argv[at][: len(self.argv[at]) - len(word)]
            return [*words[:at], before + json.dumps(value), *words[at + 1 :]]
        return _insert(words, [argument.name, json.dumps(value)])  # from a --config file: a flag with all of it comes later


class _Sink:
    """Where the actions of a parser put what they are given."""

    def __init__(self) -> None:
        self.given: list[_Given] = []
        self.positional: list[str] = []


def _argparse(words: Sequence[str], grammar: Grammar, given: list[_Given], positional: list[str]) -> list[str]:
    """Let argparse take ``words`` apart by the release's options. Returns the words it does not recognise."""
    parser, sink = _parser(grammar)
    sink.given, sink.positional = given, positional
    return parser.parse_known_args(list(words))[1]


_built: dict[int, tuple[Grammar, _Parser, _Sink]] = {}


def _parser(grammar: Grammar) -> tuple[_Parser, _Sink]:
    """A parser of the release's options; kept, because building one takes longer than using it."""
    if id(grammar) not in _built:
        sink = _Sink()
        parser = _Parser(prog="vllm serve", add_help=False, formatter_class=_Plain)
        parser.add_argument("model_tag", nargs="?", action=_position(sink))
        for argument in grammar.arguments:
            action = _recorder(argument, sink)
            parser.add_argument(*argument.strings, dest=argument.dest, nargs=argument.nargs, action=action)
        _built[id(grammar)] = (grammar, parser, sink)
    _, parser, sink = _built[id(grammar)]
    return parser, sink


def _recorder(argument: Argument, sink: _Sink) -> type[argparse.Action]:
    class Record(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            if values is None or values == []:
                taken: tuple[str, ...] = ()
            else:
                taken = tuple(values) if isinstance(values, list) else (values,)
            sink.given.append(_Given(argument, option_string or "", taken))

    return Record


def _position(sink: _Sink) -> type[argparse.Action]:
    class Position(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            if values is not None:
                sink.positional.append(values)

    return Position


def _values(given: Iterable[_Given], grammar: Grammar) -> tuple[dict[str, Any], list[str]]:
    """dest -> the value that vLLM takes from these occurrences (the last one wins), and what could not be read."""
    values: dict[str, Any] = {}
    problems = []
    for entry in given:
        argument = entry.argument
        if argument.action == HELP:
            continue
        if argument.action in (ON_OFF, ON, OFF):
            values[argument.dest] = _flag(argument, entry.option)
            continue
        try:
            taken = [convert(word, argument.kind, grammar.suffixes) for word in entry.values]
        except ValueError as error:
            problems.append(f"argument {argument.name}: {error}")
            taken = [str(word) for word in entry.values]
        if argument.action == APPEND:
            values[argument.dest] = [*values.get(argument.dest, []), *taken]
        elif argument.nargs == "?":
            values[argument.dest] = taken[0] if taken else True
        elif argument.nargs is None:
            values[argument.dest] = taken[0]
        else:
            values[argument.dest] = taken
    return values, problems


def _flag(argument: Argument, option: str) -> bool:
    if argument.action in (ON, OFF):
        return argument.action == ON
    return option in positive(argument)


def positive(argument: Argument) -> tuple[str, ...]:
    """The spellings of an on/off option that switch it on: those with a ``--no-`` form, and the short ones."""
    return tuple(
        text
        for text in argument.strings
        if not text.startswith("--") or (not text.startswith("--no-") and "--no-" + text[2:] in argument.strings)
    )


def convert(word: str, kind: str, suffixes: bool = True) -> Any:
    """One word as vLLM's converter of that kind reads it. Raises ValueError where it would refuse."""
    text = str(word)
    if kind in (STR, BOOL):
        return text
    if text in ("", "None"):
        return None
    if kind == INT:
        return human_int(text)  # every release reads 32k here; suffixes are about dotted keys and JSON
    if kind == FLOAT:
        return float(text)
    if kind == JSON or (kind == JSON_OR_STR and re.fullmatch(r"(?s)\s*{.*}\s*", text)):
        return read_json(text, suffixes)
    return text


def _lost(given: Sequence[_Given]) -> list[str]:
    """Whole values that vLLM drops because a later spelling of the same option replaces them."""
    said = []
    for at, entry in enumerate(given):
        later = next((other for other in given[at + 1 :] if other.argument is entry.argument), None)
        if later is not None and entry.argument.kind in (JSON, JSON_OR_STR) and entry.values and later.values:
            said.append(
                f"vLLM drops {entry.option} {entry.values[0]}: {later.option}"
                f"{' with dotted keys' if getattr(later.values[0], 'dotted', False) else ''} replaces it as a whole"
            )
    return said


def _leaves(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield path, value


def _put(table: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        table = table.setdefault(key, {})
    table[keys[-1]] = value


def _equal(theirs: Any, ours: Any) -> bool:
    return theirs == ours and isinstance(theirs, bool) == isinstance(ours, bool)


def _spell(argument: Argument, value: Any) -> list[str]:
    """The words that set an option without keys to ``value``."""
    if argument.action in (ON_OFF, ON, OFF):
        if argument.action == ON_OFF and not value:
            return ["--no-" + positive(argument)[0][2:]]
        return [argument.name]
    if argument.kind in (JSON, JSON_OR_STR) and not isinstance(value, str):
        return [argument.name, json.dumps(value)]
    if isinstance(value, (list, tuple)):
        if argument.action == APPEND:
            return [word for entry in value for word in (argument.name, str(entry))]
        return [argument.name, *map(str, value)]
    text = str(value)
    return [f"{argument.name}={text}"] if text.startswith("-") else [argument.name, text]


def _insert(words: Sequence[str], added: Sequence[str]) -> list[str]:
    """``added`` at the end, in front of a ``--`` behind which argparse sees positions only."""
    at = words.index("--") if "--" in words else len(words)
    return [*words[:at], *added, *words[at:]]
