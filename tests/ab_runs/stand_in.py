"""A stand-in for ``launch.py`` and its server, in the standard library: the runner is tested with it in
seconds. What a real vLLM answers is tested in ``test_real_run.py``.

Its misbehaviour is asked for by environment variables (``STAND_IN_…``), per arm, so that one spec can hold good and bad arms.
"""

import http.server
import json
import os
import sys
import time
from pathlib import Path

KNOWN = {"fast": "bitwise", "rounder": "rounding", "knob": "bitwise", "broken": "bitwise", "sneaky": "bitwise"}


def plan(argv):
    on = {}
    off = "--overlay-config" in argv and argv[argv.index("--overlay-config") + 1].endswith("off.yaml")
    for word in argv:
        if word.startswith("--overlay-patches="):
            for toggle in word.partition("=")[2].split(","):
                on[toggle[1:]] = toggle[0] == "+"
    patches = []
    for name, exactness in KNOWN.items():
        wanted = on.get(name, False) and not off
        refused = wanted and name == "broken"
        patches.append(
            {
                "id": name,
                "verdict": "refused" if refused else "apply" if wanted else "off",
                "reason": "its source was never verified" if refused else "",
                "named": wanted,
                "kind": "config" if name == "knob" else "code",
                "exactness": exactness,
                "options": {},
                "source": f"source-of-{name}",
                "contribution": {"args": {"knob": 1}, "env": {}} if name == "knob" and wanted else None,
            }
        )
    applied = [p["id"] for p in patches if p["verdict"] == "apply"]
    words = [w for w in argv if not w.startswith("--overlay")]
    facts = {
        "build": {"distribution": "stand-in", "version": "1.0", "root": None, "plugins": {}},
        "hardware": {"platform": "cpu", "arch": "none", "name": "stand-in"},
        "model": {"architectures": ["StandIn"], "vocab_size": 1000, "num_layers": 1, "hidden_size": 8},
        "serving": {"num_speculative_tokens": 0},
    }
    made = {
        "facts": facts,
        "patches": patches,
        "argv": ["carry.py", "serve", words[0], *[w for w in words[1:] if w.startswith("--")]],
        "env": {},
        "digest": "digest-" + "-".join(applied),
    }
    if "knob" in applied:
        made["argv"].append("--knob=1")
    if "sneaky" in applied:
        made["argv"].append("--max-num-seqs=2")
    return made, any(p["verdict"] == "refused" for p in patches)


def mode(name):
    """What an arm shall do: ``STAND_IN_MODE='dies-in-load@1'`` holds for the second boot of the run folder only."""
    wanted = os.environ.get("STAND_IN_MODE", "")
    return any(part.partition("@")[0] == name and part.partition("@")[2] in ("", boot()) for part in wanted.split(","))


def boot():
    caches = os.environ.get("TRITON_CACHE_DIR", "")
    counter = Path(caches).parent.parent / "boots" if caches else None
    return str(len(counter.read_text())) if counter and counter.exists() else ""


