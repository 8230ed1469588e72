"""Where a kernel runs: the CPU, or a CUDA architecture, and which prebuilt binaries it accepts."""

from __future__ import annotations

import platform
import re
from typing import NamedTuple

# What fi-cubin ships. An "a" image runs on that capability only; the others also on later minors of their major.
PREBUILT_ARCHS = ("80", "89", "90a", "100a", "120a")


class Target(NamedTuple):
    """`kind` is "cpu" or "cuda"; `arch` the machine ("x86_64") or the CUDA architecture ("90a")."""

    kind: str
    arch: str

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.kind == "cuda" else self.arch

    @property
    def capability(self) -> int:
        """major * 10 + minor; 0 on the CPU."""
        return int(re.sub(r"\D", "", self.arch)) if self.kind == "cuda" else 0

    def compatible(self) -> tuple[Target, ...]:
        """The targets whose binaries run here, best first, beginning with itself."""
        if self.kind == "cpu":
            return (self,)
        major = self.capability // 10
        older = sorted((a for a in PREBUILT_ARCHS if a.isdigit() and int(a) // 10 == major), key=int, reverse=True)
        return (self, *(Target("cuda", a) for a in older if int(a) <= self.capability and a != self.arch))


CPU = Target("cpu", platform.machine())


def default_suffix(major: int, minor: int) -> str:
    """The minor version with the default suffix: (9, 0) -> "0a", (12, 0) -> "0f" (the family)."""
    if major < 9:
        return str(minor)
    return "0f" if (major, minor) == (12, 0) else f"{minor}a"


def cuda_target(major: int, minor: int) -> Target:
    """The compile target of a device with this compute capability: (9, 0) -> sm_90a, (8, 6) -> sm_86."""
    return Target("cuda", f"{major}{minor}{'a' if major >= 9 else ''}")


def parse_arch(word: str) -> tuple[int, str]:
    """ "9.0a" -> (9, "0a"); "9.0" gets the default suffix. Raises ValueError on anything else."""
    match = re.fullmatch(r"(\d+)\.(\d+)([af]?)", word)
    if not match:
        raise ValueError(f"FI_CUDA_ARCH_LIST: expected major.minor[suffix] such as 9.0a; got {word!r}")
    major, minor, suffix = int(match[1]), int(match[2]), match[3]
    return major, f"{minor}{suffix}" if suffix else default_suffix(major, minor)
