"""The source of an object as a digest that ignores comments, docstrings and layout.

Two ways lead to one digest: from a source tree, without importing anything (the launcher's plan), and from the
live object (the hooks, in every process). A function that somebody replaced at run time has the digest of the
replacement's source, so that it never passes for the original.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import linecache
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENGTH = 16  # hexadecimal digits kept: 64 bits, against accident and not against an attacker


class MissingTarget(LookupError):
    """The target does not exist in this build."""


def _tokens(node: Any) -> Iterator[str]:
    """A canonical form that does not depend on the Python version (unlike ``ast.dump``): empty fields are left out."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        body = getattr(node, "body", None)
        for name in node._fields:
            value = getattr(node, name, None)
            if value is None and not isinstance(node, ast.Constant):
                continue
            if value == [] or name in ("ctx", "type_comment", "kind"):
                continue
            if (
                name == "body"
                and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module))
                and isinstance(body, list)
                and ast.get_docstring(node, clean=False) is not None
            ):
                value = body[1:]
            yield f"{name}="
            yield from _tokens(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _tokens(item)
        yield "]"
    else:
        yield f"{type(node).__name__}:{node!r}"


def digest_of(node: ast.AST) -> str:
    """The digest of a parsed definition (or of a whole parsed module)."""
    return hashlib.sha256("\x1f".join(_tokens(node)).encode("utf-8", "surrogatepass")).hexdigest()[:LENGTH]


def _definition(lines: list[str], start: int) -> ast.AST | None:
    """The parsed definition that begins (decorators included) at index ``start``; None where that does not parse."""
    try:
        text = "".join(inspect.getblock(lines[start:]))
        if text[:1].isspace():
            text = f"if True:\n{text}"  # no dedenting: it would change the strings inside
        body = ast.parse(text).body
    except (SyntaxError, tokenize.TokenError):
        return None
    if len(body) == 1 and isinstance(body[0], ast.If):
        body = body[0].body
    wanted = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return body[0] if len(body) == 1 and isinstance(body[0], wanted) else None


def _first_decorator(lines: list[str], at: int, indent: str) -> int:
    """Index of the first decorator line above the definition at ``at``."""
    start = at
    for i in range(at - 1, -1, -1):
        line = lines[i]
        if line.startswith(f"{indent}@"):
            start = i
        elif not line.strip() or line.startswith((f"{indent} ", f"{indent})", f"{indent}#")):
            continue  # inside a decorator that spans lines, or the body of what stands above: settled below
        else:
            break
    # a body above may hold deeper lines between it and the first real decorator: accept only what parses
    return start


def _find_fast(text: str, qualname: str) -> ast.AST | None:
    """The definition of ``qualname`` without parsing the whole file; None where in doubt."""
    lines = text.splitlines(keepends=True)
    low, high, indent = 0, len(lines), ""
    parts = qualname.split(".")
    for depth, part in enumerate(parts):
        pattern = re.compile(rf"{indent}(?:async\s+def|def|class)\s+{re.escape(part)}\b")
        hits = [i for i in range(low, high) if pattern.match(lines[i])]
        if len(hits) != 1:
            return None  # absent, defined twice, or conditional: the full parse decides
        at = hits[0]
        if depth == len(parts) - 1:
            return _definition(lines, _first_decorator(lines, at, indent))
        inner = next((i for i in range(at + 1, high) if lines[i].strip() and lines[i].startswith(f"{indent}    ")), None)
        if inner is None:
            return None
        end = at + 1
        while end < high and (not lines[end].strip() or lines[end].startswith((f"{indent} ", f"{indent})", f"{indent}#"))):
            end += 1
        low, high, indent = at + 1, end, f"{indent}    "
    return None


def find_definition(text: str, qualname: str) -> ast.AST:
    """The definition (function, class, or module-level assignment) of ``qualname`` in a file's text.

    Raises MissingTarget where there is none. Where it is defined twice (branches of an ``if``), all definitions
    count: the digest covers the statement that holds them.
    """
    found = _find_fast(text, qualname)
    if found is not None:
        return found
    scope: list[ast.stmt] = ast.parse(text).body
    parts = qualname.split(".")
    for depth, part in enumerate(parts):
        hits = [node for node in scope if part in _names(node)]
        if not hits:
            raise MissingTarget(f"{qualname}: no definition of {part!r}")
        if depth == len(parts) - 1:
            return hits[0] if len(hits) == 1 else ast.Module(body=hits, type_ignores=[])
        if len(hits) != 1 or not isinstance(hits[0], ast.ClassDef):
            raise MissingTarget(f"{qualname}: {part!r} is not one class")
        scope = hits[0].body
    raise MissingTarget(qualname)


def _names(node: ast.stmt) -> set[str]:
    """The names that a statement defines in its scope."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {t.id for t in targets if isinstance(t, ast.Name)}
    if isinstance(node, (ast.If, ast.Try)):
        inner = [*node.body, *node.orelse, *getattr(node, "finalbody", [])]
        for handler in getattr(node, "handlers", []):
            inner.extend(handler.body)
        return set().union(*(_names(child) for child in inner))
    return set()


def module_file(root: str | Path, module: str) -> Path:
    """The file of ``module`` under ``root`` (the folder that holds its top package). Raises MissingTarget."""
    base = Path(root, *module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise MissingTarget(f"{module}: no such module under {root}")


def from_source(root: str | Path, module: str, qualname: str) -> str:
    """The digest of ``module:qualname`` (or of the whole module, ``qualname`` empty) in a source tree."""
    text = module_file(root, module).read_text(encoding="utf-8")
    return digest_of(find_definition(text, qualname) if qualname else ast.parse(text))


class SourceCache:
    """Digests of source trees, kept between starts under (file, size, mtime, qualname).

    A file that cannot be read or written costs time, never an error.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.changed = False
        self.known: dict[str, str] = {}
        if path is not None:
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                self.known = content if isinstance(content, dict) else {}
            except (OSError, ValueError):
                pass

    def digest(self, root: str | Path, module: str, qualname: str) -> str:
        """As ``from_source``."""
        file = module_file(root, module)
        stat = file.stat()
        key = f"{file}|{stat.st_size}|{stat.st_mtime_ns}|{qualname}"
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = from_source(root, module, qualname)
            self.changed = True
        return found

    def save(self) -> None:
        if self.path is None or not self.changed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(self.known), encoding="utf-8")
            temporary.replace(self.path)
        except OSError:
            pass


