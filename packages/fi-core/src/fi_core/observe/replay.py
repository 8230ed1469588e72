"""Run dumped calls again (see observe/dump.py) and compare their results with the dumped ones.

A dump is data, perhaps from elsewhere: it names functions and classes, which are looked up among those that `fi_api`
marks, and nothing is imported or run by another name. Tensors load with weights_only, paths stay below the folder, and
source code of an attention variant is not compiled.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fi_core.observe.api import api_class, api_function, name_of
from fi_core.observe.comparison import default_check
from fi_core.observe.encode import Record, check_device, decode, dtype_of, encode_result

if TYPE_CHECKING:
    import torch

RTOL = ATOL = 1e-3
Registry = dict[int, Any]  # self_id of a dump -> the object of the replay
_CODE = ("jit_args", "jit_kwargs")  # arguments that hold source code
_ALIGNMENT = 64  # bytes: an address is kept modulo this


@dataclass
class _Session:
    """State that the calls of one replay share: objects, and tensors by their recorded address."""

    target: str | torch.device
    objects: Registry = field(default_factory=dict)
    tensors: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    moved: bool = False  # device memory became host memory

    def device(self, recorded: str) -> str:
        """The device that replaces a recorded one; host memory stays on the host."""
        if check_device(recorded) == "cpu":
            return "cpu"
        self.moved = self.moved or str(self.target) == "cpu"
        return str(self.target)

    def allocate(self, about: Record) -> torch.Tensor:
        """A tensor like a recorded one, zeros; that of an earlier call if it was the same memory."""
        import torch

        shape, stride, dtype = tuple(about["shape"]), tuple(about["stride"]), dtype_of(about["dtype"])
        device, address = self.device(about["device"]), about.get("address", 0)
        if self.moved and about["device"] == "cpu":
            address = 0  # NOTE: plan copied host tables to the device, but keeps them here: none may be written again
        known = self.tensors.get((device, address)) if address else None
        if known is not None and (known.shape, known.stride(), known.dtype) == (shape, stride, dtype):
            return known
        elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride)) if math.prod(shape) else 0
        first = address % _ALIGNMENT // dtype.itemsize if elements else 0
        flat = torch.zeros(first + elements, dtype=dtype, device=device)
        made = flat.as_strided(shape, stride, first)
        if address:
            self.tensors[device, address] = made
        return made

    def load(self, path: Path, metadata: Record, fresh: bool = False) -> dict[str, torch.Tensor]:
        """The tensors of a file. fresh: none of them is memory of an earlier call."""
        import torch

        loaded = {}
        with torch.no_grad():
            for key, saved in torch.load(path, map_location="cpu", weights_only=True).items():
                about = metadata["tensor_details"][key]
                about = {**about, "address": 0} if fresh else about
                tensor = self.allocate(about).detach()
                _copy(tensor, saved)
                loaded[key] = tensor.requires_grad_() if about["requires_grad"] else tensor
        return loaded


def _copy(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    for axis, step in enumerate(tensor.stride()):  # an expanded axis holds one element, seen many times
        if step == 0 and saved.numel():
            saved, tensor = saved.narrow(axis, 0, 1), tensor.narrow(axis, 0, 1)
    tensor.copy_(saved)


def replay_from_dump(
    dump_dir: str | Path,
    compare_outputs: bool = False,
    device: str | torch.device = "cuda",
    run: bool = False,
    object_registry: Registry | None = None,
) -> dict[str, Any]:
    """The arguments of one dumped call, and with `run` its result now.

    Tensors that were on a GPU go to `device`; those on the CPU stay there. Methods need the object they were called
    on in `object_registry`, which a replayed `__init__` fills. The keys: args, kwargs, metadata; with `run`
    execution_result or execution_error; with `compare_outputs` expected_tensors (results by name, and by their
    argument names the tensors that the call wrote), and if it ran comparison_match.

    Raises FileNotFoundError (no dump), ValueError or LookupError (the dump holds a value that cannot be decoded).
    """
    session = _Session(device)
    if object_registry is not None:
        session.objects = object_registry
    return _replay(Path(dump_dir), compare_outputs, run, session)


def _replay(directory: Path, compare_outputs: bool, run: bool, session: _Session) -> dict[str, Any]:
    metadata = _metadata(directory)
    tensors = session.load(_inside(directory, "inputs.pt"), metadata)
    described = metadata["input_metadata"]
    values = {key: decode(key, about, tensors, session) for key, about in described.items() if about["type"] != "self"}
    args = [value for key, value in values.items() if key.startswith("arg_")]
    kwargs = {key.removeprefix("kwarg_"): value for key, value in values.items() if key.startswith("kwarg_")}
    result: dict[str, Any] = {"args": args, "kwargs": kwargs, "metadata": metadata}
    path = _inside(directory, "outputs.pt")
    saved = path.exists() and metadata.get("outputs_saved", True)
    if compare_outputs:
        result["expected_tensors"] = session.load(path, metadata, fresh=True) if saved else {}
    if run:
        try:
            result["execution_result"] = _call(metadata, args, kwargs, tensors, session)
        except Exception as error:
            result["execution_error"] = f"{type(error).__name__}: {error}"
        if compare_outputs:
            if not saved and "execution_error" not in result:
                result["execution_error"] = "the outputs of the call were not saved, so none are compared"
            result["comparison_match"] = "execution_error" not in result and _matches(result, tensors)
    return result


def replay_sequence(root_dir: str | Path, device: str | torch.device = "cuda") -> list[dict[str, Any]]:
    """Run and compare every dumped call below `root_dir` in the order of the session, objects included.

    The results are those of `replay_from_dump`, with dump_dir. An error in one dump is its execution_error.
    Raises FileNotFoundError if root_dir holds neither a dump nor a session.
    """
    session = _Session(device)
    results = []
    for directory in _calls(Path(root_dir)):
        try:
            if isinstance(directory, ValueError):
                raise directory
            result = _replay(directory, True, True, session)
        except Exception as error:  # a damaged or hostile dump
            result = {"execution_error": f"{type(error).__name__}: {error}", "comparison_match": False}
        results.append({"dump_dir": str(directory), **result})
    return results


def _inside(directory: Path, name: str) -> Path:
    """A member of a folder; ValueError if the name leads out of it, also through a link."""
    path = directory / name
    if name in ("", ".", "..") or Path(name).name != name or not path.resolve().is_relative_to(directory.resolve()):
        raise ValueError(f"dump_dir: a path below {directory} is required; got {name!r}")
    if path.exists() and not (path.is_file() or path.is_dir()):  # reading a pipe or a device may never end
        raise ValueError(f"dump_dir: files are required; {name!r} is another kind")
    return path


def _calls(root: Path) -> Iterator[Path | ValueError]:
    """The dumps of a session; for a line that names none, why."""
    if (root / "metadata.jsonl").exists():
        yield root
        return
    if not (root / "session.jsonl").exists():
        raise FileNotFoundError(f"root_dir: a dump (metadata.jsonl) or a session of dumps is required, got {root}")
    seen: set[str] = set()
    for number, line in enumerate(_inside(root, "session.jsonl").read_text(encoding="utf-8").splitlines(), 1):
        try:
            recorded = json.loads(line)["dump_dir"]
            name = Path(recorded).name  # the session may have moved since
            if ".." in Path(recorded).parts:
                raise ValueError(f"dump_dir: a path below {root} is required; got {recorded!r}")
            directory = _inside(root, name)
        except Exception as error:
            yield ValueError(f"session.jsonl, line {number}: {type(error).__name__}: {error}")
            continue
        if name not in seen:
            seen.add(name)
            yield directory


def _metadata(directory: Path) -> Record:
    path = directory / "metadata.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"dump_dir: a directory with metadata.jsonl is required, got {directory}")
    metadata = json.loads(_inside(directory, path.name).read_text(encoding="utf-8").splitlines()[-1])
    for key, kind in (("module", str), ("qualname", str), ("input_metadata", dict), ("tensor_details", dict)):
        if not isinstance(metadata.get(key), kind):
            raise ValueError(f"metadata.jsonl: {key!r} of type {kind.__name__} is required; got {metadata.get(key)!r}")
    return metadata  # type: ignore[no-any-return]


def _call(
    metadata: Record, args: list[Any], kwargs: dict[str, Any], tensors: dict[str, torch.Tensor], session: _Session
) -> Any:
    """Calls the function, the method of its object, or for __init__ the class."""
    module, qualname, identity = metadata["module"], metadata["qualname"], metadata.get("self_id")
    owner, _, method = qualname.rpartition(".")
    if method == "__init__":
        cls = api_class(f"{module}:{owner}")
        _refuse_code(inspect.signature(cls).bind(*args, **kwargs).arguments)
        if type(identity) is not int:
            raise ValueError(f"self_id: a number is required; got {identity!r}")
        session.objects[identity] = cls(*args, **kwargs)
        return None
    function = api_function(f"{module}:{qualname}")
    if identity is not None or owner:
        args = [_object(metadata, f"{module}:{owner}" if owner else "", session), *args]
    bound = inspect.signature(function).bind(*args, **kwargs)
    _refuse_code(bound.arguments)
    if "default_generator" in metadata:
        bound.arguments["generator"] = decode("", metadata["default_generator"], tensors, session)
    return function(*bound.args, **bound.kwargs)


def _refuse_code(arguments: dict[str, Any]) -> None:
    for name in _CODE:
        if arguments.get(name):
            raise ValueError(f"{name}: source code from a dump is not compiled; construct the object yourself")


def _object(metadata: Record, owner: str, session: _Session) -> Any:
    """The object that a method was called on. owner: the class that defines the method, "" for a plain function."""
    identity = metadata.get("self_id")
    if identity not in session.objects:
        raise LookupError(
            f"object_registry: the object that {metadata.get('function_name')} was called on (id {identity}) is "
            "required; replay the whole session, in which its __init__ was dumped"
        )
    known = session.objects[identity]
    if owner and owner not in map(name_of, type(known).__mro__):
        raise LookupError(f"self_id: an object of {owner} is required; got one of {name_of(type(known))}")
    return known


def _matches(result: dict[str, Any], inputs: dict[str, torch.Tensor]) -> bool:
    """Whether results and written arguments equal the dumped ones."""
    tensors: dict[str, torch.Tensor] = {}
    described = encode_result(result["execution_result"], tensors)
    recorded, expected = result["metadata"]["output_metadata"], result["expected_tensors"]
    tensors |= {key: inputs[key] for key in expected if key in inputs}
    if described.keys() != recorded.keys() or tensors.keys() != expected.keys():
        return False
    return all(_same(recorded[key], described[key]) for key in recorded) and all(
        default_check(expected[key], tensors[key], rtol=RTOL, atol=ATOL, min_cos_sim=-1.0) for key in expected
    )


def _same(then: Record, now: Record) -> bool:
    """Whether two descriptions agree. For tensors and foreign objects only their kind is compared."""
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
