"""CompilationContext at FlashInfer's import path; it is defined in fi_core.compat.compilation_context."""

from __future__ import annotations

from fi_core.compat.compilation_context import CompilationContext

__all__ = ["CompilationContext"]
