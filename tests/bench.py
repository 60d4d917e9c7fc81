"""``make bench``: what the overlay itself costs, and the two code patches of the spine against the originals.

A benchmark, not a timed test: it prints figures beside their goals and always exits 0. Samples of the things that are
compared alternate; medians, with the spread in brackets.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import timeit
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from overlay.bootstrap.arm import pack  # noqa: E402
from overlay.vllm_hooks import POINTS  # noqa: E402
from tests.server import CHECKPOINT  # noqa: E402

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling our files anew at each start is not what a user sees
BOOTSTRAP = str(ROOT / "overlay/bootstrap")
NEVER = {"digest": "bench", "runner": "V1", "patches": []}


def say(what: str, value: str, goal: str = "") -> None:
    print(f"{what:<64} {value:<26} {goal}", flush=True)


def spread(samples: list[float], unit: str = "ms", scale: float = 1e3) -> str:
    low, high = min(samples) * scale, max(samples) * scale
    return f"{statistics.median(samples) * scale:.2f} {unit} [{low:.2f}, {high:.2f}]"


def to_exec() -> float:
    """Seconds from starting ``python launch.py MODEL`` until the process has become vLLM's command."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), str(CHECKPOINT), "--enforce-eager"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        command = Path(f"/proc/{process.pid}/cmdline")
        while b"carry.py" not in command.read_bytes():
            if process.poll() is not None:
                raise SystemExit("launch.py ended before it became the server")
            time.sleep(0.001)
        return time.perf_counter() - started
    finally:
        process.kill()
        process.wait()


def interpreter(environ: dict[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=environ, check=True)
    return time.perf_counter() - started


def interpreters() -> None:
    plain = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OVERLAY_PLAN")}
    onpath = {**plain, "PYTHONPATH": BOOTSTRAP}
    planned = {**onpath, "OVERLAY_PLAN": pack(NEVER, POINTS)}
    samples: dict[str, list[float]] = {"plain": [], "path": [], "plan": []}
    for _ in range(25):
        for name, environ in (("plain", plain), ("path", onpath), ("plan", planned)):
            samples[name].append(interpreter(environ))
    base = statistics.median(samples["plain"])
    for name, what, goal in (("path", "without a plan", "goal < 2 ms"), ("plan", "with a plan", "goal < 20 ms")):
        added = (statistics.median(samples[name]) - base) * 1e3
        say(f"start of one interpreter, added {what}", f"{added:.2f} ms (plain {base * 1e3:.1f})", goal)


IMPORT = """
import sys, time
first = sys.meta_path[0]
finder = first.arm()

spent, calls, own = 0.0, 0, finder.find_spec
class Timed:
    def find_spec(self, name, path=None, target=None):
        global spent, calls
        started = time.perf_counter()
        found = own(name, path, target)
        spent += time.perf_counter() - started
        calls += 1
        return found
sys.meta_path[sys.meta_path.index(finder)] = Timed()
started = time.perf_counter()
import vllm, vllm.config
print(spent, calls, time.perf_counter() - started)
"""


def armed_import() -> None:
    watch = {"id": "never", "kind": "code", "module": "m", "file": "f", "targets": ["no.such.module:f"], "assumes": []}
    watch |= {"options": {}, "accept_drift": False, "process": "worker", "runner": "", "live": [], "after": [], "requires": []}
    watch |= {"after_call": ""}
    orders = {**NEVER, "patches": [watch | {"required": False}]}
    environ = {**os.environ, "PYTHONPATH": BOOTSTRAP, "OVERLAY_PLAN": pack(orders, POINTS)}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environ, capture_output=True, text=True, check=True)
    spent, calls, total = map(float, done.stdout.split())
    value = f"{100 * spent / total:.3f}% ({calls:.0f} look-ups)"
    say(f"armed hooks that never match, share of `import vllm` ({total:.1f} s)", value, "goal < 1%")


def gate() -> None:
    from overlay.runtime import Counters

    count = Counters("bench")
    state = {"dirty": False, "last": 4}

    def gated(number: int) -> None:
        if not state["dirty"] and number == state["last"]:
            count.hit()

    each = min(timeit.repeat(lambda: gated(4), number=100_000, repeat=5)) / 100_000
    say("one gate and counter in a hot path", f"{each * 1e9:.0f} ns", "goal < 1000 ns")


def main() -> None:
    to_exec()  # fills the caches of a first start
    say("python launch.py to exec", spread([to_exec() for _ in range(7)], "s", 1), "goal < 0.5 s")
    interpreters()
    armed_import()
    gate()
    for patch in ("block-table-dirty", "min-tokens-mask-cache"):
        print(f"\npython -m ab_runs micro {patch}", flush=True)
        subprocess.run([sys.executable, "-m", "ab_runs", "micro", patch], cwd=ROOT)


if __name__ == "__main__":
    main()
