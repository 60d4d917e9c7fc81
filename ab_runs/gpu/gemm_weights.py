"""The kernels on real weights: SmolLM2's logits by the GEMM tiles against the platform's products, on the GPU at hand.

    python ab_runs/gpu/gemm_weights.py --gguf FILE --tokens FILE.json --records FILE.jsonl --out FILE

A plain forward pass (RMSNorm, rotary embedding, attention in torch, products merged as vLLM merges them) over pieces of
English text, every linear layer and lm_head by one of: the platform's product over the piece (``stock``), the same in groups
of 16 and of 1 row (``stock 16``, ``stock 1``: how far stock is from itself at another batch size), and the tiles in groups
of 16 and of 1 row. Recorded: the mean negative log likelihood per piece, and every position where the best token differs
from stock's, with the gap between stock's two best logits there.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

HEADS, KV_HEADS, HEAD, EPS, THETA, LAYERS = 9, 3, 64, 1e-5, 100000.0, 30
Q4_1, Q8_0, F32 = 3, 8, 0


def read_gguf(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a GGUF file in fp32 on the GPU; types F32, Q4_1 and Q8_0."""
    data = memoryview(path.read_bytes())
    at = 8

    def number(kind: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + kind, data, at)
        at += struct.calcsize(kind)
        return value

    def text() -> str:
        nonlocal at
        size = number("Q")
        at += size
        return bytes(data[at - size : at]).decode()

    def skip(kind: int) -> None:
        if kind == 8:
            text()
        elif kind == 9:
            inner, size = number("I"), number("Q")
            for _ in range(size):
                skip(inner)
        else:
            number({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind])

    tensors, fields = number("Q"), number("Q")
    for _ in range(fields):
        text()
        skip(number("I"))
    infos = []
    for _ in range(tensors):
        name = text()
        shape = [number("Q") for _ in range(number("I"))][::-1]
        infos.append((name, shape, number("I"), number("Q")))
    start = -(-at // 32) * 32
    raw = torch.frombuffer(bytearray(data[start:]), dtype=torch.uint8).to("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    for name, shape, kind, offset in infos:
        count = 1
        for size in shape:
            count *= size
        if kind == F32:
            value = raw[offset : offset + 4 * count].view(torch.float32)
        elif kind == Q4_1:
            block = raw[offset : offset + count // 32 * 20].view(-1, 20)
            scale, low = (
                block[:, :2].contiguous().view(torch.float16).float(),
                block[:, 2:4].contiguous().view(torch.float16).float(),
            )
            value = torch.cat([block[:, 4:] & 15, block[:, 4:] >> 4], 1).float() * scale + low
        elif kind == Q8_0:
            block = raw[offset : offset + count // 32 * 34].view(-1, 34)
            value = block[:, 2:].contiguous().view(torch.int8).float() * block[:, :2].contiguous().view(torch.float16).float()
        else:
            raise ValueError(f"{name}: GGUF type {kind} is not read here")
        found[name] = value.reshape(shape)
    return found


def unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a Q or K projection from GGUF's interleaved rotary order to halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


class Model:
    def __init__(self, path: Path) -> None:
        half = {name: value.to(torch.bfloat16) for name, value in read_gguf(path).items()}
        self.embed, self.norm = half["token_embd.weight"], half["output_norm.weight"]
        self.layers = []
        for i in range(LAYERS):
            part = {name: half[f"blk.{i}.{name}.weight"] for name in ("attn_norm", "ffn_norm", "attn_output", "ffn_down")}
            q, k = unpermuted(half[f"blk.{i}.attn_q.weight"], HEADS), unpermuted(half[f"blk.{i}.attn_k.weight"], KV_HEADS)
            part["qkv"] = torch.cat([q, k, half[f"blk.{i}.attn_v.weight"]]).contiguous()
            part["gate_up"] = torch.cat([half[f"blk.{i}.ffn_gate.weight"], half[f"blk.{i}.ffn_up.weight"]]).contiguous()
            self.layers.append(part)

    def logits(self, ids: torch.Tensor, linear: Any) -> torch.Tensor:
        """ids: [T]. Returns [T, vocabulary] in the model's dtype; ``linear(x, w)`` makes every product."""
        size = ids.shape[0]
        inverse = THETA ** (-torch.arange(0, HEAD, 2, device=ids.device).float() / HEAD)
        angle = torch.arange(size, device=ids.device).float()[:, None] * inverse
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        x = self.embed[ids]
        for layer in self.layers:
            q, k, v = linear(norm(x, layer["attn_norm"]), layer["qkv"]).split(
                [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1
            )
            q, k = rotate(q.view(size, HEADS, HEAD), cos, sin), rotate(k.view(size, KV_HEADS, HEAD), cos, sin)
            v = v.view(size, KV_HEADS, HEAD)
            k, v = (value.repeat_interleave(HEADS // KV_HEADS, 1) for value in (k, v))
            q, k, v = (value.transpose(0, 1)[None].float() for value in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).reshape(size, -1).to(x.dtype)
            x = x + linear(attended, layer["attn_output"])
            gate, up = linear(norm(x, layer["ffn_norm"]), layer["gate_up"]).chunk(2, -1)
            x = x + linear(F.silu(gate) * up, layer["ffn_down"])
        return linear(norm(x, self.norm), self.embed)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def grouped(rows: int, product: Any) -> Any:
    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cat([product(piece, w) for piece in x.split(rows)])

    return linear


def tiles(records: Path) -> Any:
    """(x, w) -> the product by the fastest tile without programmatic launch that a sweep found for exactly that shape."""
    from overlay.tune import search
    from patches._lib.gemm import kernels
    from patches._lib.gemm.table import Tile

    best = {record["cell"][1:]: Tile(**record["tried"][0][1]) for record in search.read_log(records)}
    return lambda x, w: kernels.run(best[(x.shape[0], w.shape[0], w.shape[1])], x, w)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("gguf", "tokens", "records", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--single", type=int, default=2, help="pieces that are also done one row at a time")
    args = parser.parse_args()
    start = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(args.gguf)
    pieces = [torch.tensor(piece, device=device) for piece in json.loads(args.tokens.read_text())]
    print(f"loaded after {time.monotonic() - start:.1f} s", flush=True)
    arms = {"stock 16": (16, F.linear), "tiles 16": (16, None), "stock 1": (1, F.linear), "tiles 1": (1, None)}
    if device == "cuda":
        ours = tiles(args.records)
        arms = {name: (rows, product or ours) for name, (rows, product) in arms.items()}
    result: dict = {"stock": [], **{name: [] for name in arms}, "differences": {name: [] for name in arms}}
    for number, ids in enumerate(pieces):
        stock = model.logits(ids, F.linear).float()
        result["stock"].append(F.cross_entropy(stock[:-1], ids[1:]).item())
        two = stock.topk(2).values
        for name, (rows, product) in arms.items():
            if product is None or (rows == 1 and number >= args.single):
                continue
            logits = model.logits(ids, grouped(rows, product)).float()
            result[name].append(F.cross_entropy(logits[:-1], ids[1:]).item())
            for at in (logits.argmax(-1) != stock.argmax(-1)).nonzero().flatten().tolist():
                result["differences"][name].append({"piece": number, "token": at, "gap": (two[at, 0] - two[at, 1]).item()})
        args.out.write_text(json.dumps(result))
    print(f"done after {time.monotonic() - start:.1f} s", flush=True)
    print("stock", len(pieces), "pieces of", pieces[0].shape[0], "mean nll", sum(result["stock"]) / len(pieces))
    for name in arms:
        if result[name]:
            change = [a - b for a, b in zip(result[name], result["stock"], strict=False)]
            gaps = sorted(entry["gap"] for entry in result["differences"][name])
            spread = f"{min(change):+.5f} to {max(change):+.5f}"
            print(f"{name}: nll change {sum(change) / len(change):+.5f} ({spread}) over {len(change)} pieces", end="; ")
            print(f"another best token {len(gaps)} times, stock's gap there at most {gaps[-1] if gaps else 0:.4f}")


if __name__ == "__main__":
    main()
