"""The grammar of ``vllm serve`` as the installed release has it, read from its source.

Importing vLLM's own parser takes seconds and imports torch, so the launcher reads the same definitions as syntax trees
(``overlay.argument_source``). The result is cached under the files' paths, sizes and times. ``from_parser`` asks the real
parser in a process of its own: for a release that is laid out otherwise.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from overlay import folders

FORMAT = 3  # of the cache files

BOOL, INT, FLOAT, STR, JSON, JSON_OR_STR = "bool", "int", "float", "str", "json", "json or str"
# argparse actions, as far as they change how words are read
STORE, ON_OFF, ON, OFF, APPEND, HELP = "store", "on/off", "on", "off", "append", "help"


class GrammarError(Exception):
    """The release's argument definitions are not where, or not what, they were in the releases known so far."""


@dataclass(frozen=True)
class Argument:
    """One option. strings: as argparse registers them, negated forms included. nargs: as argparse has it."""

    dest: str
    strings: tuple[str, ...]
    kind: str = STR
    nargs: str | int | None = None
    action: str = STORE

    @property
    def name(self) -> str:
        """The long spelling, for messages and for adding the option to a command line."""
        return next((text for text in self.strings if text.startswith("--")), self.strings[0])


@dataclass(frozen=True)
class Grammar:
    """All options of one release, and how its ``FlexibleArgumentParser`` prepares words before argparse sees them.

    inverse: ``--enable-x`` is negated by ``--disable-x`` too (vLLM 0.33). suffixes: ``80m`` is a number in dotted values and
    JSON (vLLM 0.23). dash_o: what ``-O3`` and ``-O.mode=3`` are short for, dotted forms included.
    """

    arguments: tuple[Argument, ...] = ()
    inverse: bool = False
    suffixes: bool = True
    dash_o: str = "--optimization-level"
    source: str = ""
    by_dest: Mapping[str, Argument] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_dest", {argument.dest: argument for argument in self.arguments})

    def to_json(self) -> str:
        content = {name: value for name, value in asdict(self).items() if name != "by_dest"}
        return json.dumps({"format": FORMAT, **content})

    @classmethod
    def from_json(cls, text: str) -> Grammar:
        content = json.loads(text)
        if content.pop("format", None) != FORMAT:
            raise ValueError("another format")
        arguments = tuple(
            Argument(**{**entry, "strings": tuple(entry["strings"])}) for entry in content.pop("arguments")
        )
        return cls(arguments, **content)


# --- from the parser itself -------------------------------------------------------------------------------------------

_ASK = """
import argparse, json, sys
sys.argv = ["vllm", "serve"]
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.cli.serve import make_arg_parser
parser = make_arg_parser(FlexibleArgumentParser())
strings = {}
for text, action in parser._option_string_actions.items():
    strings.setdefault(id(action), []).append(text)
found = []
for action in parser._actions:
    if id(action) in strings:
        if isinstance(action, argparse._HelpAction): verb = "help"
        elif isinstance(action, argparse.BooleanOptionalAction): verb = "on/off"
        elif isinstance(action, argparse._StoreTrueAction): verb = "on"
        elif isinstance(action, argparse._StoreFalseAction): verb = "off"
        elif isinstance(action, argparse._AppendAction): verb = "append"
        else: verb = "store"
        sort = action.type
        while getattr(sort, "__closure__", None) and "_type" in sort.__qualname__:
            sort = next((c.cell_contents for c in sort.__closure__ if callable(c.cell_contents)), None)
        found.append([action.dest, strings[id(action)], getattr(sort, "__qualname__", ""), action.nargs, verb])
print("GRAMMAR" + json.dumps(found))
"""


def from_parser(python: str, environ: Mapping[str, str], seconds: float = 120) -> Grammar:
    """The grammar that the real parser of ``python``'s vLLM has, asked in a process of its own. Raises GrammarError.

    Takes as long as importing vLLM. The kinds of values are as good as the names of the parser's converters tell.
    """
    import subprocess

    try:
        done = subprocess.run(
            [python, "-c", _ASK], env=dict(environ), capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GrammarError(f"asking vLLM's own parser failed: {error}") from error
    line = next((line for line in done.stdout.splitlines() if line.startswith("GRAMMAR")), None)
    if line is None:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise GrammarError(f"asking vLLM's own parser failed (exit code {done.returncode}): {last[0]}")
    arguments = []
    for dest, strings, converter, nargs, action in json.loads(line[len("GRAMMAR") :]):
        kind = BOOL if action in (ON_OFF, ON, OFF, HELP) else _KINDS.get(converter.rpartition(".")[2], STR)
        arguments.append(Argument(dest, tuple(strings), kind, nargs, action))
    inverse = any(set(entry.strings) >= {"--enable-lora", "--disable-lora"} for entry in arguments)
    return Grammar(tuple(arguments), inverse=inverse, source=f"the parser of {python}")


_KINDS = {
    "int": INT,
    "human_readable_int": INT,
    "human_readable_int_or_auto": INT,
    "float": FLOAT,
    "parse_dataclass": JSON,
    "loads": JSON,
    "union_dict_and_str": JSON_OR_STR,
}


# --- kept -------------------------------------------------------------------------------------------------------------


def load(root: str | Path, cache: str | Path | None = None, python: str | None = None) -> Grammar:
    """The grammar of the release in ``root``: from the cache, else from its source, else from its parser.

    cache: folder for the result (default: ``vllm-overlay`` in the user's cache folder); a cache that cannot be written is
    done without. Raises GrammarError where neither the source nor the parser can be read.
    """
    root = Path(root)
    file = _cache_file(root, cache)
    try:
        return Grammar.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        pass
    from overlay.argument_source import from_source

    try:
        grammar = from_source(root)
    except (GrammarError, RecursionError, AttributeError, TypeError, IndexError, KeyError) as error:
        try:
            grammar = from_parser(python or sys.executable, {**os.environ, "PYTHONPATH": str(root.parent)})
        except GrammarError as second:
            raise GrammarError(f"{error}; {second}") from error
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(grammar.to_json(), encoding="utf-8")
        temporary.replace(file)
    except OSError:
        pass
    return grammar


def _cache_file(root: Path, cache: str | Path | None) -> Path:
    """The cache's file for these sources: its name changes with any of their paths, sizes and times, and with this file."""
    import hashlib

    folder = Path(cache) if cache else folders.cache()
    parts = [str(FORMAT)]
    here = Path(__file__)
    sources = [here, here.with_name("argument_source.py"), root / "utils/argparse_utils.py", root / "engine/arg_utils.py"]
    sources += [root / "entrypoints/cli/serve.py"]
    sources += [path for at in ("openai", "launchers", "common") if (path := root / f"entrypoints/{at}/cli_args.py").exists()]
    sources += sorted((root / "config").glob("*.py"))
    for path in sources:
        try:
            about = path.stat()
        except OSError:
            continue
        parts.append(f"{path}|{about.st_size}|{about.st_mtime_ns}")
    return folder / f"grammar-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:24]}.json"
