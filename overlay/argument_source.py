"""The options of ``vllm serve``, read from a release's source as syntax trees.

Read are the ``add_argument`` calls of ``EngineArgs``, ``AsyncEngineArgs``, ``FrontendArgs`` and ``make_arg_parser``, and the
type of each configuration field that they take their keywords from, by the rules of
``vllm.engine.arg_utils._compute_kwargs``. The tests hold the result against the real parsers of six releases.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
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
    STORE,
    STR,
    Argument,
    Grammar,
    GrammarError,
)


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
