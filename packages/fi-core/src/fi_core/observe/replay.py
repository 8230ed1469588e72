"""Run dumped calls again (see observe/dump.py) and compare what they return with what they returned then."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fi_core.observe.dump import encode_result
from fi_core.observe.template import default_check

if TYPE_CHECKING:
    import torch

RTOL = ATOL = 1e-3
Registry = dict[int, Any]  # self_id of a dump -> the object that stands for it now


def replay_from_dump(
    dump_dir: str | Path,
    compare_outputs: bool = False,
    device: str | torch.device = "cuda",
    run: bool = False,
    object_registry: Registry | None = None,
) -> dict[str, Any]:
    """The arguments of one dumped call, and with `run` what the call gives now.

    Tensors that were on a GPU go to `device`; those on the CPU stay there. Methods need the object they were called
    on in `object_registry`, which a replayed `__init__` fills. The keys: args, kwargs, metadata; with `run`
    execution_result or execution_error; with `compare_outputs` expected_tensors, and if it ran comparison_match.
    """
    directory = Path(dump_dir)
    metadata = _metadata(directory)
    tensors = _load(directory / "inputs.pt", metadata, device)
    described = metadata["input_metadata"]
    values = {key: _decode(key, about, tensors, device) for key, about in described.items() if about["type"] != "self"}
    args = [value for key, value in values.items() if key.startswith("arg_")]
    kwargs = {key.removeprefix("kwarg_"): value for key, value in values.items() if key.startswith("kwarg_")}
    result: dict[str, Any] = {"args": args, "kwargs": kwargs, "metadata": metadata}
    if compare_outputs:
        path = directory / "outputs.pt"
        result["expected_tensors"] = _load(path, metadata, device) if path.exists() else {}
    if run:
        registry = {} if object_registry is None else object_registry
        try:
            result["execution_result"] = _call(metadata, args, kwargs, registry)
        except Exception as error:
            result["execution_error"] = f"{type(error).__name__}: {error}"
        if compare_outputs:
            result["comparison_match"] = "execution_error" not in result and _matches(result)
    return result


def replay_sequence(root_dir: str | Path, device: str | torch.device = "cuda") -> list[dict[str, Any]]:
    """Run and compare every dumped call below `root_dir` in the order of the session, objects included."""
    registry: Registry = {}
    results = []
    for directory in _calls(Path(root_dir)):
        try:
            result = replay_from_dump(directory, True, device, True, registry)
        except Exception as error:  # a damaged dump
            result = {"execution_error": f"{type(error).__name__}: {error}", "comparison_match": False}
        results.append({"dump_dir": str(directory), **result})
    return results


def _calls(root: Path) -> Iterator[Path]:
    if (root / "metadata.jsonl").exists():
        yield root
        return
    if not (root / "session.jsonl").exists():
        raise FileNotFoundError(f"root_dir: a dump (metadata.jsonl) or a session of dumps is required, got {root}")
    seen: dict[str, None] = {}  # a dict keeps the order
    for line in (root / "session.jsonl").read_text(encoding="utf-8").splitlines():
        seen[Path(json.loads(line)["dump_dir"]).name] = None  # the session may have moved since
    yield from (root / name for name in seen)


def _metadata(directory: Path) -> dict[str, Any]:
    path = directory / "metadata.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"dump_dir: a directory with metadata.jsonl is required, got {directory}")
    return json.loads(path.read_text(encoding="utf-8").splitlines()[-1])  # type: ignore[no-any-return]


def _target(recorded: str, device: str | torch.device) -> str:
    return "cpu" if recorded == "cpu" else str(device)


def _load(path: Path, metadata: dict[str, Any], device: str | torch.device) -> dict[str, torch.Tensor]:
    import torch

    tensors = {}
    for key, saved in torch.load(path, map_location="cpu", weights_only=True).items():
        details = metadata["tensor_details"][key]
        tensor = _with_stride(saved, details["stride"], _target(details["device"], device))
        tensors[key] = tensor.requires_grad_() if details["requires_grad"] else tensor
    return tensors


def _with_stride(saved: torch.Tensor, stride: list[int], device: str) -> torch.Tensor:
    import torch

    once = saved
    for axis, step in enumerate(stride):  # an expanded axis holds one element, seen many times
        if step == 0 and saved.numel():
            once = once.narrow(axis, 0, 1)
    target = torch.empty_strided(once.shape, stride, dtype=saved.dtype, device=device)
    return target.copy_(once).expand(saved.shape)


def _class(path: str) -> Any:
    module, qualname = path.split(":")
    return _follow(module, qualname)


def _follow(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _decode(key: str, about: dict[str, Any], tensors: dict[str, torch.Tensor], device: str | torch.device) -> Any:
    kind = about["type"]
    if kind == "tensor":
        return tensors[key]
    if kind in ("list", "tuple"):
        items = [_decode(f"{key}__{i}", item, tensors, device) for i, item in enumerate(about["items"])]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {name: _decode(f"{key}__{name}", item, tensors, device) for name, item in about["items"].items()}
    if kind == "enum":
        return _class(about["class"])[about["name"]]
    if kind in ("dtype", "device"):
        import torch

        value = about["value"]
        return getattr(torch, value) if kind == "dtype" else torch.device(_target(value, device))
    if kind == "object":
        raise ValueError(f"{key}: an object of {about['class']} cannot be made from a dump: {about['repr']}")
    return about["value"]


def _call(metadata: dict[str, Any], args: list[Any], kwargs: dict[str, Any], registry: Registry) -> Any:
    function = _follow(metadata["module"], metadata["qualname"])
    identity = metadata.get("self_id")
    if identity is None:
        return function(*args, **kwargs)
    if metadata["qualname"].endswith(".__init__"):
        cls = _class(metadata["input_metadata"]["arg_0"]["class"])
        owner = _follow(metadata["module"], metadata["qualname"].removesuffix(".__init__"))
        known = registry.get(identity)
        if type(known) is not cls or owner is cls:  # else this is the super().__init__ of an object just made
            registry[identity] = known = cls.__new__(cls)
        return function(known, *args, **kwargs)
    if identity not in registry:
        raise LookupError(
            f"object_registry: the object that {metadata['function_name']} was called on (id {identity}) is required; "
            "replay the whole session, in which its __init__ was dumped"
        )
    return function(registry[identity], *args, **kwargs)


def _matches(result: dict[str, Any]) -> bool:
    """Whether everything that was returned then came out again."""
    tensors: dict[str, torch.Tensor] = {}
    described = encode_result(result["execution_result"], tensors)
    recorded, expected = result["metadata"]["output_metadata"], result["expected_tensors"]
    if described.keys() != recorded.keys() or tensors.keys() != expected.keys():
        return False
    return all(_same(recorded[key], described[key]) for key in recorded) and all(
        default_check(expected[key], tensors[key], rtol=RTOL, atol=ATOL, min_cos_sim=-1.0) for key in expected
    )


def _same(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether two descriptions agree; of tensors and foreign objects only the kind is in them."""
    if then["type"] != now["type"]:
        return False
    if "items" in then:
        a, b = then["items"], now["items"]
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
        return len(a) == len(b) and all(map(_same, a, b))
    if then["type"] == "float":
        a, b = then["value"], now["value"]
        return math.isclose(a, b, rel_tol=RTOL, abs_tol=ATOL) or (math.isnan(a) and math.isnan(b))
    return all(then.get(key) == now.get(key) for key in ("value", "class", "name"))
