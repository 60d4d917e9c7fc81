"""Runs in a process of its own: the real argument parser of one release, asked about command lines.

    python real_parser.py FOLDER < questions.json > answers.json

FOLDER holds the package ``vllm`` (its Python sources are enough). Third-party modules that this environment lacks are stood in
for, so that the sources of releases other than the installed one import; the parser, its options and their converters are the
release's own. A question is the list of words behind ``vllm serve``. An answer is {"values": {dest: value}, "given": [dest]} or
{"error": text}.
"""

import importlib.abc
import importlib.machinery
import io
import json
import os
import sys
import types
import typing

RELEASE = sys.argv[1]
sys.path.insert(0, RELEASE)
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_PLUGINS="", VLLM_NO_USAGE_STATS="1", VLLM_TARGET_DEVICE="cpu")
sys.argv = ["vllm", "serve"]  # the parser looks at it


# What vLLM does without: a stand-in would lead it, or another library, down a path that needs the real thing.
OPTIONAL = {"soundfile", "librosa", "av", "cv2", "amdsmi", "libtpu", "flashinfer", "zentorch", "pynvml", "resampy", "soxr"}


class _Anything(types.ModuleType):
    """A module that is not installed: every name in it is a class that takes anything."""

    __path__: typing.ClassVar[list] = []
    __file__ = "stand-in"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *a, **k: None, "__class_getitem__": classmethod(lambda c, k: c)})
        setattr(self, name, made)
        return made


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on the path: finds what a module of vLLM imports and nothing else found."""

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in OPTIONAL or (top == "vllm" and "_C" not in name):
            return None
        frame = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        importer = frame.f_globals.get("__name__", "") if frame is not None else ""
        if not importer.startswith("vllm") or frame.f_code.co_name == "find_spec":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module):
        pass


def plain(value):
    """A value of the namespace as JSON: objects become tables of what differs from their defaults is not needed here."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if hasattr(value, "name") and hasattr(value, "value"):
        return value.name
    if hasattr(value, "__dataclass_fields__"):
        return {"__object__": type(value).__name__, **{k: plain(getattr(value, k, None)) for k in value.__dataclass_fields__}}
    return repr(value)


def build():
    sys.meta_path.append(_StandIn())
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # as vllm.entrypoints.cli.main has it: the words go to a parser with sub-commands
    main = FlexibleArgumentParser(prog="vllm")
    main.add_argument("-v", "--version", action="version", version="0")
    commands = main.add_subparsers(required=False, dest="subparser")
    serve = make_arg_parser(commands.add_parser("serve"))
    return main, serve


def ask(main, serve, words):
    """The real parser's reading. The JSON of dataclass options is kept as vLLM hands it to the dataclass, beside the object."""
    raw = {}
    for action in serve._actions:
        kind = getattr(action, "type", None)
        if getattr(kind, "_recorded", False):
            kind.last = None
    kept, sys.stderr = sys.stderr, io.StringIO()
    try:
        namespace = main.parse_args(["serve", *words])
    except SystemExit:
        return {"error": sys.stderr.getvalue().strip().splitlines()[-1:] or ["exit"]}
    except Exception as error:
        return {"error": [f"{type(error).__name__}: {error}"]}
    finally:
        sys.stderr = kept
    for action in serve._actions:
        kind = getattr(action, "type", None)
        if getattr(kind, "_recorded", False) and kind.last is not None:
            raw[action.dest] = kind.last
    values = {}
    for action in serve._actions:
        if action.dest in ("help",):
            continue
        value = getattr(namespace, action.dest, None)
        values[action.dest] = raw[action.dest] if action.dest in raw else plain(value)
    return {"values": values, "dispatched": namespace.subparser}


def record(serve):
    """Let the converters of dataclass options remember the JSON text that they were given last."""
    for action in serve._actions:
        kind = action.type
        names = [getattr(kind, "__qualname__", "")]
        names += [getattr(c.cell_contents, "__qualname__", "") for c in getattr(kind, "__closure__", None) or ()]
        if any("parse_dataclass" in str(name) for name in names):

            def remember(text, kind=kind):
                value = kind(text)
                remember_of[id(kind)].last = json.loads(expand(text))
                return value

            remember._recorded, remember.last = True, None
            remember_of[id(kind)] = remember
            action.type = remember


remember_of = {}


def expand(text):
    from vllm.engine import arg_utils

    function = getattr(arg_utils, "_expand_json_human_readable_numbers", lambda text: text)
    return function(text)


def grammar(serve):
    import argparse

    strings = {}
    for text, action in serve._option_string_actions.items():
        strings.setdefault(id(action), []).append(text)
    found = {}
    for action in serve._actions:
        if id(action) in strings:
            verb = "store"
            for sort, name in (
                (argparse._HelpAction, "help"),
                (argparse.BooleanOptionalAction, "on/off"),
                (argparse._StoreTrueAction, "on"),
                (argparse._StoreFalseAction, "off"),
                (argparse._AppendAction, "append"),
            ):
                if isinstance(action, sort):
                    verb = name
            found[action.dest] = {"strings": sorted(strings[id(action)]), "nargs": action.nargs, "action": verb}
    return found


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    questions = json.load(sys.stdin)
    main, serve = build()
    options = grammar(serve)
    record(serve)
    answers = [ask(main, serve, words) for words in questions]
    json.dump({"grammar": options, "answers": answers}, out)
