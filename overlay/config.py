"""Settings: flags over the user's YAML over a profile over the defaults, validated. Every error names file, key and what
was expected.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overlay.catalog import Entry
from overlay.facts import Facts
from overlay.spec import Exactness, Patch

PROFILES = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(Exception):
    """A setting that cannot be used: exit code 2."""


@dataclass(frozen=True)
class Choice:
    """What the settings say of one patch. named: the user asked for it (a profile did not)."""

    on: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    named: bool = False


@dataclass(frozen=True)
class Settings:
    """Validated settings. ``source``: key -> where its value came from."""

    enabled: bool = True
    profile: str = "auto"
    exactness: Exactness = Exactness.BATCH
    on_refusal: str = "skip"
    patches: Mapping[str, Choice] = field(default_factory=dict)
    patch_dirs: tuple[Path, ...] = ()
    accept_drift: tuple[str, ...] = ()
    records: bool = True
    source: Mapping[str, str] = field(default_factory=dict)


KEYS = {
    "enabled": bool,
    "profile": str,
    "exactness": str,
    "on_refusal": str,
    "patches": dict,
    "patch_dirs": list,
    "accept_drift": list,
    "records": bool,
}
PROFILE_KEYS = {**KEYS, "for": dict, "description": str}
FOR_KEYS = ("platforms", "archs", "architectures", "plugins", "facts")
_CHOICES = {"exactness": tuple(e.value for e in Exactness), "on_refusal": ("skip", "stop")}
_NAMES = {bool: "true or false", str: "text", dict: "a mapping", list: "a list"}


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` or nothing."""
    found = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def read_yaml(path: Path, keys: Mapping[str, type]) -> dict[str, Any]:
    """A YAML file with these keys. Raises ConfigError."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    try:
        content = yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        where = f":{error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
        raise ConfigError(f"{path}{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(content).__name__}")
    for key, value in content.items():
        if key not in keys:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(str(key), keys)}")
        if not isinstance(value, keys[key]):
            raise ConfigError(f"{path}: {key}: expected {_NAMES[keys[key]]}, found {value!r}")
        if key in _CHOICES and value not in _CHOICES[key]:
            raise ConfigError(f"{path}: {key}: expected one of {', '.join(_CHOICES[key])}, found {value!r}")
    return content


def _loader() -> Any:
    """YAML's safe loader, which also refuses a key that stands twice in one mapping."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark
                    )
                seen.add(key)
            return super().construct_mapping(node, deep)

    return Loader


def user_settings(
    config: Path | None = None,
    patches: Iterable[str] = (),
    exactness: str | None = None,
    profile: str | None = None,
    on_refusal: str | None = None,
    patch_dirs: Iterable[str] = (),
    accept_drift: Iterable[str] = (),
    records: bool | None = None,
) -> Settings:
    """Flags over the user's YAML, before any profile and before the catalogue is known. Raises ConfigError."""
    content = read_yaml(config, KEYS) if config is not None else {}
    where = str(config)
    source = dict.fromkeys(content, where)
    chosen = _choices(content.get("patches", {}), where, named=True)
    for item in patches:
        for part in filter(None, (p.strip() for p in item.split(","))):
            if part[0] not in "+-" or len(part) < 2:
                raise ConfigError(f"--overlay-patches: expected +ID or -ID, found {part!r}")
            before = chosen.get(part[1:], Choice(False))
            chosen[part[1:]] = Choice(part[0] == "+", before.options, "--overlay-patches", True)
    folders = []
    for folder in content.get("patch_dirs", []):
        if not isinstance(folder, str):
            raise ConfigError(f"{where}: patch_dirs: expected a list of folders, found {folder!r}")
        folders.append((config.parent / Path(folder).expanduser()).resolve())  # type: ignore[union-attr]
    folders += [Path(folder).expanduser().resolve() for folder in patch_dirs]
    drift = [*content.get("accept_drift", []), *accept_drift]
    flags = {"exactness": exactness, "profile": profile, "on_refusal": on_refusal, "records": records}
    for key, value in flags.items():
        if value is not None:
            content[key] = value
            source[key] = f"--overlay-{key.replace('_', '-')}"
    return Settings(
        enabled=content.get("enabled", True),
        profile=content.get("profile", "auto"),
        exactness=Exactness(content.get("exactness", Exactness.BATCH.value)),
        on_refusal=content.get("on_refusal", "skip"),
        patches=chosen,
        patch_dirs=tuple(folders),
        accept_drift=tuple(str(d) for d in drift),
        records=content.get("records", True),
        source=source,
    )


def _choices(content: Mapping[str, Any], where: str, named: bool) -> dict[str, Choice]:
    chosen = {}
    for name, value in content.items():
        if isinstance(value, bool):
            chosen[str(name)] = Choice(value, {}, where, named)
        elif isinstance(value, dict):
            chosen[str(name)] = Choice(True, value, where, named)
        else:
            raise ConfigError(f"{where}: patches.{name}: expected true, false or a mapping of options, found {value!r}")
    return chosen


