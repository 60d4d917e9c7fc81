"""``python -m overlay COMMAND``: ``report``, ``fingerprint``, ``tune``."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "report": ("overlay.report", "print the receipts and counters of a run"),
    "fingerprint": ("overlay.fingerprints_command", "print the source digest of targets in a build"),
    "tune": ("overlay.tune", "measure matrix products on this hardware and write a table"),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m overlay",
        description="Look at a run, at a build, or tune.",
        epilog="\n".join(f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=not argv or argv[0] in ("-h", "--help"),
    )
    parser.add_argument("command", choices=COMMANDS)
    command = parser.parse_args(argv[:1]).command
    return importlib.import_module(COMMANDS[command][0]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
