"""Ask the real parsers of the releases and keep their answers: ``data/parser-RELEASE.json``.

    python tests/facts/record_parsers.py NAME=FOLDER ...

FOLDER holds the package ``vllm`` of release NAME. Run with a Python that has what a vLLM needs (the test environment). The
questions are the lines of ``corpus.py`` and every line that ``ServeArgs.merge`` makes of them.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from corpus import ADDITIONS, LINES  # noqa: E402

from overlay.argument_source import from_source  # noqa: E402
from overlay.serve_args import ServeArgs  # noqa: E402


def questions(root: Path) -> list[list[str]]:
    grammar = from_source(root / "vllm")
    asked = [list(words) for words in LINES.values()]
    for words in LINES.values():
        for added in ADDITIONS.values():
            merged = ServeArgs.parse(words, grammar).merge(added)[0]
            if merged not in asked:
                asked.append(merged)
    return asked


def main() -> None:
    os.chdir(HERE / "data/serve")
    for argument in sys.argv[1:]:
        name, _, folder = argument.partition("=")
        asked = questions(Path(folder))
        done = subprocess.run(
            [sys.executable, str(HERE / "real_parser.py"), folder],
            input=json.dumps(asked), capture_output=True, text=True, check=False,
        )
        if done.returncode:
            sys.exit(f"{name}: {done.stderr[-2000:]}")
        answer = json.loads(done.stdout)
        defaults = answer["answers"][1]["values"]
        kept = []
        for words, said in zip(asked, answer["answers"], strict=True):
            if "values" in said:  # what differs from the values without any option
                said = {"values": {dest: value for dest, value in said["values"].items() if value != defaults[dest]}}
            kept.append({"words": words, **said})
        content = {"release": name, "defaults": defaults, "grammar": answer["grammar"], "answers": kept}
        grammar = replace(from_source(Path(folder) / "vllm"), source=name)
        (HERE / f"data/grammar-{name}.json").write_text(grammar.to_json() + "\n")
        (HERE / f"data/parser-{name}.json").write_text(json.dumps(content, indent=0, sort_keys=True) + "\n")
        print(name, len(kept), flush=True)


if __name__ == "__main__":
    main()
