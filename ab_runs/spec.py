"""What is compared, under which load, how often, and what counts as a difference: the YAML of a comparison.

    name: smollm2-spine
    model: ${OVERLAY_CACHE}/smollm2  # environment variables are expanded; --model takes its place
    flags: [--enforce-eager]         # vllm serve flags of every arm
    env: {VLLM_CPU_KVCACHE_SPACE: "1"}
    arms:                            # the first one is the base
      stock: "off"
      spine: {only: [block-table-dirty]}
    workload: {preset: 512-128-c1, requests: 8}
    order: ABBA
    boots: 4                         # per arm
    seed: 0
    acceptance: {margin: 1%}

Every error names the file, the key and what was expected. Unknown keys are errors, with the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ab_runs.presets import PRESETS

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SPECS = Path(__file__).resolve().parent / "specs"


class SpecError(Exception):
    """A comparison that cannot be run as written. The message says where and what to do."""


def _percent(value: Any) -> Any:
    """``1%`` or ``0.01``; a bare number of 1 or more is refused, because it could mean either."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d+(\.\d+)?\s*%\s*", value):
        return float(value.strip().rstrip("% ")) / 100
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
        raise ValueError("write a share such as 0.01, or a percentage such as 1%")
    return value


Share = Annotated[float, BeforeValidator(_percent), Field(gt=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(_Part):
    """One patch set.

    config: the launcher's YAML (a path beside the spec or a name in ``configs/``), ``off`` for the stock server, or
    nothing for what the launcher chooses by itself. patches: toggles on top of it (``+id``, ``-id``). only: exactly
    these patches and no other. launch: ``launch.py``, or ``vllm`` for the build's own ``vllm serve``.
    """

    config: str | None = None
    patches: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    exactness: Literal["bitwise", "batch", "rounding"] | None = None
    launch: Literal["launch.py", "vllm"] = "launch.py"

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"config": value}
        if value is False:  # a bare ``off`` is a boolean in YAML
            return {"config": "off"}
        if isinstance(value, dict) and value.get("config") is False:
            return {**value, "config": "off"}
        if isinstance(value, list):
            return {"patches": value}
        return value

    @model_validator(mode="after")
    def _check(self) -> Arm:
        for toggle in self.patches:
            if not re.fullmatch(r"[+-][A-Za-z0-9][\w.-]*", toggle):
                raise ValueError(
                    f"patches: {toggle!r} is no toggle: write +id to switch a patch on, -id to switch it off"
                )
        if self.only is not None:
            if self.patches or self.config == "off":
                raise ValueError("only: names the whole set, so it goes neither with patches nor with config: off")
            for name in self.only:
                if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
                    raise ValueError(f"only: {name!r} is no patch id")
        if self.config == "off" and self.patches:
            raise ValueError("patches: config off switches every patch off; use only: [ids] for exactly these patches")
        if self.launch == "vllm" and (self.patches or self.only or self.exactness or self.config not in (None, "off")):
            raise ValueError("launch: vllm is the stock server; it takes no config and no patches")
        return self

    @property
    def stock(self) -> bool:
        return self.launch == "vllm" or self.config == "off"

    @property
    def wanted(self) -> set[str]:
        """The patches that the arm switches on by name."""
        return {toggle[1:] for toggle in self.patches if toggle[0] == "+"} | set(self.only or ())


class Workload(_Part):
    """The load, in the terms of ``vllm bench serve``.

    input_range: [lowest, highest] tokens, in place of input_len. requests: measured ones. warmup: requests of the same
    shape before them (default: two rounds of the concurrency). extra: further flags of ``vllm bench serve``; a
    ``--dataset-name`` there takes the place of the random data set.
    """

    preset: str | None = None
    input_len: Positive | None = None
    input_range: tuple[Positive, Positive] | None = None
    output_len: Positive = 128
    concurrency: Positive = 1
    requests: Positive = 32
    warmup: Annotated[int, Field(ge=0)] | None = None
    request_rate: Annotated[float, Field(gt=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] = 0.0
    extra: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"preset": value}
        name = value.get("preset") if isinstance(value, dict) else None
        if name is None:
            return value
        if name not in PRESETS:
            raise ValueError(f"preset: no workload is named {name!r}. Known: {', '.join(PRESETS)}")
        known = dict(PRESETS[name][1])
        if "input_len" in value or "input_range" in value:
            known.pop("input_len", None), known.pop("input_range", None)
        return {**known, **value}

    @model_validator(mode="after")
    def _check(self) -> Workload:
        if (self.input_len is None) == (self.input_range is None):
            raise ValueError("give one of input_len and input_range (or a preset)")
        if self.input_range and self.input_range[0] > self.input_range[1]:
            raise ValueError("input_range: [lowest, highest] is the wrong way round")
        return self

    @property
    def longest_input(self) -> int:
        return self.input_range[1] if self.input_range else int(self.input_len or 0)

    @property
    def warmup_requests(self) -> int:
        return 2 * self.concurrency if self.warmup is None else self.warmup


class Exactness(_Part):
    """How answers are compared.

    prompts: ``builtin`` or a YAML file with a list of texts. count: how many of them. near_tie: the largest gap of
    log-probabilities that still is a tie. boots: of each arm that answer (the base needs two to show that it repeats
    itself). quality: ``auto`` measures it where an arm has a ``rounding`` patch. quality_drop: the largest loss of mean
    token log-probability (nats) that is accepted.
    """

    prompts: str = "builtin"
    count: Positive = 8
    max_tokens: Positive = 48
    top_logprobs: Annotated[int, Field(ge=2, le=20)] = 5
    near_tie: Annotated[float, Field(ge=0)] = 0.1
    boots: Annotated[int, Field(ge=0)] = 2
    quality: Literal["auto", "always", "never"] = "auto"
    quality_drop: Annotated[float, Field(gt=0)] = 0.02


class Acceptance(_Part):
    """margin: a difference no larger than this is none. drift: the largest change from the first to the last base boot.
    min_boots: per arm, below which nothing is concluded.
    """

    primary: Literal["mean_tpot", "p99_tpot", "mean_ttft", "output_throughput"] = "mean_tpot"
    margin: Share = 0.01
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    min_boots: Annotated[int, Field(ge=1)] = 3
    drift: Share = 0.05


class Server(_Part):
    """Seconds to wait for: a healthy server, the end of the load, a clean stop. python: the interpreter with vLLM."""

    python: str | None = None
    start_timeout: Positive = 900
    load_timeout: Positive = 1800
    stop_timeout: Positive = 60


class Spec(_Part):
    """A comparison. ``base`` is its first arm."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    model: str
    flags: tuple[str, ...] = ()
    env: dict[str, str] = {}
    prefix_caching: bool = False
    arms: dict[str, Arm]
    workload: Workload
    order: Literal["ABBA", "ABA"] = "ABBA"
    boots: Positive = 4
    seed: Annotated[int, Field(ge=0)] = 0
    exactness: Exactness = Exactness()
    acceptance: Acceptance = Acceptance()
    server: Server = Server()
    notes: str = ""

    @model_validator(mode="after")
    def _check(self) -> Spec:
        if len(self.arms) < 2:
            raise ValueError("arms: a comparison needs two or more; the first one is the base")
        for name in self.arms:
            if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
                raise ValueError(f"arms: {name!r} is no name: lower-case letters, digits, dots, dashes")
        seen: dict[Any, str] = {}
        for name, arm in self.arms.items():
            only = None if arm.only is None else frozenset(arm.only)
            key = "stock" if arm.stock else (arm.config, frozenset(arm.patches), only, arm.exactness)
            if key in seen:
                raise ValueError(
                    f"arms: {seen[key]!r} and {name!r} are equal, so there is nothing to compare. "
                    "The A-against-A control comes from the base's own boots and needs no arm"
                )
            seen[key] = name
        if self.order == "ABBA" and self.boots % 2:
            raise ValueError(
                f"boots: the order ABBA boots each arm twice, so {self.boots} cannot be reached; use an even number"
            )
        for flag in self.flags:
            if flag.startswith("--overlay-"):
                raise ValueError(f"flags: {flag} belongs to an arm, not to all of them")
            if re.match(r"--(host|port|uds)\b", flag):
                raise ValueError(f"flags: {flag} is chosen by the runner")
        return self

    @property
    def base(self) -> str:
        return next(iter(self.arms))

    @property
    def serve_flags(self) -> tuple[str, ...]:
        """The flags of ``vllm serve`` of every arm: the spec's, and no prefix caching unless the spec wants it."""
        mine = [flag.replace("_", "-") for flag in self.flags]
        if any(re.match(r"--(no-)?enable-prefix-caching\b", flag) for flag in mine):
            return self.flags
        return (*self.flags, "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching")


def load(path: Path, **overrides: Any) -> Spec:
    """Read and check a spec. ``path`` may also be the name of one in ``ab_runs/specs/``.

    overrides: top-level settings from the command line (``model``, ``boots``). Raises SpecError.
    """
    if not path.exists() and (SPECS / f"{path}.yaml").exists():
        path = SPECS / f"{path}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}). Shipped specs: {', '.join(shipped())}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise SpecError(f"{path}: expected a mapping with the keys {', '.join(Spec.model_fields)}")
    content |= {key: value for key, value in overrides.items() if value is not None}
    return parse(content, str(path), path.parent)


def shipped() -> list[str]:
    return sorted(path.stem for path in SPECS.glob("*.yaml"))


def parse(content: dict[str, Any], where: str = "spec", folder: Path | None = None) -> Spec:
    """Check a spec given as plain data and make its paths absolute. Raises SpecError."""
    try:
        spec = Spec.model_validate(content)
    except ValidationError as error:
        raise SpecError("\n".join(f"{where}: {_say(problem)}" for problem in error.errors())) from error
    model = os.path.expandvars(spec.model)
    if "$" in model:
        raise SpecError(f"{where}: model: {spec.model} is not set in the environment; set it or use --model")
    arms = {
        name: arm.model_copy(update={"config": _config(arm, name, where, folder)}) for name, arm in spec.arms.items()
    }
    prompts = spec.exactness.prompts
    if prompts != "builtin":
        file = (folder or Path()) / prompts
        if not file.exists():
            raise SpecError(f"{where}: exactness.prompts: {file} does not exist")
        prompts = str(file.resolve())
    exactness = spec.exactness.model_copy(update={"prompts": prompts})
    return spec.model_copy(update={"model": model, "arms": arms, "exactness": exactness})


def _config(arm: Arm, name: str, where: str, folder: Path | None) -> str | None:
    if arm.config in (None, "off", "auto"):
        return None if arm.config == "auto" else arm.config
    tried = [(folder or Path()) / arm.config, CONFIGS / arm.config, CONFIGS / f"{arm.config}.yaml"]
    for file in tried:
        if file.is_file():
            return str(file.resolve())
    raise SpecError(f"{where}: arms.{name}.config: no file {arm.config!r} beside the spec or in configs/")


def _say(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _known(problem["loc"])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, 1)
        return f"{where}: unknown key" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}")
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    shown = f" (found {given!r})" if isinstance(given, str | int | float) and where else ""
    return f"{where}: {message}{shown}" if where else message


def _known(loc: tuple[Any, ...]) -> list[str]:
    parts = {"arms": Arm, "workload": Workload, "exactness": Exactness, "acceptance": Acceptance, "server": Server}
    return list((parts.get(loc[0], Spec) if len(loc) > 1 else Spec).model_fields)
