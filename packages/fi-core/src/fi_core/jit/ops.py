"""Specs of fi's own ops: `gen_module(word)` for a family, such as "norm", or for one op, such as "rmsnorm"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fi_core import prebuilt
from fi_core.build import sources
from fi_core.jit import core
from fi_core.registry import launcher, ops
from fi_core.spec.dtype import short_name
from fi_core.spec.op import Op, Spec
from fi_core.spec.target import CPU, Target

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def words() -> tuple[str, ...]:
    """What `gen_module` takes."""
    return tuple(dict.fromkeys((*(op.family for op in ops().values()), *ops())))


def default_targets() -> tuple[Target, ...]:
    """The architectures of FI_CUDA_ARCH_LIST or of the visible GPUs; the CPU where there is none."""
    return core.context().targets() or (CPU,)


def specs_of(
    wanted: Iterable[Op], targets: Iterable[Target], keep: Callable[[Spec], bool] = lambda spec: True
) -> Iterator[Spec]:
    """What is built ahead of the ops on the targets, each name once (CPU modules serve all axes)."""
    seen = set()
    places = tuple(targets)
    for op in wanted:
        for target in places:
            for spec in prebuilt.specs(op, target):
                if keep(spec) and spec.name not in seen:
                    seen.add(spec.name)
                    yield spec


@dataclass(frozen=True)
class OpModule(core.JitSpec):
    """Some specs of some ops; loaded, a namespace with one function per op, which takes the arguments of its schema."""

    specs: tuple[Spec, ...]

    @classmethod
    def of(cls, name: str, specs: Iterable[Spec]) -> OpModule:
        kept = tuple(specs)
        return cls(name, tuple(dict.fromkeys(a for spec in kept for a in sources.artifacts(spec))), kept)

    def load(self) -> SimpleNamespace:
        self._load_modules()
        return SimpleNamespace(**{spec.op.name: launcher(spec.op.name) for spec in self.specs})


def view(spec: Spec) -> OpModule:
    """One spec as a JitSpec."""
    return OpModule.of(spec.name, (spec,))


def gen_module(word: str, *, targets: Iterable[Target] | None = None, **axes: Any) -> core.JitSpec:
    """What is built ahead of a family or an op, narrowed to some values of its axes (dtypes of torch, or short names).

    targets: default_targets() if None. Compiles nothing. Raises ValueError if nothing is left.
    """
    chosen = [op for op in ops().values() if word in (op.family, op.name)]
    if not chosen:
        raise ValueError(f"word: a family or an op is required, which are {', '.join(words())}; got {word!r}")
    return _module(word, chosen, targets, axes)


def gen_act_and_mul_module(act_func_name: str, *, targets: Iterable[Target] | None = None, **axes: Any) -> core.JitSpec:
    """`gen_module` for one activation; all of them are in the same files."""
    if act_func_name not in ACTIVATIONS:
        raise ValueError(f"act_func_name: allowed are {', '.join(ACTIVATIONS)}; got {act_func_name!r}")
    return _module(f"{act_func_name}_and_mul", [ops()["act_and_mul"]], targets, axes)


def _module(name: str, chosen: list[Op], targets: Iterable[Target] | None, axes: dict[str, Any]) -> core.JitSpec:
    wanted = {axis: short_name(value) if type(value).__name__ == "dtype" else value for axis, value in axes.items()}

    def keep(spec: Spec) -> bool:
        values = dict(spec.axes)
        return all(axis in values and values[axis] == value for axis, value in wanted.items())

    places = default_targets() if targets is None else tuple(targets)
    specs = tuple(specs_of(chosen, places, keep))
    if not specs:
        asked = ", ".join(f"{axis}={value}" for axis, value in wanted.items())
        raise ValueError(f"{name}({asked}): nothing is built ahead for that on {', '.join(map(str, places))}")
    made = OpModule.of("_".join([name, *(f"{axis}_{value}" for axis, value in wanted.items())]), specs)
    core.jit_spec_registry.register(made)
    return made
