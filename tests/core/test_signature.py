"""Functions whose parameters are declared by other functions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from fi_core.runtime.signature import derived, takes


def declared(q: int, k: int, causal: bool = False, *, window_left: int = -1) -> None:
    """The function that declares the parameters."""


class Wrapper:
    @takes("wrapper_run", ("self", "k", "scale", "is_causal=causal", "*", "q"), declared, q=None)
    def run(self, given: dict[str, Any], scale: float = 1.0) -> tuple[dict[str, Any], float]:
        """Returns its arguments."""
        return given, scale


@takes("twice", ("k_p=k", "k_d=k"), declared)
def _twice(given: dict[str, Any]) -> dict[str, Any]:
    return given


run: Any = derived.pop("wrapper_run")  # known to checkers by its name alone
twice: Any = derived.pop("twice")


def test_parameters_are_those_that_are_declared() -> None:
    assert str(inspect.signature(run)) == (
        "(self, k: 'int', scale: 'float' = 1.0, is_causal: 'bool' = False, *, q: 'int | None' = None)"
        " -> 'tuple[dict[str, Any], float]'"
    )
    assert run is Wrapper.run and run.__doc__ == "Returns its arguments." and run.__qualname__ == "Wrapper.run"


def test_arguments_have_their_declared_names() -> None:
    assert twice(1, k_d=2) == {"k": 1, "k_d": 2}
    wrapper = Wrapper()
    assert run(wrapper, 3, q=4) == ({"k": 3, "causal": False, "q": 4}, 1.0)
    assert run(wrapper, 3, 2.0, True) == ({"k": 3, "causal": True, "q": None}, 2.0)
    with pytest.raises(TypeError, match=r"run\(\) missing 1 required positional argument: 'k'"):
        run(wrapper)
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        run(wrapper, 3, causal=True)
