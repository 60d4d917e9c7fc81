"""The grammar of ``vllm serve`` as the installed release has it, read from its source.

Importing vLLM's own parser takes seconds and imports torch, so the launcher reads the same definitions as syntax trees:
the ``add_argument`` calls of ``EngineArgs``, ``AsyncEngineArgs``, ``FrontendArgs`` and ``make_arg_parser``, and the type
of each configuration field that they take their keywords from (the rules of ``vllm.engine.arg_utils._compute_kwargs``).
The result is cached under the files' paths, sizes and times. ``from_parser`` asks the real parser in a process of its
own: for a release that is laid out otherwise, and for the tests that hold the two against each other.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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


# --- from source ------------------------------------------------------------------------------------------------------


def from_source(root: str | Path) -> Grammar:
    """The grammar of the release whose package ``vllm`` is the folder ``root``. Raises GrammarError."""
    return _Reader(Path(root)).read()


class _Reader:
    """Reads one release's argument definitions. Trees of files are kept while it works."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kwargs: dict[tuple[Path, str], dict[str, dict[str, Any]]] = {}
        self.trees: dict[Path, ast.Module | None] = {}
        self.arguments: list[Argument] = []
        self.inverse = False

    def read(self) -> Grammar:
        flexible = self._text("utils/argparse_utils.py")
        self.inverse = "class EnableDisableAction" in flexible
        old_o = re.search(r"""f?["'](-O\.(?:mode|level))""", flexible)
        serve, found = self._make_arg_parser()
        self.arguments.append(Argument("help", ("-h", "--help"), BOOL, 0, HELP))
        for statement in ast.walk(found):
            if isinstance(statement, ast.Call) and _attribute(statement) == "add_argument":
                self._add_call(statement, {})
        for owner in ("FrontendArgs", "AsyncEngineArgs"):
            if not any(_is_add_cli_args(node, owner) for node in ast.walk(found)):
                raise GrammarError(f"{serve}: make_arg_parser no longer calls {owner}.add_cli_args")
        self._frontend(serve)
        self._engine(self.root / "engine/arg_utils.py")
        if len(self.arguments) < 50 or "compilation_config" not in {argument.dest for argument in self.arguments}:
            raise GrammarError(f"{self.root}: found only {len(self.arguments)} options in the source")
        return Grammar(
            tuple(self.arguments),
            inverse=self.inverse,
            suffixes="human_readable_int" in flexible,
            dash_o="--compilation-config" if old_o else "--optimization-level",
            source=str(self.root),
        )

    # files

    def _text(self, relative: str) -> str:
        try:
            return (self.root / relative).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GrammarError(f"{self.root / relative}: {error}") from error

    def _tree(self, path: Path) -> ast.Module | None:
        if path not in self.trees:
            try:
                self.trees[path] = ast.parse(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, SyntaxError):
                self.trees[path] = None
        return self.trees[path]

    def _need(self, path: Path) -> ast.Module:
        tree = self._tree(path)
        if tree is None:
            raise GrammarError(f"{path}: missing or no Python")
        return tree

    def _file(self, module: str) -> Path:
        """Path of ``vllm.x.y`` under the root: a module's file or a package's ``__init__``."""
        base = self.root.joinpath(*module.split(".")[1:])
        file = base.with_suffix(".py")
        return file if file.is_file() else base / "__init__.py"

    def _imported(self, path: Path, node: ast.ImportFrom) -> Path | None:
        """The file that ``from x import ...`` in the file ``path`` reads from, where it lies in the package."""
        if node.level:
            base = path.parents[node.level - 1]
            base = base.joinpath(*node.module.split(".")) if node.module else base
            file = base.with_suffix(".py")
            return file if file.is_file() else base / "__init__.py"
        return self._file(node.module) if (node.module or "").split(".")[0] == "vllm" else None  # type: ignore[arg-type]

    def _make_arg_parser(self) -> tuple[Path, ast.FunctionDef]:
        """The file and the definition of the ``make_arg_parser`` that ``vllm serve`` uses."""
        serve = self._need(self.root / "entrypoints/cli/serve.py")
        for node in serve.body:
            if isinstance(node, ast.ImportFrom) and any(alias.name == "make_arg_parser" for alias in node.names):
                path = self._file(node.module or "")
                for definition in self._need(path).body:
                    if isinstance(definition, ast.FunctionDef) and definition.name == "make_arg_parser":
                        return path, definition
        raise GrammarError(f"{self.root}/entrypoints/cli/serve.py: imports no make_arg_parser")

    # the three groups of options

    def _frontend(self, path: Path) -> None:
        """``FrontendArgs``: one option a field, with the changes of ``_customize_cli_kwargs`` in the base classes first."""
        owner = self._need(path)
        classes = self._class_chain(path, owner, "FrontendArgs")
        kwargs: dict[str, dict[str, Any]] = {}
        for file, tree, definition in classes:
            for name, annotation in _fields(definition):
                kwargs[name] = self._kwargs(file, tree, annotation, name)
        for _, _, definition in classes:
            for function in definition.body:
                if isinstance(function, ast.FunctionDef) and function.name in ("_customize_cli_kwargs", "add_cli_args"):
                    for node in ast.walk(function):
                        _customize(node, kwargs)
        for name, values in kwargs.items():
            flags = values.pop("flags", ())
            self._add((*flags, "--" + name.replace("_", "-")), values)

    def _engine(self, path: Path) -> None:
        tree = self._need(path)
        for name in ("EngineArgs", "AsyncEngineArgs"):
            definition = _class(tree, name)
            function = next(
                (n for n in definition.body if isinstance(n, ast.FunctionDef) and n.name == "add_cli_args"), None
            )
            if function is None:
                raise GrammarError(f"{path}: {name} has no add_cli_args")
            scope: dict[str, dict[str, dict[str, Any]] | dict[str, Any]] = {}
            for node in _in_order(function):
                if isinstance(node, ast.Assign):
                    self._assign(path, tree, node, scope)
                elif isinstance(node, ast.Call) and _attribute(node) == "add_argument":
                    self._add_call(node, scope)

    def _assign(self, path: Path, tree: ast.Module, node: ast.Assign, scope: dict[str, Any]) -> None:
        """``x = get_kwargs(C)``, ``x = y["field"]``, ``x["field"]["type"] = ...``; anything else has no part in the grammar."""
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name):
            if config := _get_kwargs(value):
                scope[target.id] = self._config_kwargs(path, tree, config)
            elif isinstance(value, ast.Subscript) and (config := _get_kwargs(value.value)):
                scope[target.id] = self._config_kwargs(path, tree, config).get(_constant(value.slice), {})
            elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id in scope:
                scope[target.id] = scope[value.value.id].get(_constant(value.slice), {})
        elif isinstance(target, ast.Subscript):
            inner = target.value
            if isinstance(inner, ast.Name) and inner.id in scope:
                _set(scope[inner.id], _constant(target.slice), value)
            elif isinstance(inner, ast.Subscript) and isinstance(inner.value, ast.Name) and inner.value.id in scope:
                _set(scope[inner.value.id].get(_constant(inner.slice), {}), _constant(target.slice), value)

    def _config_kwargs(self, path: Path, tree: ast.Module, config: str) -> dict[str, dict[str, Any]]:
        """field -> argparse's keywords, of one configuration class; a copy, because the caller changes them."""
        if (path, config) in self.kwargs:
            return {name: dict(values) for name, values in self.kwargs[path, config].items()}
        kwargs: dict[str, dict[str, Any]] = {}
        for file, owner, definition in self._class_chain(path, tree, config):
            for name, annotation in _fields(definition):
                kwargs[name] = self._kwargs(file, owner, annotation, name)
        self.kwargs[path, config] = {name: dict(values) for name, values in kwargs.items()}
        return kwargs

    def _class_chain(self, path: Path, tree: ast.Module, name: str) -> list[tuple[Path, ast.Module, ast.ClassDef]]:
        """The class ``name`` as seen from ``path``, its bases in this package first."""
        found = self._find(path, tree, name)
        if found is None or not isinstance(found[2], ast.ClassDef):
            raise GrammarError(f"{path}: cannot find the class {name}")
        file, owner, definition = found
        chain = []
        for base in definition.bases:
            above = self._find(file, owner, base.id) if isinstance(base, ast.Name) else None
            if above is not None and isinstance(above[2], ast.ClassDef):
                chain += self._class_chain(file, owner, base.id)  # type: ignore[attr-defined]
        return [*chain, (file, owner, definition)]

    def _find(self, path: Path, tree: ast.Module, name: str, depth: int = 0) -> tuple[Path, ast.Module, ast.AST] | None:
        """The class, or the value assigned to the alias, that ``name`` stands for in the module at ``path``."""
        for node in _top_level(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return path, tree, node
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return path, tree, node.value
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                return (path, tree, node.value) if node.value else None
            if isinstance(node, ast.ImportFrom) and depth < 8:
                for alias in node.names:
                    if (alias.asname or alias.name) == name and (file := self._imported(path, node)):
                        there = self._tree(file)
                        return self._find(file, there, alias.name, depth + 1) if there else None
        return None

    # one option

    def _kwargs(self, path: Path, tree: ast.Module, annotation: ast.expr, name: str) -> dict[str, Any]:
        """argparse's keywords for a field, by the rules of vLLM's ``_compute_kwargs`` and in its order."""
        parts = set(self._types(path, tree, annotation))
        if "dataclass" in parts:
            return {"kind": JSON}
        if parts == {"bool", "str", "None"}:
            return {"kind": STR, "nargs": "?"}
        if "bool" in parts:
            return {"kind": BOOL, "action": ON_OFF}
        if any(part.startswith("literal ") for part in parts):
            return {"kind": INT if "literal int" in parts else STR}
        for part in parts:
            if part.startswith(("tuple ", "list ", "set ")):
                _, element, count = part.split(" ")
                return {"kind": element, "nargs": "+" if count == "+" else int(count)}
        if "int" in parts:
            return {"kind": INT}
        if "float" in parts:
            return {"kind": FLOAT}
        if "dict" in parts:
            return {"kind": JSON_OR_STR if "str" in parts or "other" in parts else JSON}
        return {"kind": STR}

    def _types(self, path: Path, tree: ast.Module, node: ast.AST, depth: int = 0) -> Iterator[str]:
        """The members of a type annotation: builtin names, ``literal int``, ``list str +``, ``dataclass``, ``other``."""
        if depth > 12:
            yield "other"
        elif isinstance(node, ast.Constant):
            if node.value is None:
                yield "None"
            elif isinstance(node.value, str):
                yield from self._types(path, tree, ast.parse(node.value, mode="eval").body, depth + 1)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            yield from self._types(path, tree, node.left, depth + 1)
            yield from self._types(path, tree, node.right, depth + 1)
        elif isinstance(node, ast.Subscript):
            yield from self._generic(path, tree, node, depth)
        elif isinstance(node, ast.Name) and node.id in ("bool", "int", "float", "str", "dict"):
            yield node.id
        elif isinstance(node, ast.Name) and node.id in ("list", "set", "tuple"):
            yield f"{node.id} str +"
        elif isinstance(node, ast.Name):
            found = self._find(path, tree, node.id)
            if found is None:
                yield "other"
            elif isinstance(found[2], ast.ClassDef):
                yield _class_sort(found[2])
            else:
                yield from self._types(found[0], found[1], found[2], depth + 1)
        else:
            yield "other"

    def _generic(self, path: Path, tree: ast.Module, node: ast.Subscript, depth: int) -> Iterator[str]:
        name = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
        elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in ("Optional", "Union"):
            for element in elements:
                yield from self._types(path, tree, element, depth + 1)
            if name == "Optional":
                yield "None"
        elif name == "Annotated":
            yield from self._types(path, tree, elements[0], depth + 1)
        elif name == "Literal":
            first = elements[0]
            yield f"literal {type(first.value).__name__ if isinstance(first, ast.Constant) else 'str'}"
        elif name in ("list", "List", "set", "Set", "tuple", "Tuple", "Sequence"):
            inner = set(self._types(path, tree, elements[0], depth + 1))
            simple = {"int": INT, "float": FLOAT, "literal int": INT}
            kind = simple.get(next(iter(inner)), STR) if len(inner) == 1 else STR
            fixed = name in ("tuple", "Tuple") and not any(
                isinstance(element, ast.Constant) and element.value is Ellipsis for element in elements
            )
            yield f"{name.lower() if name != 'Sequence' else 'list'} {kind} {len(elements) if fixed else '+'}"
        elif name in ("dict", "Dict", "Mapping"):
            yield "dict"
        else:
            yield "other"

    def _add_call(self, call: ast.Call, scope: Mapping[str, Any]) -> None:
        strings = tuple(text for text in map(_constant, call.args) if isinstance(text, str))
        values: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                _spread(keyword.value, scope, values)
            else:
                _set(values, keyword.arg, keyword.value)
        if strings and strings[0].startswith("-"):
            self._add(strings, values)

    def _add(self, strings: tuple[str, ...], values: Mapping[str, Any]) -> None:
        action = values.get("action", STORE)
        nargs = 0 if action in (ON_OFF, ON, OFF, HELP) else values.get("nargs")
        longest = next((text for text in strings if text.startswith("--")), strings[0])
        dest = values.get("dest") or longest.lstrip("-").replace("-", "_")
        every = list(strings)
        if action == ON_OFF:
            every += ["--no-" + text[2:] for text in strings if text.startswith("--")]
            if self.inverse:
                every += [
                    after + text[len(before) :]
                    for text in strings
                    for before, after in (("--enable-", "--disable-"), ("--disable-", "--enable-"))
                    if text.startswith(before)
                ]
        kind = BOOL if action in (ON_OFF, ON, OFF, HELP) else values.get("kind", STR)
        self.arguments.append(Argument(dest, tuple(every), kind, nargs, action))


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

    folder = Path(cache) if cache else _user_cache()
    parts = [str(FORMAT)]
    sources = [Path(__file__), root / "utils/argparse_utils.py", root / "engine/arg_utils.py"]
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


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-overlay"


def _is_add_cli_args(node: ast.AST, owner: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and _attribute(node) == "add_cli_args"
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == owner
    )


def _get_kwargs(node: ast.AST) -> str:
    """The class in ``get_kwargs(Class)``; "" for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "get_kwargs":
        return node.args[0].id if node.args and isinstance(node.args[0], ast.Name) else ""
    return ""


def _attribute(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _constant(node: ast.AST) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise GrammarError(f"cannot find the class {name}")


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of the module that run when it is imported, those under ``if`` and ``try`` included."""
    for node in tree.body:
        yield node
        if isinstance(node, ast.If):
            if getattr(node.test, "id", getattr(node.test, "attr", "")) != "TYPE_CHECKING":
                yield from node.body
            yield from node.orelse
        elif isinstance(node, ast.Try):
            yield from node.body


def _in_order(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Assignments and calls of a function body in the order of their lines."""
    nodes = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.Call))]
    return iter(sorted(nodes, key=lambda node: (node.lineno, node.col_offset)))


def _fields(definition: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            outer = node.annotation.value if isinstance(node.annotation, ast.Subscript) else node.annotation
            if getattr(outer, "id", getattr(outer, "attr", "")) not in ("ClassVar", "InitVar"):
                yield node.target.id, node.annotation


def _class_sort(definition: ast.ClassDef) -> str:
    bases = {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in definition.bases}
    if bases & {"dict", "Dict"}:
        return "dict"
    for decorator in definition.decorator_list:
        text = ast.unparse(decorator)
        if text.split("(")[0].rpartition(".")[2] in ("config", "dataclass"):
            return "dataclass"
    return "other"


def _set(values: dict[str, Any], name: str | None, node: ast.AST) -> None:
    """Take over one argparse keyword, as far as it changes how words are read."""
    if name == "action":
        text = _constant(node) or ast.unparse(node)
        known = {"store_true": ON, "store_false": OFF, "append": APPEND, "help": HELP}
        values["action"] = known.get(text, ON_OFF if text.endswith("BooleanOptionalAction") else STORE)
    elif name in ("nargs", "dest"):
        values[name] = _constant(node)
    elif name == "flags" and isinstance(node, (ast.List, ast.Tuple)):
        values[name] = [text for text in map(_constant, node.elts) if isinstance(text, str)]
    elif name == "type":
        text = ast.unparse(node)
        if "json.loads" in text:
            values["kind"] = JSON
        elif text in ("int", "float", "str"):
            values["kind"] = text
        elif "human_readable_int" in text:
            values["kind"] = INT


def _spread(node: ast.expr, scope: Mapping[str, Any], values: dict[str, Any]) -> None:
    """``**kwargs["field"]``, ``**name`` or ``**{**kwargs["field"], "key": value}``."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        values.update(scope.get(node.value.id, {}).get(_constant(node.slice), {}))
    elif isinstance(node, ast.Name):
        values.update(scope.get(node.id, {}))
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                _spread(value, scope, values)
            else:
                _set(values, _constant(key), value)


def _customize(node: ast.AST, kwargs: dict[str, dict[str, Any]]) -> None:
    """``frontend_kwargs["field"]["key"] = value`` and ``del`` of the same."""

    def place(target: ast.AST) -> tuple[str, str] | None:
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Subscript):
            outer, inner = _constant(target.value.slice), _constant(target.slice)
            if outer in kwargs and isinstance(inner, str):
                return outer, inner
        return None

    if isinstance(node, ast.Assign) and (where := place(node.targets[0])):
        _set(kwargs[where[0]], where[1], node.value)
    elif isinstance(node, ast.Delete):
        for target in node.targets:
            if where := place(target):
                kwargs[where[0]].pop(where[1], None)