def serve(argv):
    port = int(argv[argv.index("--port") + 1])
    run_dir = argv[argv.index("--overlay-run-dir") + 1] if "--overlay-run-dir" in argv else None
    made, refused = plan(argv)
    counter = Path(os.environ["TRITON_CACHE_DIR"]).parent.parent / "boots"
    with counter.open("a") as file:
        file.write("x")
    # Counted from here, a boot's number is the length of the file: the first is 1.
    if refused:
        sys.exit(78)
    if mode("dies-at-boot"):
        sys.exit("OSError: no such model")
    if mode("never-healthy"):
        time.sleep(120)
    print(
        "Initializing a V1 LLM engine (v1.0) with config: model='m', enable_prefix_caching=False, "
        "compilation_config={'mode': 0, 'cudagraph_capture_sizes': [1, 2, 4]}",
        flush=True,
    )
    applied = [p["id"] for p in made["patches"] if p["verdict"] == "apply"]
    counters = None
    if run_dir:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
        from overlay import ledger

        ledger.bind(run_dir)
        receipt = ledger.Receipt(run_dir, made["digest"])
        receipt.update(role="worker")
        for name in applied:
            receipt.state(name, state="applied")
        counters = {name: ledger.Counters(name) for name in applied if name != "knob"}
    tokens = {"count": 0, "hits": 0}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def _send(self, content):
            raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self):
            if self.path == "/v1/models":
                self._send({"data": [{"id": "stand-in"}]})
            elif self.path == "/metrics":
                self._send(
                    f'vllm:prefix_cache_hits_total{{e="0"}} {tokens["hits"]}\n'
                    f'vllm:prefix_cache_queries_total{{e="0"}} {tokens["count"]}\n'
                )
            else:
                self._send({})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                self._send({"tokens": [ord(letter) % 97 for letter in body["prompt"]]})
                return
            if mode("dies-in-load") and body.get("measured"):
                os._exit(139)
            if mode("hangs-in-load") and body.get("measured"):
                time.sleep(120)
            if mode("compiles") and body.get("measured"):
                print("WARNING Triton kernel JIT compilation during inference: k", flush=True)
            tokens["count"] += 10
            if mode("warm-cache") and body.get("measured"):
                tokens["hits"] += 5
            for count in (counters or {}).values():
                if not mode("no-hits"):
                    count.hit()
                else:
                    count.refuse("never")
            number = body["max_tokens"]
            start = len(body["prompt"])
            answer = [(start + i) % 90 for i in range(number)]
            if "rounder" in applied and mode("diverges") and number > 1:
                answer[1] += 5
            top = [{f"token_id:{t}": -0.1, f"token_id:{t + 500}": -3.0} for t in answer]
            choice = {"finish_reason": "length", "token_ids": answer, "text": "x", "logprobs": None}
            if body.get("logprobs"):
                choice["logprobs"] = {
                    "tokens": [f"token_id:{t}" for t in answer],
                    "token_logprobs": [-0.1] * number,
                    "top_logprobs": top,
                }
            if body.get("prompt_logprobs"):
                prompt = body["prompt"]
                choice["prompt_logprobs"] = [None] + [{str(t): {"logprob": -1.0 - t / 1000}} for t in prompt[1:]]
            self._send({"choices": [choice], "usage": {"prompt_tokens": start, "completion_tokens": number}})

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def bench(argv):
    """What ``vllm bench serve`` would do: send requests one after another, write its result."""
    import urllib.request

    def value(name):
        return argv[argv.index(name) + 1]

    number, length = int(value("--num-prompts")), int(value("--random-output-len"))
    speed = float(os.environ.get("STAND_IN_TPOT", "0.01"))
    made = {"ttfts": [], "latencies": [], "output_lens": [], "errors": [], "generated_texts": [], "itls": []}
    began = time.time()
    for i in range(number):
        body = {"model": "stand-in", "prompt": [1] * 8, "max_tokens": length, "measured": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{value('--port')}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).read()
        jitter = 1 + 0.001 * ((os.getpid() * 7 + i * 13) % 11)
        made["ttfts"].append(0.02)
        made["itls"].append([speed * jitter] * (length - 1))
        made["latencies"].append(0.02 + speed * jitter * (length - 1))
        made["output_lens"].append(length)
        made["errors"].append("")
        made["generated_texts"].append(f"text {i}")
    made |= {"duration": time.time() - began + number * speed * length, "completed": number, "failed": 0}
    Path(value("--result-dir"), value("--result-filename")).write_text(json.dumps(made))


def main(argv):
    if "--overlay-exec" in argv:
        bench(argv)
    elif "--overlay-dry-run" in argv:
        made, refused = plan(argv)
        print(json.dumps(made))
        sys.exit(78 if refused else 0)
    else:
        serve(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
