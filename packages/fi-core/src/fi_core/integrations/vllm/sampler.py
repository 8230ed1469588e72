"""vLLM's sampling by top-k and top-p on fi's kernels, from the logits, in one launch.

vLLM has no seam there, so two functions of TARGET are replaced, where their parameters are those of PARAMETERS. Rows
that are greedy or have a seed of their own stay vLLM's, as its samplers decide, and penalties, which it applies before.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.platforms import current_platform

from fi_core.runtime.invariance import is_on
from fi_core.sampling import top_k_top_p_sampling_from_logits

if TYPE_CHECKING:
    import torch

TARGET = "vllm.v1.sample.ops.topk_topp_sampler"
IMPORTERS = ("vllm.v1.worker.gpu.sample.sampler",)  # which have the functions under their own name
PARAMETERS = {
    "flashinfer_sampler_supported": (),
    "flashinfer_sample": ("logits", "k", "p", "generators"),
}
_log = logging.getLogger("vllm.plugins.fi_core")


def register() -> None:
    """Replaces the functions; the log names one that has changed, and none is replaced then."""
    module = importlib.import_module(TARGET)
    for name, wanted in PARAMETERS.items():
        function = getattr(module, name, None)
        if function is None or tuple(inspect.signature(function).parameters) != wanted:
            _log.info("fi does not replace %s.%s: it is not that of a supported vLLM", TARGET, name)
            return
    for owner in (module, *(sys.modules[name] for name in IMPORTERS if name in sys.modules)):
        vars(owner).update(flashinfer_sampler_supported=is_used, flashinfer_sample=sample)


def is_used() -> bool:
    """Whether fi samples: unless VLLM_USE_FLASHINFER_SAMPLER=0, or batch invariant, where rows need their own seeds."""
    return bool(current_platform.is_cuda() and envs.VLLM_USE_FLASHINFER_SAMPLER and not is_on())


def sample(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, generators: dict[int, Any] | None = None
) -> torch.Tensor:
    """`[rows]`, int32: a token of each row of logits `[rows, vocabulary]`, within its k likeliest and its share p."""
    top_k = logits.shape[1] if k is None else k
    tokens: torch.Tensor = top_k_top_p_sampling_from_logits(logits, top_k, 1.0 if p is None else p)
    return tokens.view(-1)
