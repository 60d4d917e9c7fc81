"""From ``launch.py``'s command line to the exec of vLLM's own. Imports neither torch nor vLLM, makes no device context."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from overlay import folders
from overlay.catalog import CatalogError, Entry, load_catalog
from overlay.config import ConfigError, Settings, check_against, user_settings, with_profile

ROOT = Path(__file__).resolve().parent.parent
BOOTSTRAP = Path(__file__).resolve().parent / "bootstrap"
WRONG, REFUSED = 2, 78  # exit codes
OURS = ("OVERLAY_PLAN", "OVERLAY_RUN_DIR", "OVERLAY_DISTRIBUTION")
OLDEST = "0.18.1"


class Stop(Exception):
    """The launch ends here, with a message and an exit code."""

    def __init__(self, message: str, code: int = WRONG) -> None:
        super().__init__(message)
        self.code = code


def overlay_parser() -> argparse.ArgumentParser:
    """The flags that are ours. Everything else is vLLM's and passes through."""
    parser = argparse.ArgumentParser(
        prog="launch.py",
        usage="python launch.py MODEL [any `vllm serve` flag] [--overlay-...]\n"
        "       python launch.py [--overlay-...] --overlay-exec -- COMMAND ...",
        description="vLLM's server with patches that are proven to fit. `launch.py --help` is vLLM's own help.",
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--overlay-help", action="store_true", help="show these flags")
    add("--overlay-config", metavar="FILE", type=Path, help="settings (YAML); configs/off.yaml is the stock server")
    add("--overlay-profile", metavar="NAME", help="a profile of configs/ or a file; auto chooses by the facts")
    add("--overlay-patches", metavar="+A,-B", action="append", default=[], help="switch patches on and off")
    add("--overlay-exactness", choices=("bitwise", "batch", "rounding"), help="the loosest class allowed (batch)")
    add("--overlay-on-refusal", choices=("skip", "stop"), help="what a refused patch of a profile does (skip)")
    add("--overlay-accept-drift", metavar="ID", action="append", default=[], help="apply ID to sources never verified")
    add("--overlay-patch-dir", metavar="DIR", action="append", default=[], help="a further folder of patches")
    add("--overlay-ignore-records", action="store_true", help="do not let kept comparisons switch patches off")
    add("--overlay-facts", metavar="FILE", type=Path, help="facts (JSON or YAML) in place of detection; only plans")
    add("--overlay-run-dir", metavar="DIR", type=Path, help="where receipts and counters of this run go")
    add("--overlay-dry-run", action="store_true", help="print what would happen and exit")
    add("--overlay-json", action="store_true", help="print it as JSON")
    add("--overlay-list", action="store_true", help="print the catalogue of patches and exit")
    add("--overlay-exec", action="store_true", help="start the COMMAND behind -- in place of the server")
    return parser


def split_argv(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags taken out, the rest unchanged and in order. Raises Stop for an unknown ``--overlay-`` flag."""
    argv = list(argv)
    command: list[str] = []
    if "--overlay-exec" in argv:
        if "--" not in argv[argv.index("--overlay-exec") :]:
            raise Stop("--overlay-exec: the command to start stands behind --: --overlay-exec -- python script.py")
        at = argv.index("--", argv.index("--overlay-exec"))
        argv, command = argv[:at], argv[at + 1 :]
        if not command:
            raise Stop("--overlay-exec: no command behind --")
    parser = overlay_parser()
    known = {option: action for action in parser._actions for option in action.option_strings}
    ours: list[str] = []
    rest: list[str] = []
    i = 0
    while i < len(argv):
        word = argv[i]
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--overlay") else name
        if not name.startswith("--overlay"):
            rest.append(word)
        elif name not in known:
            hint = difflib.get_close_matches(name, known, 1)
            raise Stop(f"unknown flag {word.partition('=')[0]}" + (f"; did you mean {hint[0]}?" if hint else ""))
        else:
            takes_value = known[name].nargs != 0
            if equals and not takes_value:
                raise Stop(f"{name} takes no value")
            ours.append(name + word[len(word.partition("=")[0]) :])
            if takes_value and not equals:
                i += 1
                if i >= len(argv):
                    raise Stop(f"{name}: expected a value ({known[name].help})")
                ours[-1] = f"{name}={argv[i]}"
        i += 1
    parser.error = lambda message: (_ for _ in ()).throw(Stop(message))  # type: ignore[method-assign]
    flags = parser.parse_args(ours)
    if flags.overlay_exec:
        if rest:
            raise Stop(f"--overlay-exec: {rest[0]!r} stands before --; the command goes behind it")
        rest = command
    elif rest[:1] == ["serve"]:
        rest = rest[1:]
    return flags, rest


def main(argv: Sequence[str]) -> int:
    """The exit code of a launch that ended here; a launch that goes on never returns."""
    started = time.perf_counter()
    try:
        flags, rest = split_argv(argv)
        if flags.overlay_help:
            overlay_parser().print_help()
            return 0
        settings = user_settings(
            flags.overlay_config,
            flags.overlay_patches,
            flags.overlay_exactness,
            flags.overlay_profile,
            flags.overlay_on_refusal,
            flags.overlay_patch_dir,
            flags.overlay_accept_drift,
            False if flags.overlay_ignore_records else None,
        )
        if flags.overlay_list:
            from overlay.show import print_catalog

            print_catalog(_catalog(settings), flags.overlay_json)
            return 0
        if not settings.enabled and not flags.overlay_dry_run:
            return _stock(rest, flags)
        return _launch(flags, rest, settings, started)
    except (Stop, ConfigError, CatalogError) as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return getattr(error, "code", WRONG)


def _catalog(settings: Settings) -> dict[str, Entry]:
    catalog = load_catalog(settings.patch_dirs)
    check_against(settings, catalog)
    return catalog


def _launch(flags: argparse.Namespace, rest: list[str], settings: Settings, started: float) -> int:
    from overlay.detect import detect
    from overlay.facts import FactsError, load_facts
    from overlay.fingerprint import SourceCache
    from overlay.plan import make_plan, orders

    server = not flags.overlay_exec
    environ = dict(os.environ)
    try:
        if flags.overlay_facts is not None:
            facts, args = load_facts(flags.overlay_facts), None
            if server:
                facts, args = _args_for(facts, rest, environ)
        else:
            found = detect(rest if server else None, environ)
            facts, args = found.facts, found.args
    except FactsError as error:
        raise Stop(str(error)) from error
    planned_elsewhere = flags.overlay_facts is not None
    if not planned_elsewhere:
        _check_build(facts)
    if server and args is not None and (args.help or (args.error and not flags.overlay_dry_run)):
        if args.error and not args.help:
            print(f"overlay: vLLM will refuse this command line: {args.error}", file=sys.stderr)
        return _stock(rest, flags)  # vLLM's own help and vLLM's own complaint
    if server and not planned_elsewhere:
        _check_model(args, facts)
    settings = with_profile(settings, facts)
    if not settings.enabled and not flags.overlay_dry_run:
        return _stock(rest, flags)
    catalog = _catalog(settings)
    cache = SourceCache(folders.cache() / "fingerprints.json")
    recorded, kept = _records(facts) if settings.records else ({}, [])
    plan = make_plan(facts, settings, catalog, args, rest, cache, recorded, environ, server)
    plan = replace(plan, notes=(*plan.notes, *(args.warnings if args is not None else ()), *kept))
    if flags.overlay_dry_run or planned_elsewhere:
        from overlay.show import print_plan

        env = {**plan.env, **({} if not settings.enabled else _environment(plan, None, environ))}
        print_plan(plan, catalog, _command(facts, list(plan.argv), server)[1:] if server else rest, env, flags.overlay_json)
        return REFUSED if plan.stopping else 0
    if plan.stopping:
        lines = [f"{d.id}: {d.verdict.value}: {d.reason}" for d in plan.stopping]
        raise Stop("cannot apply what you asked for:\n  " + "\n  ".join(lines), REFUSED)
    missing = _missing_points(facts)
    if missing:
        raise Stop(
            f"vLLM {facts.build.version} lacks {', '.join(missing)}: patches could not be proven there. "
            "Use --overlay-config configs/off.yaml for the stock server.",
            REFUSED,
        )
    _warn(plan, environ)
    folder = _run_folder(flags.overlay_run_dir)
    added = _environment(plan, folder, environ)
    told = orders(plan, catalog)
    _keep(folder, plan, catalog, told)
    from overlay.bootstrap.arm import pack
    from overlay.vllm_hooks import POINTS

    environ.update(plan.env)
    environ.update(added)
    environ["OVERLAY_PLAN"] = pack(told, POINTS)
    _log(plan, folder, time.perf_counter() - started)
    return _exec(_command(facts, list(plan.argv), server), environ)


def _args_for(facts: Any, rest: list[str], environ: dict[str, str]) -> tuple[Any, Any]:
    """Facts from a file, with the command line read by the release that is installed here, where there is one."""
    from overlay.argument_grammar import GrammarError, load
    from overlay.detect.build import find_build
    from overlay.serve_args import ServeArgs

    root = facts.build.root or find_build()[0].root
    if root is None:
        return facts, None
    try:
        return facts, ServeArgs.parse(rest, load(root))
    except GrammarError:
        return facts, None


def _check_build(facts: Any) -> None:
    from overlay.versions import in_range

    build = facts.build
    if build.root is None:
        why = facts.why_unknown("build.root")
        raise Stop(f"no vLLM is installed for {sys.executable} ({why}); run launch.py with the Python that has it")
    if build.public is not None and in_range(build.public, f">={OLDEST}") is False:
        raise Stop(
            f"vLLM {build.version} in {build.root} is older than any supported ({OLDEST}); "
            "start it with `vllm serve`, or upgrade it"
        )


def _check_model(args: Any, facts: Any) -> None:
    """A model given as a path must exist; a name is vLLM's to find."""
    model = args.model if args is not None else None
    if model and model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists():
        raise Stop(f"model {model}: no such folder or file; give an existing path or a model's name")


def _missing_points(facts: Any) -> list[str]:
    from overlay.vllm_hooks import missing_points

    return missing_points(str(Path(facts.build.root).parent))


def _records(facts: Any) -> tuple[dict[str, str], list[str]]:
    """What kept comparisons say of this hardware, model and build: against which patches, and in a line each."""
    from overlay.records import against, lines

    return against(facts), lines(facts)


def _stock(rest: list[str], flags: argparse.Namespace) -> NoReturn | int:
    """The stock program: nothing of ours in its environment, except who answers for the name vllm where that is needed."""
    from overlay.detect.build import find_build

    build, unknown = find_build()
    if build.root is None:
        raise Stop(f"no vLLM is installed for {sys.executable} ({unknown.get('build.root', 'not found')})")
    environ = _clean(dict(os.environ))
    if build.distribution not in (None, "vllm"):
        environ["OVERLAY_DISTRIBUTION"] = build.distribution
    if flags.overlay_exec:
        return _exec(_carried(rest, build.distribution), environ)
    return _exec([sys.executable, str(BOOTSTRAP / "carry.py"), "serve", *rest], environ)


def _command(facts: Any, words: list[str], server: bool) -> list[str]:
    if server:
        return [sys.executable, str(BOOTSTRAP / "carry.py"), "serve", *words]
    return _carried(words, facts.build.distribution)


def _carried(command: list[str], distribution: str | None) -> list[str]:
    """``vllm bench ...`` of a build that cannot find its own version under the name vllm: through our copy of that script."""
    if Path(command[0]).name == "vllm" and distribution not in (None, "vllm"):
        return [sys.executable, str(BOOTSTRAP / "carry.py"), *command[1:]]
    return command


def _clean(environ: dict[str, str]) -> dict[str, str]:
    """An environment without what an outer launch put there."""
    for name in OURS:
        environ.pop(name, None)
    kept = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry and Path(entry) != BOOTSTRAP]
    if kept:
        environ["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        environ.pop("PYTHONPATH", None)
    return environ


def _environment(plan: Any, folder: Path | None, environ: dict[str, str]) -> dict[str, str]:
    """The variables that the overlay adds for itself (the orders aside, which say the same as the plan)."""
    cleaned = _clean(dict(environ))
    path = os.pathsep.join(filter(None, [str(BOOTSTRAP), cleaned.get("PYTHONPATH", "")]))
    added = {"PYTHONPATH": path}
    if folder is not None:
        added["OVERLAY_RUN_DIR"] = str(folder)
    if plan.facts.build.distribution not in (None, "vllm"):
        added["OVERLAY_DISTRIBUTION"] = plan.facts.build.distribution
    prefixes = environ.get("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "")
    if (plan.facts.env or {}).get("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY") is not None or "ray" in " ".join(plan.argv):
        added["VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"] = ",".join(filter(None, [prefixes, "OVERLAY_"]))
    return added


def _run_folder(wanted: Path | None) -> Path:
    """A fresh folder for this run's receipts and counters. Raises Stop where the user's own cannot be used."""
    if wanted is not None:
        try:
            wanted = wanted.expanduser().resolve()
            wanted.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Stop(f"--overlay-run-dir {wanted}: {error.strerror or error}") from error
        if any(wanted.glob("receipt-*.json")):
            raise Stop(f"--overlay-run-dir {wanted}: holds the receipts of another run; name an empty folder")
        return wanted
    import tempfile

    for parent in (folders.runs(), Path(tempfile.gettempdir()) / f"vllm-overlay-runs-{os.getuid()}"):
        try:
            parent.mkdir(parents=True, exist_ok=True)
            stamp = time.strftime("%Y%m%d-%H%M%S")
            folder = parent / f"{stamp}-{os.getpid()}"
            for again in range(1, 100):  # a launch inside a launch keeps its process number
                if not folder.exists():
                    break
                folder = parent / f"{stamp}.{again}-{os.getpid()}"
            folder.mkdir()
        except OSError:
            continue
        _prune(parent)
        return folder
    raise Stop("no folder for this run's receipts can be made; name one with --overlay-run-dir")


def _prune(parent: Path, keep: int = 30) -> None:
    """Old runs go, unless their server still runs."""
    for folder in sorted(path for path in parent.iterdir() if path.is_dir())[:-keep]:
        pid = folder.name.rpartition("-")[2]
        if not (pid.isdigit() and Path("/proc", pid).exists()):
            shutil.rmtree(folder, ignore_errors=True)


def _keep(folder: Path, plan: Any, catalog: dict[str, Entry], told: dict[str, Any]) -> None:
    """The plan beside the receipts, for reports and comparisons."""
    from overlay.ledger import write_json
    from overlay.show import plan_json

    write_json(str(folder / "plan.json"), plan_json(plan, catalog, list(plan.argv), dict(plan.env)))


def _warn(plan: Any, environ: dict[str, str]) -> None:
    from overlay.detect.environment import warnings

    for line in (*warnings(environ, plan.facts.build, plan.facts.hardware), *plan.facts.hardware.notes):
        print(f"overlay: warning: {line}", file=sys.stderr)


def _log(plan: Any, folder: Path, seconds: float) -> None:
    """What the launcher says before it becomes the server: a few lines on stderr."""
    applied = ", ".join(d.id for d in plan.applied) or "no patch"
    say = lambda line: print(f"overlay: {line}", file=sys.stderr)  # noqa: E731
    say(f"plan {plan.digest}, profile {plan.settings.profile}: {applied}")
    for decision in plan.decisions:
        if decision.verdict.value == "refused":
            say(f"{decision.id}: refused: {decision.reason}")
        elif decision.advert and not decision.applies:
            say(f"{decision.id} is off: {decision.advert}")
    for note in plan.notes:
        say(note)
    say(f"receipts in {folder} ({seconds * 1000:.0f} ms)")


def _exec(command: list[str], environ: dict[str, str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise Stop(f"{command[0]}: cannot be started: {error.strerror or error}") from error

