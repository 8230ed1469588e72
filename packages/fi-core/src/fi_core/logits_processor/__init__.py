"""Pipelines from logits to tokens: processors become operators, of which neighbours run as one kernel.

`LogitsPipe([Temperature(), Softmax(), TopK(), TopP(), Sample()])` checks that the processors fit each other. A call
`pipe(logits, temperature=0.7, top_k=40, top_p=0.9)` gives the tokens; these five are one call of
`fi_core.sample_from_logits`. A processor of your own subclasses `LogitsProcessor` and returns its operators from
`legalize`; an operator subclasses `Op`, or `ParameterizedOp` if it takes arguments. `FusionRule` replaces neighbours by
an operator of your own.
"""

from __future__ import annotations

from fi_core.logits_processor.compiler import Compiler, FusionRule, compile_pipeline
from fi_core.logits_processor.op import CompileError, LegalizationError, Op, ParameterizedOp
from fi_core.logits_processor.pipeline import LogitsPipe, legalize_processors
from fi_core.logits_processor.processors import LogitsProcessor, MinP, Sample, Softmax, Temperature, TopK, TopP
from fi_core.logits_processor.types import TaggedTensor, TensorType

__all__ = [
    "CompileError",
    "Compiler",
    "FusionRule",
    "LegalizationError",
    "LogitsPipe",
    "LogitsProcessor",
    "MinP",
    "Op",
    "ParameterizedOp",
    "Sample",
    "Softmax",
    "TaggedTensor",
    "Temperature",
    "TensorType",
    "TopK",
    "TopP",
    "compile_pipeline",
    "legalize_processors",
]
