"""FP4 quantization under FlashInfer's earlier module path; the functions are in fi_core.quantization."""

from fi_core.quantization.fp4_quantization import *  # noqa: F403
from fi_core.quantization.fp4_quantization import __all__ as __all__
