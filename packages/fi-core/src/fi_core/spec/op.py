"""Op: what is declared once per kernel; Spec: one frozen, printable choice of it, which names the artifacts to find."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fi_core.errors import UnsupportedError
from fi_core.spec.constraint import Constraint
from fi_core.spec.target import Target

Axes = Mapping[str, object]


class Entry(NamedTuple):
    """One `__global__` function of a unit: its name, the device template it instantiates, and its config.

    `config` are the op's own integers; the launcher receives them in this order when the kernel is bound.
    """

    name: str
    body: str
    threads: int
    config: tuple[int, ...] = ()
    shared_bytes: int = 0
    blocks_per_sm: int = 0  # 0: the compiler's choice of registers


class Unit(NamedTuple):
    """A device translation unit: which header, which parameter struct, which entries.

    variant: the text of a user's attention variant, which then stands before the header, and whose arguments entries
    take as a second parameter. flags: more for the compiler.
    """

    header: str
    params: str
    entries: tuple[Entry, ...]
    variant: str = ""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Impl:
    """One way to compute an op. `unit` (CUDA only) chooses the kernel's config: a pure function of the axes
    and of the capability, which stands beside them."""

    name: str
    constraints: tuple[Constraint, ...]
    unit: Callable[[Axes], Unit] | None = None

    def refusals(self, values: Mapping[str, object]) -> tuple[str, ...]:
        """The constraints that do not hold, in words; empty if this implementation takes the values."""
        return tuple(c.refusal(values) for c in self.constraints if not c.holds(values))


@dataclass(frozen=True)
class Op:
    """A kernel as declared by its family.

    `schema` is the torch.library schema of the out-variant, whose arguments are the launcher's in order. `axes` maps
    each axis (what is fixed per model) to the values that some implementation takes. `impls` are in order of
    preference. `prebuilt` lists the axes that the binary packages ship; empty means all combinations.
    """

    name: str
    family: str
    schema: str
    axes: Mapping[str, tuple[object, ...]]
    impls: tuple[Impl, ...]
    prebuilt: tuple[Axes, ...] = ()
    doc: str = field(default="", compare=False)

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def source(self) -> str:
        """The host entry, relative to the fi-kernels root."""
        return f"csrc/{self.family}/{self.name}.cc"

    def grid(self) -> Iterator[dict[str, object]]:
        """The axes that are built ahead of time."""
        if self.prebuilt:
            yield from (dict(axes) for axes in self.prebuilt)
        else:
            yield from (dict(zip(self.axes, combo)) for combo in itertools.product(*self.axes.values()))

    def impl(self, name: str) -> Impl:
        for impl in self.impls:
            if impl.name == name:
                return impl
        raise ValueError(f"{self.name}: impl must be one of {', '.join(i.name for i in self.impls)}; got {name!r}")

    def explain(self, target: Target, axes: Axes) -> dict[str, tuple[str, ...]]:
        """Per implementation, why it does not take these axes on this target; empty tuple = it does."""
        self._check_names(axes)
        values = {"device": target.kind, "capability": target.capability, **axes}
        wrong = tuple(
            f"requires {name} in {', '.join(map(str, allowed))}, got {axes[name]}"
            for name, allowed in self.axes.items()
            if axes[name] not in allowed
        )
        return {impl.name: impl.refusals(values) + wrong for impl in self.impls}

    def spec(self, target: Target, axes: Axes, impl: str | None = None) -> Spec:
        """The spec of the first implementation that takes the axes on the target, or of the named one.

        Raises UnsupportedError with the reason of each implementation if none does.
        """
        reasons = self.explain(target, axes)
        if impl is not None:
            self.impl(impl)
            reasons = {impl: reasons[impl]}
        chosen = next((name for name, why in reasons.items() if not why), None)
        if chosen is None:
            asked = ", ".join(f"{k}={v}" for k, v in axes.items())
            raise UnsupportedError(f"{self.name}({asked}) is not supported on {target}:", reasons)
        return Spec(self, chosen, target, tuple((name, axes[name]) for name in self.axes))

    def _check_names(self, axes: Axes) -> None:
        if set(axes) != set(self.axes):
            raise ValueError(
                f"{self.name}: axes must be {', '.join(self.axes) or 'none'}; got {', '.join(axes) or 'none'}"
            )


class Artifact(NamedTuple):
    """One file to find or build. `source` is a path below the fi-kernels root (host) or a rendered unit (device).

    A module of a user has an absolute path, or is a rendered unit too, which has many lines; and it has compiler flags
    of its own, and folders in which its headers lie.
    """

    name: str
    kind: str  # "cpu" or "cuda" (host modules), "cubin" (device binary)
    target: Target
    source: str
    flags: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name}.cubin" if self.kind == "cubin" else f"{self.name}.so"

    @property
    def rendered(self) -> bool:
        """Whether `source` is the translation unit itself."""
        return self.kind == "cubin" or "\n" in self.source

    @property
    def id(self) -> str:
        """The key of prebuilt indexes."""
        return f"{self.kind}/{self.target}/{self.name}"


@dataclass(frozen=True)
class Spec:
    """What is asked (op, target, axes) and what was chosen (impl): hashable, printable, enough to build it."""

    op: Op
    impl: str
    target: Target
    axes: tuple[tuple[str, object], ...]

    @property
    def name(self) -> str:
        """The URI: one per compile-time configuration, fit for a file name."""
        if self.target.kind == "cpu":
            return f"{self.op.name}_cpu"
        words = [self.op.name, *(f"{k}_{v}" for k, v in self.axes), self.impl, str(self.target)]
        return "_".join(words)

    def unit(self) -> Unit | None:
        choose = self.op.impl(self.impl).unit
        return choose({**dict(self.axes), "capability": self.target.capability}) if choose else None

    def on(self, target: Target) -> Spec:
        """The same choice for another target."""
        return Spec(self.op, self.impl, target, self.axes)

    def __str__(self) -> str:
        axes = ", ".join(f"{k}={v}" for k, v in self.axes)
        return f"{self.op.name}({axes}) by {self.impl} on {self.target}"
