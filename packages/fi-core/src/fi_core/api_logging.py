"""FlashInfer's names of the API log, its traces and replays."""

from __future__ import annotations

from fi_core.observe.log import fi_api as flashinfer_api
from fi_core.observe.log import logger
from fi_core.observe.replay import replay_from_dump, replay_sequence
from fi_core.observe.trace import _TRACE_REGISTRY

__all__ = ["_TRACE_REGISTRY", "flashinfer_api", "logger", "replay_from_dump", "replay_sequence"]
