"""What serving engines use besides the operators: FlashInfer's import name, autotuner, backend decorators."""

from __future__ import annotations


def install() -> None:
    """Makes `import flashinfer` give fi in this process. Processes that it starts need `fi-core exec`.

    Raises:
        RuntimeError: another flashinfer is imported already.
    """
    from fi_core.compat.alias import install_here

    install_here()
