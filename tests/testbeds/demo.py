"""The demo: serve a real model through ``launch.py``, ask it over the OpenAI API, print the answer and the report, stop it.

    python demo.py CHECKPOINT
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "What is a KV cache in a language model? Answer in two sentences."


def main(checkpoint: str) -> int:
    import httpx

    sys.path.append(str(ROOT))
    from tests.server import SMALL, free_port

    port = free_port()
    run = Path(tempfile.mkdtemp(prefix="overlay-demo-"))
    command = [sys.executable, str(ROOT / "launch.py"), checkpoint, "--served-model-name", "SmolLM2", "--port", str(port)]
    command += [*SMALL, "--overlay-run-dir", str(run / "run")]
    print("$ python launch.py", *command[2:], flush=True)
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = (run / "server.log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ)
    base = f"http://127.0.0.1:{port}"
    try:
        started = time.monotonic()
        while True:
            if server.poll() is not None:
                print((run / "server.log").read_text()[-3000:])
                print(f"demo: the server ended with exit code {server.returncode}; its whole log is {run / 'server.log'}")
                return 1
            try:
                if httpx.get(f"{base}/health", timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if time.monotonic() - started > 400:
                print(f"demo: the server is not healthy after 400 s; its log is {run / 'server.log'}")
                return 1
            time.sleep(0.5)
        print(f"serving after {time.monotonic() - started:.0f} s\n\nQ: {QUESTION}")
        answer = httpx.post(
            f"{base}/v1/chat/completions",
            json={"model": "SmolLM2", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 80, "temperature": 0},
            timeout=120,
        ).json()
        print(f"A: {answer['choices'][0]['message']['content']}\n")
        subprocess.run([sys.executable, "-m", "overlay", "report", str(run / "run")], check=True, cwd=ROOT)
    finally:
        server.send_signal(signal.SIGINT)
        try:
            print(f"\nstopped, exit code {server.wait(timeout=60)}")
        except subprocess.TimeoutExpired:
            server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
