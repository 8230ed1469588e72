"""FlashInfer's `trace.templates` and each family below it: the description of a public name, as `<name>_trace`.

`from fi_core.trace.templates.norm import rmsnorm_trace`; a wrapper's is `BatchDecodeWithPagedKVCacheWrapper_trace`. A
description stands beside its function here (docs/guides/adding-an-op.md), so all families share this module.
"""

from __future__ import annotations

from fi_core import registry
from fi_core.observe.template import TraceTemplate
from fi_core.runtime.errors import missing_attribute

_END = "_trace"


def _names() -> list[str]:
    import fi_core

    return [f"{name}{_END}" for name in fi_core.__all__ if registry.described(name)]


def __getattr__(name: str) -> TraceTemplate:
    found = registry.described(name.removesuffix(_END)) if name.endswith(_END) and name[0] != "_" else None
    if found is None:
        raise missing_attribute(__name__, name, () if name.startswith("_") else _names())
    return found.template


def __dir__() -> list[str]:
    return sorted({*globals(), *_names()})
