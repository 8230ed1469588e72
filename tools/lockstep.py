"""hatchling metadata hook of the five packages: one VERSION, and the sibling requirements pinned to it.

Reads `dependencies` and `extras` from [tool.hatch.metadata.hooks.custom]; a requirement that starts with `fi-` is a
sibling. In the tree each package links to this file and to VERSION; an sdist holds copies, and there
hatchling takes what this hook computed from PKG-INFO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class LockstepHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        version = next(Path(self.root).glob("src/*/VERSION")).read_text().strip()

        def pin(requirements: list[str]) -> list[str]:
            return [f"{name}=={version}" if name.startswith("fi-") else name for name in requirements]

        metadata["version"] = version
        metadata["dependencies"] = pin(self.config.get("dependencies", []))
        metadata["optional-dependencies"] = {
            extra: pin(requirements) for extra, requirements in self.config.get("extras", {}).items()
        }
