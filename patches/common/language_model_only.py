"""Serve a multimodal model for text alone.

With every modality's limit at zero (``--language-model-only``) vLLM passes token ids to the model, and the embedding is part
of the graph. Otherwise each step of a multimodal model, text-only requests included, embeds the tokens outside the graph
and copies the result in. Requests with images, video or audio are then refused, so nobody but the user can decide it:
the patch is off until it is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlay.spec import Condition, Contribution, Exactness, Kind, Patch

if TYPE_CHECKING:
    from overlay.facts import Facts

PATCH = Patch(
    id="language-model-only",
    kind=Kind.CONFIG,
    summary="Text-only serving of a multimodal model keeps the embedding inside the graph (--language-model-only)",
    why="Every step of a multimodal model runs embed_input_ids and a copy outside the graph, in V1 and V2.",
    remove_when="vLLM embeds text-only steps inside the graph",
    exactness=Exactness.BITWISE,
    condition=Condition(
        vllm=">=0.18.1,<0.34",
        platforms=("cuda", "rocm", "dcu"),
        facts={"model.multimodal": True, "model.encoder_decoder": False},
    ),
    config="contribute",
    default=False,
    verified="simulated",
    tests="tests/config_patches/test_config_patches.py",
)


def contribute(facts: Facts, options: Mapping[str, Any]) -> Contribution:
    return Contribution(
        args={"language_model_only": True},
        notes=("requests with images, video or audio are refused from now on (language-model-only)",),
    )
