"""Compiles the kernels of a model, or of specs, before their first call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fi_core.profiles import DEFAULT, MODELS, Model, Options, calls, model_of
from fi_core.registry import load
from fi_core.runtime.build import sources
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.resolve import build_missing, compiled, start, warn_of_compiles
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.op import Spec
from fi_core.runtime.spec.target import CPU, Target

__all__ = ["MODELS", "Model", "Options", "files_of", "iterate_specs", "model_of", "prepare", "specs_of_model"]


def specs_of_model(model: Any, target: Target, **options: Any) -> list[Spec]:
    """The specs of a step of a model on an engine: norms, activation, rope, cache, attention, experts, linear
    attention, sampling.

    Args:
        model: as for `model_of`.
        target: where it runs.
        options: fields of `Options`.

    Raises:
        ValueError: an argument.
        UnsupportedError: no kernel of the backend serves the model.
    """
    return list(iterate_specs(model, target, Options(**options)))


def files_of(specs: Iterable[Spec]) -> Iterator[Artifact]:
    """The files of specs: device binaries, which take longest, as the specs are iterated, then host modules."""
    hosts: list[Artifact] = []
    for spec in specs:
        host, *device = sources.artifacts(spec)
        hosts.append(host)
        yield from device
    yield from hosts


def iterate_specs(model: Any, target: Target, options: Options = DEFAULT) -> Iterator[Spec]:
    """`specs_of_model`, one after the other: the first compiles while the family of the next is imported."""
    seen: set[Spec] = set()
    for call in calls(model_of(model), options):
        op = load(call.family)[call.op].op
        for values in call.of_layer(op):
            try:
                spec = choose(Request.of(op, target, values, call.backend)).spec
            except UnsupportedError:
                if not call.optional:
                    raise
                continue
            if spec not in seen:
                seen.add(spec)
                yield spec


def prepare(
    what: Any,
    *,
    device: Any = None,
    wait: bool = True,
    progress: bool | None = None,
    rebuild: bool = False,
    **options: Any,
) -> int:
    """Compiles the kernels of a model, or of specs, that are neither prebuilt nor in the store, in parallel.

    A serving engine calls it with its model's configuration before it loads the weights: `wait=False` returns at once,
    and calls that need a kernel wait for that kernel alone.

    Args:
        what: a name such as "llama-8b" (the keys of `fi_core.ahead.MODELS`), a folder with transformers' config.json,
            such a configuration, or an iterable of specs.
        device: torch device, or a Target, for which a model is prepared; None: the current CUDA device, or the CPU
            where torch sees none.
        wait: return when all is compiled; errors are raised here. False: errors surface in the calls.
        progress: print a line per file; None: only on a terminal.
        rebuild: also compile files that exist.
        options: how a model is served, the fields of `fi_core.ahead.Options`: kv_dtype, page_size, tp and others.

    Returns:
        The number of files that were missing.

    Raises:
        TypeError: what is none of these.
        ValueError: what, or an option of a model.
        UnsupportedError: no kernel of the backend serves the model.
        CompileError: the first unit that fails.
        MissingKernelError: FI_JIT=off, and a file is missing.
    """
    configured = any(hasattr(what, name) for name in ("num_attention_heads", "text_config"))  # and iterable, too
    if configured or isinstance(what, (str, Path, Mapping, Model)):
        specs = iterate_specs(what, _target(device), Options(**options))
    else:
        specs = _given(what)
    if wait or rebuild:
        return build_missing(files_of(specs), progress=progress, rebuild=rebuild)
    return start(files_of(specs))


def compiled_files() -> tuple[str, ...]:
    """The names of the files that this process has compiled, in order. None is added while an engine serves, if all was
    prepared: compare two results.
    """
    return tuple(compiled)


def serving(on: bool = True) -> None:
    """Whether an engine serves: a warning is then logged, on "fi_core.jit", for each file that is compiled. An engine
    calls it after its first answer.
    """
    warn_of_compiles(on)


def _given(what: Any) -> Iterator[Spec]:
    specs = list(what) if isinstance(what, Iterable) else [what]
    for spec in specs:
        if not isinstance(spec, Spec):
            raise TypeError(f"what: a model's name, folder or configuration, or specs are required; got {spec!r}")
    return iter(specs)


def _target(device: Any) -> Target:
    if isinstance(device, Target):
        return device
    import torch

    from fi_core.runtime.machine import target_of

    if device is None:
        return target_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else CPU
    return target_of(torch.device(device))
