"""Cases from the descriptions of fi_core: inputs, outputs, reference, work and tolerances are those of its tests.

A case adds what a description cannot know: sizes from flags, the timed call, baselines, and the outputs to poison.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from fi_bench.case import Case, Inputs, Outputs, dtype_of
from fi_core.observe.template import TraceTemplate
from fi_core.observe.trace import Trace, select_template

Compared = Callable[[Inputs, Outputs], Outputs]


@functools.cache
def _function(name: str) -> Any:
    """A function by its name below fi_core; of a functools.partial the function inside."""
    module, _, attribute = name.rpartition(".")
    found = operator.attrgetter(attribute)(importlib.import_module(f"fi_core.{module}"))
    return getattr(found, "func", found)


def _trace(function: str) -> Trace:
    trace: Trace = _function(function).fi_trace.trace
    return trace


def description_of(function: str, arguments: Mapping[str, Any]) -> TraceTemplate:
    """The description of a call of a function, given by its name below fi_core."""
    found = select_template(_trace(function), arguments)
    if found is None:
        raise LookupError(f"fi_core.{function} has no description of these arguments")
    return found


def sample(
    function: str,
    which: Callable[[Namespace, TraceTemplate], bool] | None,
    sizes: Mapping[str, Any],
    p: Namespace,
    device: Any,
    generator: Any,
) -> Inputs:
    """Arguments of one call; `which` chooses among several descriptions of the function."""
    trace = _trace(function)
    templates = [trace] if isinstance(trace, TraceTemplate) else list(getattr(trace, "templates", ()))
    template = next(template for template in templates if which is None or which(p, template))
    return Inputs(template.sample(device, generator, nasty=False, **sizes))


def sizes_of(p: Namespace, *same: str, **flags: str) -> dict[str, Any]:
    """Sizes from flags: those of the same name, and `size=flag`. Names of data types become data types."""
    asked = {**{name: name for name in same}, **flags}
    return {
        size: dtype_of(getattr(p, flag)) if flag.endswith("_dtype") else getattr(p, flag)
        for size, flag in asked.items()
    }


def described(
    function: str,
    sizes: Callable[[Namespace], Mapping[str, Any]],
    call: Callable[[Any, Inputs], Any],
    torch: Callable[[Inputs], Any] | None,
    *,
    which: Callable[[Namespace, TraceTemplate], bool] | None = None,
    add: Callable[[Namespace, Inputs], Mapping[str, Any]] | None = None,
    compared: Compared | None = None,
    **more: Any,
) -> Case:
    """The case of a function of fi_core that has a description.

    sizes     flags -> sizes of the description's `make`
    which     chooses among several descriptions of the function
    add       more inputs: preallocated outputs, options that are no tensors, inputs of baselines
    torch     returns the outputs in the order of the description, also those that the function writes in place
    compared  (inputs, outputs) -> what is checked, where several results are right; it applies to the reference too
    """

    def make(p: Namespace, device: Any, generator: Any) -> Inputs:
        x = sample(function, which, sizes(p), p, device, generator)
        if add is not None:
            x.update(add(p, x))
        return x

    def checked(x: Inputs, outputs: Outputs) -> Outputs:
        return outputs if compared is None else compared(x, outputs)

    def in_order(x: Inputs, returned: Any) -> Outputs:
        results = returned if isinstance(returned, tuple) else (returned,)
        return checked(x, dict(zip(description_of(function, x).outputs, results, strict=False)))

    def work(p: Namespace, x: Inputs) -> Any:
        count = description_of(function, x).work
        assert count is not None
        return count({name: x[name] for name in inspect.signature(_function(function)).parameters if name in x})

    fields: dict[str, Any] = {
        "routine": function.rpartition(".")[2],
        "function": function,
        "make": make,
        "call": call,
        "outputs": lambda x, returned: checked(x, description_of(function, x).results(x, returned)),
        "reference": lambda x: checked(x, description_of(function, x).expected(x)),
        "work": work,
        "torch": torch,
        "torch_outputs": in_order,
        "description": functools.partial(description_of, function),
    }
    return Case(**{**fields, **more})
