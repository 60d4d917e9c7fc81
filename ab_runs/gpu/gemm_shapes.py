"""Decode products (N, K) of the models that the GEMM figures are reported for, TP = 1, in layer order."""

MODELS: dict[str, list[tuple[int, int]]] = {
    "Qwen3-0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    "Qwen3-4B": [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (151936, 2560)],
    "Qwen3-8B": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
    "Llama-3.1-8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "Qwen3.5-27B": [
        (16384, 5120), (96, 5120), (5120, 6144), (14336, 5120), (34816, 5120), (5120, 17408), (248320, 5120),
    ],
    "Qwen3-32B": [(10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600), (151936, 5120)],
}  # fmt: skip


def shapes() -> list[tuple[int, int]]:
    return list(dict.fromkeys(shape for model in MODELS.values() for shape in model))
