"""Finding out what is here, one module a subject. Nothing here imports vLLM or torch or makes a device context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlay.facts import Facts
    from overlay.serve_args import ServeArgs

# Variables that change what vLLM or a platform does: a facts file may hold them, and a plan may look at them.
PREFIXES = ("VLLM_", "CUDA_VISIBLE", "HIP_VISIBLE", "ROCR_VISIBLE", "ASCEND_", "TORCH_DEVICE_BACKEND", "TRITON_", "HCU_")
NAMES = ("SOC_VERSION", "CUDA_DEVICE_ORDER", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS")
SECRET = ("KEY", "TOKEN", "PASSWORD", "SECRET", "CREDENTIAL")


@dataclass(frozen=True)
class Detected:
    """facts: what is here. args: the command line as this release reads it; None where the program is not the server or
    the release's options could not be read (the reason is then in ``facts.unknown["serving"]``).
    """

    facts: Facts
    args: ServeArgs | None = None


def detect(argv: Sequence[str] | None, environ: Mapping[str, str], path: Sequence[str] | None = None) -> Detected:
    """Look at this machine.

    argv: the words behind ``vllm serve``, or None for another program. path: where to look for vLLM (default: where this
    interpreter would import it from).
    """
    from overlay.argument_grammar import GrammarError, load
    from overlay.detect.build import find_build
    from overlay.detect.hardware import find_hardware
    from overlay.detect.model import find_model
    from overlay.detect.serving import find_serving
    from overlay.facts import Facts, Model, Serving
    from overlay.serve_args import MISSING, ServeArgs

    build, unknown = find_build(path)
    hardware, more = find_hardware(build, environ)
    unknown.update(more)
    model, serving, args = Model(), Serving(speculative_method=None, num_speculative_tokens=None), None
    if argv is None:
        unknown["model"] = unknown["serving"] = "the program is not `vllm serve`: it chooses its own model and arguments"
    elif build.root is None:
        unknown["model"] = unknown["serving"] = "there is no vLLM to read the command line with"
    else:
        try:
            args = ServeArgs.parse(argv, load(build.root))
        except GrammarError as error:
            unknown["model"] = unknown["serving"] = f"this release's options cannot be read: {error}"
    if args is not None:

        def given(option: str) -> str | None:
            value = args.get(option)  # type: ignore[union-attr]
            return None if value is MISSING else value

        model, more = find_model(
            args.model,
            environ,
            revision=given("revision"),
            download_dir=given("download_dir"),
            hf_config_path=given("hf_config_path"),
            hf_overrides=given("hf_overrides"),
            root=build.root,
        )
        unknown.update(more)
        serving, more = find_serving(args, build, hardware, model, environ)
        unknown.update(more)
    return Detected(Facts(build, hardware, model, serving, relevant(environ), unknown), args)


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter here, without those that may hold a secret."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name.startswith(PREFIXES) or name in NAMES) and not any(part in name for part in SECRET)
    }
