"""What a worker knows of itself: every fact that a code patch may ask for, from the installed vLLM's configuration objects.

Under ``--overlay-exec`` the plan knows nothing of the model and the arguments: a fact that is missing here leaves a patch off
in every such process.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlay.catalog import load_catalog
from overlay.facts import Build, Facts
from overlay.live_facts import live
from overlay.spec import Kind


def asked() -> set[str]:
    """Facts of the serving and the model that conditions name."""
    patches = [entry.patch for entry in load_catalog().values() if entry.patch.kind is Kind.CODE]
    named = {path for patch in patches for path in patch.condition.facts}
    return {path for path in named if path.startswith(("serving.", "model."))}


def test_a_worker_knows_every_fact_that_a_code_patch_asks_for() -> None:
    vllm = pytest.importorskip("vllm")
    from tests.v1.lab import make_checkpoint, make_config

    config = make_config(make_checkpoint(Path(tempfile.mkdtemp()) / "model", False))
    planned = Facts(build=Build("vllm", vllm.__version__, root=str(Path(vllm.__file__).parent)))
    found = live(planned, SimpleNamespace(vllm_config=config), "V1")
    assert len(asked()) > 10
    assert [path for path in sorted(asked()) if found.get(path) is None] == []


def test_where_routed_experts_are_asked_for_the_fact_says_so() -> None:
    pytest.importorskip("vllm")
    from tests.v1.lab import make_checkpoint, make_config

    config = make_config(make_checkpoint(Path(tempfile.mkdtemp()) / "model", False))
    worker = SimpleNamespace(vllm_config=config)
    assert live(Facts(), worker, "V1").serving.routed_experts is False
    owner = getattr(config, "aux_output_config", config.model_config)
    owner.enable_return_routed_experts = True
    assert live(Facts(), worker, "V1").serving.routed_experts is True
