"""CompilationContext: the CUDA architectures to compile for, as the user lists them or as the visible GPUs are."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from fi_core.build import compiler, diagnose
from fi_core.build.driver import driver
from fi_core.env import env
from fi_core.spec.target import CPU, Target, cuda_target, default_suffix, parse_arch


class CompilationContext:
    """`TARGET_CUDA_ARCHS` holds (major, minor with suffix), such as (9, "0a"), from FI_CUDA_ARCH_LIST or the driver.

    A suffix that is listed is kept; else `spec.target.default_suffix` chooses it. Without GPUs the set is empty, and a
    driver that fails is only logged.
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

    def targets(self) -> tuple[Target, ...]:
        """What calls on GPUs of these architectures ask for, oldest first: the suffix follows the capability."""
        capabilities = {(major, int(minor.rstrip("af"))) for major, minor in self.TARGET_CUDA_ARCHS}
        return tuple(cuda_target(major, minor) for major, minor in sorted(capabilities))

    def get_nvcc_flags_list(
        self, supported_major_versions: Collection[int] | None = None, map_sm107_to_100f: bool = False
    ) -> list[str]:
        """`-gencode` flags of the architectures whose major is in the list (None: all), then COMMON_NVCC_FLAGS.

        `map_sm107_to_100f` compiles for sm_107 as for the family of sm_100. Raises RuntimeError if none is left.
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
    """A target from "cpu", "sm_90a", "90a" or "9.0a"; without a suffix it is what calls on such a GPU ask for.

    Raises ValueError on anything else.
    """
    if word == "cpu":
        return CPU
    match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)([af]?)", word)
    if not match:
        raise ValueError(f"target: expected cpu, or an architecture such as sm_90a or 9.0; got {word!r}")
    major, minor, suffix = match.groups()
    return Target("cuda", f"{major}{minor}{suffix}") if suffix else cuda_target(int(major), int(minor))
