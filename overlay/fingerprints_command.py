"""``python -m overlay fingerprint``: source digests, for the specification of a patch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from overlay.fingerprint import MissingTarget, from_source


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m overlay fingerprint", description=__doc__)
    parser.add_argument("target", nargs="*", help="module:qualname, or a module alone")
    parser.add_argument("--root", action="append", help="folder that holds the package (default: the installed vLLM's)")
    parser.add_argument("--patch", action="append", default=[], help="all targets of this patch in place of TARGET")
    parser.add_argument("--patch-dir", action="append", default=[], help="a further folder of patches")
    args = parser.parse_args(argv)
    targets = list(args.target)
    if args.patch:
        from overlay.catalog import load_catalog

        catalog = load_catalog([Path(folder) for folder in args.patch_dir])
        for name in args.patch:
            if name not in catalog:
                parser.error(f"no patch {name!r} in the catalogue")
            patch = catalog[name].patch
            targets += [target.at for target in (*patch.targets, *patch.assumes)]
    roots = args.root or [_installed_root()]
    status = 0
    for root in roots:
        for target in targets:
            module, _, qualname = target.partition(":")
            try:
                print(f"{from_source(root, module, qualname)}  {target}  {root}")
            except MissingTarget as error:
                print(f"{'-' * 16}  {target}  {root}: {error}")
                status = 1
    return status


def _installed_root() -> str:
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("no vLLM is installed here; name its folder with --root")
    return str(Path(next(iter(spec.submodule_search_locations))).parent)
