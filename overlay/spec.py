"""What a patch says about itself: plain frozen data.

A patch is one module with a global ``PATCH`` on top and its functions below it. Because the functions come
later in the file, the specification names them by string; the catalogue checks that each name exists. A patch
module imports neither torch nor vLLM at its top: the launcher reads the specification and must stay light.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Exactness(str, Enum):
    """How far the answers under a patch may differ from the stock server's, from strict to loose."""

    BITWISE = "bitwise"  # the same logits, bit by bit
    BATCH = "batch"  # the same kernels at another padded size: stock differs from itself in the same way
    ROUNDING = "rounding"  # another kernel or summation order: the same mathematics

    def allows(self, other: Exactness) -> bool:
        """Whether settings of this class admit a patch of class ``other``."""
        order = list(Exactness)
        return order.index(other) <= order.index(self)


class Kind(str, Enum):
    CODE = "code"  # wraps or replaces functions of the live code
    CONFIG = "config"  # only adds to vLLM's own arguments or environment
    MODULE = "module"  # loads another file in place of one of the build's modules


class Verdict(str, Enum):
    """The outcome of planning one patch."""

    APPLY = "apply"
    OFF = "off"  # by settings
    INAPPLICABLE = "inapplicable"  # a condition failed, named in the reason
    SUPERSEDED = "superseded"  # the build does it already
    REFUSED = "refused"  # drift, conflict or a missing target


# The process in which a code patch has to be in force before the server may serve.
WORKER, ENGINE, API = "worker", "engine", "api"

# ``Target.how``
WRAP = "wrap"  # ``use`` is a wrapt wrapper: (wrapped, instance, args, kwargs) -> result
REPLACE = "replace"  # ``use`` is a factory: (original) -> plain function (traced or captured code: no proxies)


@dataclass(frozen=True)
class Target:
    """One object of the build that a patch replaces, or (in ``Patch.assumes``) relies on.

    at: ``module:qualname``, or ``module`` alone for a whole file (module patches).
    use: the name, in the patch's module, of the wrapper or factory (for a module patch: the file's name beside it).
    how: ``wrap`` or ``replace``.
    fingerprints: build (``"vllm 0.26.0"``, ``"vllm-ascend 0.23.0"``) -> digest of the source it was verified against.
    versions: the range of vLLM releases in which this target exists and is wanted; empty means all of the patch's.
    """

    at: str
    use: str = ""
    how: str = WRAP
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    versions: str = ""

    @property
    def module(self) -> str:
        return self.at.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.at.partition(":")[2]


@dataclass(frozen=True)
class Condition:
    """Where a patch may be used. Every part that fails gives a reason of its own; an unknown fact fails.

    vllm: range over the public version, such as ``">=0.18.1,<0.34"``.
    plugins: ranges over the public version of platform plugins that must be there, by distribution name.
    runner: ``"V1"`` or ``"V2"``: the model runner that the build will choose.
    platforms: ``cuda``, ``rocm``, ``dcu``, ``ascend``, ``cpu``: any of these.
    archs: device architectures (``sm90``, ``gfx936``, ``ascend910_93``): any of these.
    architectures: model architectures (``Qwen3_5ForConditionalGeneration``): any of these.
    facts: dotted path in the facts -> the value it must have, a tuple of admitted values, or a ``Check``.
    also: the name of a function ``(facts) -> str | None`` in the patch's module that returns a reason to refuse.
    """

    vllm: str = ""
    plugins: Mapping[str, str] = field(default_factory=dict)
    runner: str = ""
    platforms: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    also: str = ""


@dataclass(frozen=True)
class Check:
    """A named test of one fact: ``Check("at least 2", lambda value: value >= 2)``."""

    what: str
    passes: Callable[[Any], bool]


def at_least(bound: int) -> Check:
    return Check(f"at least {bound}", lambda value: value >= bound)


def at_most(bound: int) -> Check:
    return Check(f"at most {bound}", lambda value: value <= bound)


@dataclass(frozen=True)
class Option:
    """A setting of one patch: its default (whose type is the option's type), what it does, the values allowed."""

    default: Any
    help: str
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Contribution:
    """What a config patch adds. The user's own value of a leaf always stands.

    args: vLLM's own options, dotted (``"compilation_config.cudagraph_capture_sizes"``) -> value.
    env: environment variables added where the user has set none.
    notes: lines for the log: what was found and what the user may want to change.
    nothing: set instead of the above where there is nothing to add: the reason.
    superseded: set instead of the above where the build or the user's settings do it already: the reason.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    nothing: str = ""
    superseded: str = ""


@dataclass(frozen=True)
class Patch:
    """The specification of one patch.

    id: kebab-case, unique in the catalogue.
    summary: one line. why: the measured inefficiency and where it was measured. remove_when: the upstream change
        that makes the patch useless.
    exactness: see ``Exactness``.
    targets: what it replaces. assumes: further targets that it relies on, fingerprinted and left alone.
    condition: where it may be used. superseded: name of a probe ``(facts) -> str | None`` in the module: the reason
        why this build does it already.
    config: name of a function ``(facts, options) -> Contribution`` (config patches).
    after, conflicts, requires: ids of other patches. One that it requires has to be in force in the same process, or this one
        is not; it is applied behind them and behind those in ``after``.
    process: where a code patch must be in force: ``worker``, ``engine`` or ``api``.
    live: paths from the worker to objects whose class must carry the patch (``"model_runner"``,
        ``"model_runner.input_batch.block_table.block_tables.0"``): proof that the patched class is the one in use.
        A path that does not exist in the live worker means: not in force.
    after_call: ``module:qualname`` of a function after whose first return the patch is applied, in place of the
        import of its targets (a platform that patches itself late).
    advert: name of a function ``(facts) -> str | None`` in the module: one line on what the patch measured to bring on this
        hardware and model, printed at a start whose settings leave it off.
    default: whether ``profile: auto`` switches it on where it applies and the class of exactness allows it.
    verified: ``"real"`` where it ran on the hardware it is for, ``"simulated"`` where it did not.
    tests, measured: where its test and its measured effect are (paths in the checkout).
    """

    id: str
    kind: Kind
    summary: str
    why: str
    remove_when: str
    exactness: Exactness
    targets: tuple[Target, ...] = ()
    assumes: tuple[Target, ...] = ()
    condition: Condition = field(default_factory=Condition)
    superseded: str = ""
    config: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    process: str = WORKER
    live: tuple[str, ...] = ()
    after_call: str = ""
    advert: str = ""
    default: bool = True
    verified: str = "real"
    tests: str = ""
    measured: str = ""
