"""The real server on a GPU through ``launch.py``: token ids of stock and patched, and what every process proves.

    python ab_runs/gpu/served.py --models DIR --out FILE [--model qwen3-0.6b] [--runners V1 V2] [--patches +a,-b]

One request at a time, greedy, equal prompts; the patched arm is what ``profile: auto`` gives on this card. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from overlay.ledger import read_run  # noqa: E402
from tests.server import Server  # noqa: E402
from tests.support import ROOT  # noqa: E402

PLAIN = '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4,8]}'
FLAGS = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "4096", "--gpu-memory-utilization", "0.3"]
FLAGS += ["--compilation-config", PLAIN, "--no-enable-prefix-caching"]


def answers(server: Server) -> list[list[int]]:
    rnd = random.Random(3)
    found = []
    for length, mix in ((20, {}), (300, {"min_tokens": 50}), (77, {"frequency_penalty": 0.5}), (5, {"logit_bias": {"7": 2.0}})):
        prompt = [rnd.randrange(10, 9000) for _ in range(length)]
        body = {"detokenize": False, "ignore_eos": True, **mix}
        found.append(server.complete(prompt, 60, **body)["token_ids"])
    return found


def arm(model: Path, runner: str, extra: list[str]) -> tuple[list[list[int]], dict[str, Any]]:
    environ = {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0"}
    with Server([*FLAGS, *extra], model=model, environ=environ, small=()) as server:
        server.wait_healthy(240)
        found = answers(server)
        receipts, counters = read_run(str(server.run)) if server.run.exists() else ([], {})
        states = [
            {
                "role": receipt["role"],
                "digest": receipt["digest"],
                "runner": receipt.get("runner"),
                "patches": {name: state.get("state") for name, state in receipt["patches"].items()},
                "verified": sorted(name for name, state in receipt["patches"].items() if state.get("verified")),
                "counters": counters.get(receipt["pid"], {}),
            }
            for receipt in receipts
        ]
        return found, {"processes": states, "exit": server.stop()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--runners", nargs="+", default=["V1", "V2"])
    parser.add_argument("--patches", default="")
    args = parser.parse_args()
    result: dict[str, Any] = {"model": args.model, "runners": {}}
    for runner in args.runners:
        try:
            stock, _ = arm(args.models / args.model, runner, ["--overlay-config", str(ROOT / "configs/off.yaml")])
            extra = ["--overlay-patches", args.patches] if args.patches else []
            patched, proof = arm(args.models / args.model, runner, extra)
            distinct = [len(set(ids)) for ids in stock]
            result["runners"][runner] = {"ids_equal": stock == patched, "distinct_tokens": distinct, **proof}
        except Exception as error:
            result["runners"][runner] = {"failed": f"{type(error).__name__}: {error}"[-3000:]}
        args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
