"""CompilationContext: the CUDA architectures to compile for, from FI_CUDA_ARCH_LIST or from the visible GPUs."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from fi_core.runtime.build import compiler, diagnose
from fi_core.runtime.build.driver import driver
from fi_core.runtime.env import env
from fi_core.runtime.spec.target import CPU, Target, cuda_target, default_suffix, parse_arch


class CompilationContext:
    """The CUDA architectures to compile for.

    `TARGET_CUDA_ARCHS` holds (major, minor with suffix), such as (9, "0a"), from FI_CUDA_ARCH_LIST or else from the
    visible GPUs. A suffix in the list is kept; otherwise `spec.target.default_suffix` chooses it. Without GPUs the set
    is empty; a driver that fails is logged and raises nothing.
    """

    COMMON_NVCC_FLAGS: ClassVar[list[str]] = list(compiler.DEVICE_FLAGS)

    def __init__(self) -> None:
        self.TARGET_CUDA_ARCHS: set[tuple[int, str]] = {parse_arch(word) for word in env.cuda_arch_list}
        if not self.TARGET_CUDA_ARCHS:
            found = driver()
            if found and found.problem:
                diagnose.logger().warning("no GPU to compile for: %s", found.problem)
            for gpu in found.gpus if found else ():
                major, minor = gpu.capability
                self.TARGET_CUDA_ARCHS.add((major, default_suffix(major, minor)))

    @staticmethod
    def _normalize_cuda_arch(major: int, minor: int) -> tuple[int, str]:
        """Returns the element of `TARGET_CUDA_ARCHS` for a GPU of this compute capability."""
        return major, default_suffix(major, minor)

    def targets(self) -> tuple[Target, ...]:
        """Returns the targets of calls on GPUs of these architectures, oldest first; capability decides the suffix."""
        capabilities = {(major, int(minor.rstrip("af"))) for major, minor in self.TARGET_CUDA_ARCHS}
        return tuple(cuda_target(major, minor) for major, minor in sorted(capabilities))

    def get_nvcc_flags_list(
        self, supported_major_versions: Collection[int] | None = None, map_sm107_to_100f: bool = False
    ) -> list[str]:
        """Returns `-gencode` flags of the architectures, then COMMON_NVCC_FLAGS.

        Args:
            supported_major_versions: keeps the architectures with these major versions; None keeps all.
            map_sm107_to_100f: whether sm_107 is compiled for the family of sm_100.

        Raises:
            RuntimeError: No architecture is left.
        """
        archs = [
            "100f" if map_sm107_to_100f and (major, minor) in ((10, "7"), (10, "7a"), (10, "7f")) else f"{major}{minor}"
            for major, minor in sorted(self.TARGET_CUDA_ARCHS)
            if supported_major_versions is None or major in supported_major_versions
        ]
        if not archs:
            wanted = "" if supported_major_versions is None else f" for major versions {list(supported_major_versions)}"
            raise RuntimeError(f"No supported CUDA architectures found{wanted}.")
        flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in dict.fromkeys(archs)]
        return [*flags, *self.COMMON_NVCC_FLAGS]


def parse_target(word: str) -> Target:
    """Parses a target: "cpu", "sm_90a", "90a" or "9.0a". Without a suffix it is the target of calls on such a GPU.

    Raises:
        ValueError: word is not a target.
    """
    if word == "cpu":
        return CPU
    match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)([af]?)", word)
    if not match:
        raise ValueError(f"target: expected cpu, or an architecture such as sm_90a or 9.0; got {word!r}")
    major, minor, suffix = match.groups()
    return Target("cuda", f"{major}{minor}{suffix}") if suffix else cuda_target(int(major), int(minor))
