"""Facts from a file (``--overlay-facts``): the same keys as ``Facts``, checked one by one."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from overlay.facts import Build, Facts, FactsError, Hardware, Model, Serving

SECTIONS = {"build": Build, "hardware": Hardware, "model": Model, "serving": Serving}
# Defaults of the dataclasses that claim something: in a file, leaving the fact out claims nothing.
_CLAIMS = {"serving": {"speculative_method": None, "num_speculative_tokens": None}}


def read(path: Path) -> Facts:
    """The facts in ``path``. Raises FactsError, naming the file, the key and what was expected."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FactsError(f"{path}: cannot read the facts file: {reason}") from error
    return from_table(_parse(path, text), str(path))


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise FactsError(f"{path}: no JSON: {error}") from error
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FactsError(f"{path}: no YAML: {' '.join(str(error).split())}") from error


def from_table(table: Any, file: str = "facts") -> Facts:
    """Facts from parsed content; also from ``Facts.to_dict()``, which it reverses. Raises FactsError."""
    if not isinstance(table, Mapping):
        raise FactsError(f"{file}: expected a table with {', '.join(SECTIONS)}, found {_kind(table)}")
    sections: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for key, content in table.items():
        if key in SECTIONS:
            sections[key] = _section(file, key, content)
        elif key in ("env", "unknown"):
            sections[key] = _strings(file, key, content)
        else:
            raise FactsError(f"{file}: {key}: no such section{_nearest(key, (*SECTIONS, 'env', 'unknown'))}")
    unknown.update(sections.pop("unknown", {}))
    for key, kind in SECTIONS.items():
        if key not in sections:
            sections[key] = kind(**_CLAIMS.get(key, {}))
            unknown.setdefault(key, f"not given in {file}")
        for entry in fields(kind):
            if getattr(sections[key], entry.name) is None:
                unknown.setdefault(f"{key}.{entry.name}", f"not given in {file}")
    build = sections["build"]
    if build.version is not None and (not isinstance(table.get("build"), Mapping) or "public" not in table["build"]):
        sections["build"] = _with_version(build, unknown)
    return Facts(unknown=unknown, **sections)


def _with_version(build: Build, unknown: dict[str, str]) -> Build:
    """The public version, the tags and the vendor, taken from the version string."""
    from dataclasses import replace

    from overlay import versions

    parsed = versions.parse(build.version or "")
    if parsed.public is None:
        unknown["build.public"] = parsed.unknown
    else:
        unknown.pop("build.public", None)
    return replace(
        build,
        public=parsed.public,
        local=build.local or parsed.local,
        tags=build.tags or parsed.tags,
        vendor=build.vendor or parsed.vendor,
    )


def _section(file: str, section: str, content: Any) -> Any:
    kind = SECTIONS[section]
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        raise FactsError(f"{file}: {section}: expected a table, found {_kind(content)}")
    known = {entry.name: entry for entry in fields(kind)}
    hints = typing.get_type_hints(kind)
    values = dict(_CLAIMS.get(section, {}))
    for key, value in content.items():
        if key not in known:
            raise FactsError(f"{file}: {section}.{key}: no such fact{_nearest(str(key), known)}")
        values[key] = _checked(file, f"{section}.{key}", value, hints[key])
    return kind(**values)


def _checked(file: str, where: str, value: Any, hint: Any) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None:
        if types.NoneType in options:
            return None
        raise FactsError(f"{file}: {where}: expected {_expected(options)}, found nothing")
    for option in options:
        origin = typing.get_origin(option) or option
        if origin is tuple and isinstance(value, (list, tuple)):
            kind = typing.get_args(option)[0]
            if all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in value):
                return tuple(value)
        if origin in (Mapping, typing.get_origin(Mapping[str, str])) and isinstance(value, Mapping):
            if typing.get_args(option)[1] is str:
                return _strings(file, where, value)
            inner = typing.get_args(option)[1]
            return {str(key): _checked(file, f"{where}.{key}", entry, inner) for key, entry in value.items()}
        if origin in (bool, str) and isinstance(value, origin):
            return value
        if origin is int and isinstance(value, int) and not isinstance(value, bool):
            return value
    hint_text = ""
    if str in options and isinstance(value, (int, float)):
        hint_text = ' (put it into quotes, so that YAML leaves it as it is)'
    raise FactsError(f"{file}: {where}: expected {_expected(options)}, found {_kind(value)} {value!r}{hint_text}")


def _strings(file: str, where: str, content: Any) -> dict[str, str]:
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise FactsError(f"{file}: {where}: expected a table of texts, found {_kind(content)}")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, str):
            found = _kind(value) if isinstance(key, str) else f"the key {key!r}"
            raise FactsError(f"{file}: {where}.{key}: expected a text (in quotes), found {found}")
    return dict(content)


def _expected(options: tuple[Any, ...]) -> str:
    names = {str: "a text", int: "a whole number", bool: "true or false", tuple[str, ...]: "a list of texts"}
    names[tuple[int, ...]] = "a list of whole numbers"
    said = [names.get(option, "a table") for option in options if option is not types.NoneType]
    return " or ".join(said)


def _kind(value: Any) -> str:
    names = {str: "the text", int: "the number", float: "the number", bool: "the truth value", list: "the list"}
    if value is None:
        return "nothing"
    return names.get(type(value), "a table" if isinstance(value, Mapping) else f"the {type(value).__name__}")


def _nearest(key: str, known: Any) -> str:
    close = difflib.get_close_matches(str(key), list(known), 1)
    return f"; did you mean {close[0]}?" if close else f" (there are {', '.join(known)})"
