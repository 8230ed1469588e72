"""Functions whose parameters are declared by other functions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from fi_core.runtime.signature import parameters, takes


def declared(q: int, k: int, causal: bool = False, *, window_left: int = -1) -> None:
    """The function that declares the parameters."""


class Wrapper:
    @takes(parameters(["self", "k", "causal", "*", "q"], declared, Any.__init__, q=None), causal="is_causal")
    def run(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns its arguments."""
        return given


def test_parameters_are_those_that_are_declared() -> None:
    assert str(inspect.signature(Wrapper.run)) == (
        "(self, k: 'int', is_causal: 'bool' = False, *, q: 'int | None' = None) -> 'dict[str, Any]'"
    )
    assert Wrapper.run.__doc__ == "Returns its arguments." and Wrapper.run.__qualname__ == "Wrapper.run"


def test_arguments_have_their_declared_names() -> None:
    assert Wrapper().run(3, q=4) == {"k": 3, "causal": False, "q": 4}  # type: ignore[call-arg, arg-type]
    assert Wrapper().run(3, True) == {"k": 3, "causal": True, "q": None}  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match=r"run\(\) missing 1 required positional argument: 'k'"):
        Wrapper().run()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        Wrapper().run(3, causal=True)  # type: ignore[call-arg]