# -- profiles


def with_profile(settings: Settings, facts: Facts) -> Settings:
    """The settings with their profile below them. ``auto`` takes the most specific profile that fits the facts, or none.
    Raises ConfigError for a profile of other hardware.
    """
    if settings.profile == "auto":
        fitting = []
        for path in sorted(PROFILES.glob("*.yaml")):
            content = read_yaml(path, PROFILE_KEYS)
            if content.get("for") and _misfit(content["for"], facts, path) is None:
                fitting.append((len(content["for"]), path, content))
        if not fitting:
            return settings
        _, path, content = max(fitting, key=lambda item: (item[0], str(item[1])))
    else:
        path = _profile_path(settings.profile)
        content = read_yaml(path, PROFILE_KEYS)
        misfit = _misfit(content.get("for", {}), facts, path)
        if misfit is not None:
            raise ConfigError(
                f"profile {path}: it is for other hardware or another model: {misfit}; "
                "choose another one with --overlay-profile, or auto"
            )
    return _below(settings, content, path)


def _profile_path(name: str) -> Path:
    shipped = PROFILES / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    for path in (Path(name).expanduser(), shipped):
        if path.is_file():
            return path
    known = [p.stem for p in PROFILES.glob("*.yaml")]
    raise ConfigError(f"profile {name!r}: no such file, and none of that name in {PROFILES}{nearest(name, known)}")


def _misfit(wanted: Mapping[str, Any], facts: Facts, path: Path) -> str | None:
    """Why a profile is not for these facts; None where it is."""
    have = {
        "platforms": [facts.hardware.platform],
        "archs": [facts.hardware.arch],
        "architectures": list(facts.model.architectures),
        "plugins": list(facts.build.plugins),
    }
    for key, values in wanted.items():
        if key not in FOR_KEYS:
            raise ConfigError(f"{path}: for: unknown key {key!r}{nearest(str(key), FOR_KEYS)}")
        if key == "facts":
            if (misfit := _wrong_fact(values, facts, path)) is not None:
                return misfit
            continue
        if not isinstance(values, list):
            raise ConfigError(f"{path}: for.{key}: expected a list, found {values!r}")
        if not set(values) & set(have[key]):
            found = ", ".join(str(value) for value in have[key]) or "none"
            return f"{key}: wanted {' or '.join(map(str, values))}, found {found}"
    return None


def _wrong_fact(wanted: Any, facts: Facts, path: Path) -> str | None:
    """The first fact that is not as a profile wants it: dotted path -> value."""
    if not isinstance(wanted, dict):
        raise ConfigError(f"{path}: for.facts: expected a mapping of facts to values, found {wanted!r}")
    for name, value in wanted.items():
        try:
            have = facts.get(str(name))
        except KeyError as error:
            raise ConfigError(f"{path}: for.facts: {name}: no such fact") from error
        if have != value:
            return f"{name}: wanted {value}, found {'unknown' if have is None else have}"
    return None


def _below(settings: Settings, content: Mapping[str, Any], path: Path) -> Settings:
    where = f"profile {path.name}"
    chosen = {**_choices(content.get("patches", {}), where, named=False)}
    for name, choice in settings.patches.items():
        base = chosen.get(name)
        options = {**(base.options if base else {}), **choice.options}
        chosen[name] = replace(choice, options=options)
    values: dict[str, Any] = {"patches": chosen, "profile": path.stem}
    source = dict(settings.source)
    for key in ("exactness", "on_refusal", "records", "enabled"):
        if key in content and key not in settings.source:
            values[key] = Exactness(content[key]) if key == "exactness" else content[key]
            source[key] = where
    return replace(settings, source=source, **values)


# -- against the catalogue


def check_against(settings: Settings, catalog: Mapping[str, Entry]) -> None:
    """Every id and option the settings name exists and has the right type. Raises ConfigError."""
    for name, choice in settings.patches.items():
        if name not in catalog:
            raise ConfigError(f"{choice.source}: unknown patch {name!r}{nearest(name, catalog)} (--overlay-list shows all)")
        _check_options(catalog[name].patch, choice)
    for name in settings.accept_drift:
        if name not in catalog:
            raise ConfigError(f"accept_drift: unknown patch {name!r}{nearest(name, catalog)}")


def _check_options(patch: Patch, choice: Choice) -> None:
    for name, value in choice.options.items():
        where = f"{choice.source}: patches.{patch.id}.{name}"
        option = patch.options.get(name)
        if option is None:
            raise ConfigError(f"{where}: unknown option{nearest(name, patch.options)}")
        wanted = type(option.default)
        fits = isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
        if not fits and not (wanted is float and isinstance(value, int)):
            raise ConfigError(f"{where}: expected {_NAMES.get(wanted, wanted.__name__)}, found {value!r}")
        if option.choices and value not in option.choices:
            raise ConfigError(f"{where}: expected one of {', '.join(map(str, option.choices))}, found {value!r}")
