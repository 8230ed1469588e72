"""Cases from the descriptions of fi_core: inputs, outputs, reference, work and tolerances are those of its tests.

A case adds what a description cannot know: sizes from flags, the timed call, peers, and the outputs to poison.
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
from fi_core.observe.trace import Described, select_template

Compared = Callable[[Inputs, Outputs], Outputs]


@functools.cache
def _described(name: str) -> tuple[Described, ...]:
    """The descriptions of a function below fi_core (of a functools.partial the one inside), or of a wrapper."""
    module, _, attribute = name.rpartition(".")
    found = operator.attrgetter(attribute)(importlib.import_module(f"fi_core.{module}"))
    function: Any = found.run if hasattr(found, "run") else getattr(found, "func", found)
    trace = function.fi_trace.trace
    templates = [trace] if isinstance(trace, TraceTemplate) else getattr(trace, "templates", ())
    return tuple(Described(function, template) for template in templates)


def description_of(name: str, arguments: Mapping[str, Any]) -> TraceTemplate:
    """The description of a call of a function or wrapper, given by its name below fi_core."""
    function: Any = _described(name)[0].function
    found = select_template(function, function.fi_trace.trace, arguments)
    if found is None:
        raise LookupError(f"fi_core.{name} has no description of these arguments")
    return found


def sample(
    name: str,
    which: Callable[[Namespace, TraceTemplate], bool] | None,
    sizes: Mapping[str, Any],
    p: Namespace,
    device: Any,
    generator: Any,
) -> Inputs:
    """Arguments of one call; `which` chooses among several descriptions."""
    templates = (found.template for found in _described(name))
    template = next(template for template in templates if which is None or which(p, template))
    return Inputs(template.sample(device, generator, nasty=False, **sizes))


def sizes_of(p: Namespace, *same: str, **flags: str) -> dict[str, Any]:
    """Sizes from flags: those of the same name, and `size=flag`. Names of data types become data types."""
    asked = {**{name: name for name in same}, **flags}
    return {
        size: dtype_of(getattr(p, flag)) if flag.endswith("_dtype") else getattr(p, flag)
        for size, flag in asked.items()
    }


def eager(function: str, x: Inputs) -> Any:
    """The torch peer of a description, with its arguments as they are chosen in the first, untimed call."""
    call = x.__dict__.get("eager")
    if call is None:
        template = description_of(function, x)
        assert template.eager is not None
        call = x.__dict__["eager"] = functools.partial(template.eager, **template.values(x))
    return call()


def public_backend(name: str, _: Inputs) -> dict[str, Any]:
    """`backend=` of a wrapper, for the name of a backend."""
    return {"backend": "auto" if name == "cpu" else name}


def described(
    function: str,
    sizes: Callable[[Namespace], Mapping[str, Any]],
    call: Callable[[Any, Inputs], Any] | None,
    torch: Callable[[Inputs], Any] | None,
    *,
    which: Callable[[Namespace, TraceTemplate], bool] | None = None,
    backend: Callable[[str, Inputs], Mapping[str, Any]] | None = None,
    add: Callable[[Namespace, Inputs], Mapping[str, Any]] | None = None,
    compared: Compared | None = None,
    **more: Any,
) -> Case:
    """The case of a function or wrapper of fi_core that has a description.

    sizes     flags -> sizes of the description's `make`
    call      the timed call; None: with the arguments of the description
    which     chooses among several descriptions of the function
    backend   for a wrapper: (name of a backend, inputs) -> what it changes in the arguments of constructor and plan
    add       more inputs: preallocated outputs, options that are not tensors, inputs of peers
    torch     returns the outputs in the order of the description, also those that the function writes in place
    compared  (inputs, outputs) -> what is checked, where several results are right; it applies to the reference too
    """

    def make(p: Namespace, device: Any, generator: Any) -> Inputs:
        x = sample(function, which, sizes(p), p, device=device, generator=generator)
        if add is not None:
            x.update(add(p, x))
        return x

    def checked(x: Inputs, outputs: Outputs) -> Outputs:
        return outputs if compared is None else compared(x, outputs)

    def in_order(x: Inputs, returned: Any) -> Outputs:
        results = returned if isinstance(returned, tuple) else (returned,)
        return checked(x, dict(zip(description_of(function, x).outputs, results, strict=False)))

    def plan(wrapper: Callable[..., Any], x: Inputs, name: str) -> Any:
        planned = description_of(function, x).plan
        assert planned is not None
        assert backend is not None
        return planned(wrapper, {**x, **backend(name, x)})

    def timed(made: Any, x: Inputs) -> Any:
        # The choice of arguments takes longer than a small kernel: it is made in the first, untimed call.
        own = x.__dict__.get("own")
        if own is None:
            own = x.__dict__["own"] = _described(function)[0].own(x)
        return (made.run if has_plan else made)(**own)

    has_plan = backend is not None

    def work(p: Namespace, x: Inputs) -> Any:
        found = _described(function)[0]
        taken = x if found.wrapper else inspect.signature(found.function).parameters
        return description_of(function, x).work_of({name: x[name] for name in taken if name in x})

    fields: dict[str, Any] = {
        "routine": function.rpartition(".")[2],
        "function": function,
        "make": make,
        "call": call or timed,
        "outputs": lambda x, returned: checked(x, description_of(function, x).results(x, returned)),
        "reference": lambda x: checked(x, description_of(function, x).expected(x)),
        "work": work,
        "plan": plan if backend else None,
        "torch": torch,
        "torch_outputs": in_order,
        "description": functools.partial(description_of, function),
    }
    return Case(**{**fields, **more})
