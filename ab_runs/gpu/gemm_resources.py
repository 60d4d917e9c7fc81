"""Registers, spills and shared memory of a table's kernels, from the compiler's own report. Needs no GPU.

    python ab_runs/gpu/gemm_resources.py TABLE.json OUT.json

Compiles for the table's NVIDIA architecture with the Triton that is installed and reads ``cuobjdump --dump-resource-usage``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from patches._lib.gemm import kernels, table

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def resources(entry: table.Entry, capability: int) -> dict[str, Any]:
    """Registers, stack and local bytes a thread, static and pipelined shared memory a program, of one entry's kernel."""
    kernel, arguments = kernels._specialise(entry.tile, entry.m, entry.n, entry.k, False)
    options = {name: arguments[name] for name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in arguments.items() if name in kernel.arg_names}
    if entry.tile.kernel != "rows":
        constants.pop("M")
    constants["bias"] = None
    kinds = {"x": "*bf16", "w": "*bf16", "y": "*bf16", "part": "*bf16" if entry.tile.split == 1 else "*fp32"}
    signature, attributes = {}, {}
    for at, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else kinds.get(name, "i32")
        if name not in constants and name != "M":
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    ptx = made.asm["ptx"]
    unit = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "fma"
    return {
        "registers": int(found[1]), "stack_bytes": int(found[2]), "local_bytes": int(found[3]),
        "shared_bytes": made.metadata.shared, "unit": unit,
    }  # fmt: skip


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    found = table.load(source)
    done: dict[Any, dict[str, Any]] = {}
    for entry in found.entries.values():
        key = (
            entry.tile,
            entry.m if entry.tile.kernel == "rows" else 0,
            entry.n % entry.tile.bn == 0,
            entry.k % entry.tile.span == 0,
        )
        if key not in done:
            done[key] = {"tile": str(entry.tile), "first_used_for": entry.key, **resources(entry, int(found.arch[2:]))}
    lines = ",\n ".join(json.dumps(value) for value in done.values())
    target.write_text('{"triton": "' + triton.__version__ + '", "kernels": [\n ' + lines + "\n]}\n")
    spills = [value for value in done.values() if value["local_bytes"] or value["stack_bytes"]]
    most = max(value["registers"] for value in done.values())
    print(f"{len(done)} kernels, at most {most} registers, {len(spills)} with spills or a stack")


if __name__ == "__main__":
    main()
