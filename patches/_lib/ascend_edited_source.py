"""A function made again from its own source with one statement replaced.

For bodies in which the inefficient statement has no name to wrap. The original is fingerprinted, so that the statement
is known; it must be found exactly once all the same, or nothing is made.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any


class AnchorMissing(Exception):
    """A statement or expression to replace does not occur exactly as often as expected."""


class _Replace(ast.NodeTransformer):
    def __init__(self, old: str, new: str, kind: type) -> None:
        self.old = ast.dump(ast.parse(old).body[0] if kind is ast.stmt else ast.parse(old, mode="eval").body)
        self.new, self.kind, self.hits = new, kind, 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, self.kind) and ast.dump(node) == self.old:
            self.hits += 1
            if self.kind is ast.stmt:
                made: Any = ast.parse(textwrap.dedent(self.new)).body
            else:
                made = ast.parse(self.new, mode="eval").body
            for part in made if isinstance(made, list) else [made]:
                for inner in ast.walk(part):
                    ast.copy_location(inner, node)
            return made
        return self.generic_visit(node)


def edited(
    function: Callable[..., Any],
    *,
    statements: Mapping[str, str] | None = None,
    expressions: Mapping[str, str] | None = None,
    times: int | Mapping[str, int] = 1,
    names: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """``function`` again, with each key of ``statements`` (source text) replaced by its value, and of ``expressions``.

    times: how often each key must occur, or those keys that occur more than once. names: objects that the new text
    refers to; they are bound in a closure, so that the function's module gains nothing. Everything else resolves in
    the function's own module as before, and line numbers stay the original's. Raises AnchorMissing, also for a
    function that wraps another: its source would be the inner one's, and what wraps it would be lost.
    """
    if hasattr(function, "__wrapped__"):
        raise AnchorMissing(f"{function.__qualname__} wraps another function: edit it before anything wraps it")
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None  # annotations need not resolve a second time
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    for kind, edits in ((ast.stmt, statements), (ast.expr, expressions)):
        for old, new in (edits or {}).items():
            change = _Replace(old, new, kind)
            definition = change.visit(definition)
            wanted = times if isinstance(times, int) else times.get(old, 1)
            if change.hits != wanted:
                raise AnchorMissing(f"{function.__qualname__}: {old!r} occurs {change.hits} times, expected {wanted}")
    names = dict(names or {})
    factory = ast.parse(f"def _factory({', '.join(names)}):\n    pass").body[0]
    assert isinstance(factory, ast.FunctionDef)
    factory.body = [definition, ast.parse(f"return {definition.name}").body[0]]
    module = ast.Module(body=[factory], type_ignores=[])
    ast.increment_lineno(definition, first - 1)
    ast.fix_missing_locations(module)
    scope: dict[str, Any] = {}
    exec(compile(module, inspect.getsourcefile(function) or "<edited>", "exec"), function.__globals__, scope)  # noqa: S102
    made = scope["_factory"](**names)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made