def live(owner: Any, name: str) -> Any:
    """The attribute ``name`` as ``owner``'s own dictionary (or, for a class, its bases') holds it: descriptors stay
    whole. Raises MissingTarget.
    """
    for holder in getattr(owner, "__mro__", (owner,)):
        if name in vars(holder):
            return vars(holder)[name]
    raise MissingTarget(f"{getattr(owner, '__name__', owner)} has no attribute {name!r}")


def of_live(value: Any) -> str:
    """The digest of the source of a live function, method, property or class.

    A chain of ``__wrapped__`` counts as the function's own decorators: a link more than its source has decorators
    was added at run time by somebody, and the digest says so. Raises MissingTarget where there is no source.
    """
    if isinstance(value, type):
        return _of_class(value)
    function, links = value, 0
    while True:
        if isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        elif isinstance(function, property):
            function = function.fget
        elif hasattr(function, "__wrapped__"):
            function, links = function.__wrapped__, links + 1
        elif not hasattr(function, "__code__") and hasattr(function, "fn"):
            function = function.fn  # triton's JITFunction
        else:
            break
    code = getattr(function, "__code__", None)
    if code is None:
        raise MissingTarget(f"{value!r} is not Python code")
    lines = linecache.getlines(code.co_filename)
    node = _definition(lines, code.co_firstlineno - 1) if len(lines) >= code.co_firstlineno else None
    if node is None and lines:
        node = _at_line("".join(lines), code.co_firstlineno)
    if node is None:
        raise MissingTarget(f"{code.co_filename}:{code.co_firstlineno}: no source of {code.co_name}")
    digest = digest_of(node)
    if links > len(getattr(node, "decorator_list", ())):
        return f"{digest}+wrapped"
    return digest


def _at_line(text: str, line: int) -> ast.AST | None:
    """The definition that begins at ``line``; the decorators' first line counts as its begin."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == line or node.lineno == line:
                return node
    return None


def _of_class(value: type) -> str:
    import sys

    module = sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        raise MissingTarget(f"{value!r}: no source file")
    return digest_of(find_definition("".join(linecache.getlines(file)), value.__qualname__))


def of_file(path: str | Path) -> str:
    """The digest of a whole Python file."""
    return digest_of(ast.parse(Path(path).read_text(encoding="utf-8")))
