"""Compiles the kernels of a model, or of specs, before their first call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fi_core.registry import load
from fi_core.runtime import files
from fi_core.runtime.build import sources
from fi_core.runtime.dispatch import AUTO, Request, choose
from fi_core.runtime.resolve import build_missing, compiled, start, warn_of_compiles
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Spec
from fi_core.runtime.spec.target import CPU, Target


@dataclass(frozen=True)
class Model:
    """What decides the kernels of a decoder's step.

    Args:
        num_qo_heads, num_kv_heads, head_dim: of a layer.
        soft_cap: whether scores are capped.
        dtype: short name of the dtype of activations.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    soft_cap: bool = False
    dtype: str = "bf16"

    @classmethod
    def of_config(cls, config: Any) -> Model:
        """The model of a transformers configuration, an object or a dict.

        Raises:
            ValueError: it lacks the number of heads, or its attention is not over paged keys and values.
        """

        def get(name: str) -> Any:
            """A setting of the text model, whose configuration may be within that of several."""
            places = (_setting(config, "text_config"), config)
            return next((found for place in places if (found := _setting(place, name)) is not None), None)

        if get("kv_lora_rank"):
            raise ValueError("model: attention with latent keys (kv_lora_rank) cannot be prepared by a configuration")
        heads, hidden = get("num_attention_heads"), get("hidden_size")
        head_dim = get("head_dim") or (hidden // heads if heads and hidden else None)
        if not heads or not head_dim:
            raise ValueError("model: num_attention_heads, and head_dim or hidden_size, are required of a configuration")
        return cls(
            heads,
            get("num_key_value_heads") or heads,
            head_dim,
            bool(get("attn_logit_softcapping")),
            _dtype(get("dtype") or get("torch_dtype") or "bfloat16", "dtype"),
        )


MODELS = {
    "llama-1b": Model(32, 8, 64),
    "llama-3b": Model(24, 8, 128),
    "llama-8b": Model(32, 8, 128),
    "llama-70b": Model(64, 8, 128),
    "mistral-7b": Model(32, 8, 128),
    "qwen3-0.6b": Model(16, 8, 128),
    "qwen3-8b": Model(32, 8, 128),
    "qwen3-32b": Model(64, 8, 128),
    "gemma2-2b": Model(8, 4, 256, soft_cap=True),
    "gemma2-9b": Model(16, 8, 256, soft_cap=True),
    "gemma2-27b": Model(32, 16, 128, soft_cap=True),
    "gemma3-4b": Model(8, 4, 256),
    "gemma3-27b": Model(32, 16, 128),
    "gpt-oss-20b": Model(64, 8, 64),
}


def _setting(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _dtype(value: Any, name: str) -> str:
    """The short name of a dtype: of torch, or a name such as "bfloat16" or "bf16"."""
    word = str(value).removeprefix("torch.") if type(value).__name__ in ("dtype", "str") else ""
    found = next((d.short for d in DTYPES.values() if word in (d.short, d.torch)), None)
    if found is None:
        raise ValueError(f"{name}: a dtype such as bfloat16, float16 or float8_e4m3fn is required; got {value!r}")
    return found


def model_of(model: Any) -> Model:
    """A Model by its name in MODELS, by a folder with transformers' config.json, or by a configuration.

    Raises:
        ValueError: there is none of that name, or the configuration does not tell.
    """
    if isinstance(model, Model):
        return model
    if not isinstance(model, (str, Path)):
        return Model.of_config(model)
    if str(model) in MODELS:
        return MODELS[str(model)]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return Model.of_config(json.loads(files.content(path)))
    import difflib

    close = difflib.get_close_matches(str(model), MODELS, 3, 0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"names are {', '.join(MODELS)}"
    raise ValueError(f"model: a name, or a folder with config.json, is required; got {str(model)!r}; {hint}")


def specs_of_model(
    model: Any, target: Target, *, kv_dtype: Any = None, page_size: int = 16, backend: str = AUTO
) -> list[Spec]:
    """The specs of a step of a dense model on an engine: norms, activation, rope, cache, attention, sampling.

    Args:
        model: as for `model_of`.
        target: where it runs.
        kv_dtype: of the cache; None: the model's dtype.
        page_size: tokens of a page.
        backend: of the attention wrappers.

    Raises:
        ValueError: an argument.
        UnsupportedError: no kernel of the backend serves the model.
    """
    return list(iterate_specs(model, target, kv_dtype, page_size, backend))


def files_of(specs: Iterable[Spec]) -> Iterator[Artifact]:
    """The files of specs: device binaries, which take longest, as the specs are iterated, then host modules."""
    hosts: list[Artifact] = []
    for spec in specs:
        host, *device = sources.artifacts(spec)
        hosts.append(host)
        yield from device
    yield from hosts


def iterate_specs(
    model: Any, target: Target, kv_dtype: Any = None, page_size: int = 16, backend: str = AUTO
) -> Iterator[Spec]:
    """`specs_of_model`, one after the other: the first compiles while the family of the next is imported."""
    of = model_of(model)
    one = {"dtype": of.dtype}
    attention = {
        "q": of.dtype,
        "kv": of.dtype if kv_dtype is None else _dtype(kv_dtype, "kv_dtype"),
        "out": of.dtype,
        "head_dim_qk": of.head_dim,
        "head_dim_vo": of.head_dim,
        "group_size": of.num_qo_heads // of.num_kv_heads,
        "page_size": page_size,
        "soft_cap": of.soft_cap,
    }
    wanted: list[tuple[str, str, dict[str, Any]]] = [  # those that compile longest come first
        # NVRTC 13.0, one core, bf16 and head dim 128: sample 2.0 s, batch_prefill 1.8, batch_decode 1.3. Logits are of
        # the model's dtype, or an engine has converted them to fp32.
        ("sampling", "sample", {**one, "draws": True}),
        ("sampling", "sample", {"dtype": "f32", "draws": True}),
        ("attention", "batch_prefill", attention),
        ("attention", "batch_decode", attention),
        ("attention", "prefill_plan", {}),
        ("attention", "decode_plan", {}),
        *(("norm", "rmsnorm", {**one, "out": of.dtype, "residual": residual}) for residual in (False, True)),
        ("rope", "rope", one),
        ("activation", "act_and_mul", one),
        ("page", "append_paged_kv_cache", {}),
        ("page", "get_batch_indices_positions", {}),
    ]
    for family, name, values in wanted:
        op = load(family)[name].op
        yield choose(Request.of(op, target, values, backend if values is attention else AUTO)).spec


def prepare(
    what: Any,
    *,
    device: Any = None,
    kv_dtype: Any = None,
    page_size: int = 16,
    backend: str = AUTO,
    wait: bool = True,
    progress: bool | None = None,
    rebuild: bool = False,
) -> int:
    """Compiles the kernels of a model, or of specs, that are neither prebuilt nor in the store, in parallel.

    A serving engine calls it with its model's configuration before it loads the weights: `wait=False` returns at once,
    and calls that need a kernel wait for that kernel alone.

    Args:
        what: a name such as "llama-8b" (the keys of `fi_core.ahead.MODELS`), a folder with transformers' config.json,
            such a configuration, or an iterable of specs.
        device: torch device, or a Target, for which a model is prepared; None: the current CUDA device, or the CPU
            where torch sees none.
        kv_dtype: dtype of a model's KV cache; None: its own dtype.
        page_size: of a model's KV cache.
        backend: of a model's attention.
        wait: return when all is compiled; errors are raised here. False: errors surface in the calls.
        progress: print a line per file; None: only on a terminal.
        rebuild: also compile files that exist.

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
        specs = iterate_specs(what, _target(device), kv_dtype, page_size, backend)
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

    from fi_core.runtime.launch.operator import target_of

    if device is None:
        return target_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else CPU
    return target_of(torch.device(device))
