"""The arguments of each `fi-core` command; printing the help imports nothing slow."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any

import fi_core


def _target(word: str) -> Any:
    from fi_core.compat.compilation_context import parse_target

    try:
        return parse_target(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _op(word: str) -> Any:
    from fi_core.registry import operator

    try:
        return operator(word).op
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ops(words: str) -> list[Any]:
    return [_op(word) for word in words.split(",")]


def _fact(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"expected key=value, such as dtype=bf16; got {word!r}")
    return name, value


def _size(word: str) -> int:
    unit = {"K": 10**3, "M": 10**6, "G": 10**9}.get(word[-1:].upper())
    number = word[:-1] if unit else word
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"expected bytes, such as 500M or 2G; got {word!r}")
    return int(number) * (unit or 1)


def _count(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number >= 0; got {word!r}")
    return int(word)


def _days(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of days >= 0; got {word!r}")
    return value


class _Parser(argparse.ArgumentParser):
    """Suggests the closest command or option for one that it does not know."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["allow_abbrev"] = False
        super().__init__(*args, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            words = list(action.choices)
            hint = _close(str(value), words) or f"choose from {', '.join(words)}"
            raise argparse.ArgumentError(action, f"there is no {value!r}; {hint}")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # its overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        known = [name for action in self._actions for name in action.option_strings]
        for flag in flags:
            if hint := _close(flag, known):
                self.error(f"there is no option {flag}; {hint}")
        return found, unknown


def _close(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, 3, 0.5)
    return f"did you mean {' or '.join(close)}?" if close else ""


class _Commands:
    """Adds commands to a parser; each has --json, and commands with targets have --target."""

    def __init__(self, parent: argparse.ArgumentParser) -> None:
        self._actions = parent.add_subparsers(title="commands", metavar="COMMAND")
        self._json = argparse.ArgumentParser(add_help=False)
        self._json.add_argument("--json", action="store_true", help="print JSON")
        self._targets = argparse.ArgumentParser(add_help=False)
        self._targets.add_argument(
            "--target",
            dest="targets",
            action="append",
            type=_target,
            metavar="TARGET",
            help="cpu or an architecture such as sm_90a, once or more; default: FI_CUDA_ARCH_LIST, else the visible "
            "GPUs, else cpu",
        )

    def add(self, name: str, run: str, text: str, *, targets: bool = False) -> argparse.ArgumentParser:
        """`run` is the function that runs it, "module:function" of fi_core.cli."""
        parents = [self._json, self._targets] if targets else [self._json]
        added = self._actions.add_parser(name, help=text, description=text, parents=parents)
        added.set_defaults(run=run, parser=added)
        return added

    def group(self, name: str, text: str) -> _Commands:
        added = self._actions.add_parser(name, help=text, description=text)
        added.set_defaults(run=None, parser=added)
        return _Commands(added)


def _add_prebuild(commands: _Commands) -> None:
    text = "Compile missing modules ahead of the first call."
    prebuild = commands.add("prebuild", "modules:prebuild", text, targets=True)
    prebuild.add_argument("--ops", type=_ops, metavar="OP,...", help="only these ops")
    names = "only the kernels of a model: a name such as llama-8b, or a folder with config.json"
    prebuild.add_argument("--model", metavar="MODEL", help=names)
    prebuild.add_argument("--backend", default="auto", help="of the model's attention: auto, fa2 or fa3")
    prebuild.add_argument("--dtype", help="dtype of the model's activations; default: the model's")
    prebuild.add_argument("--kv-dtype", help="dtype of the model's KV cache; default: that of activations")
    prebuild.add_argument("--page-size", type=int, default=16, metavar="N", help="of the model's KV cache; default: 16")
    prebuild.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share a layer; default: 1")
    text = "drafted tokens that a step verifies; default: 0"
    prebuild.add_argument("--spec-tokens", type=_count, default=0, metavar="N", help=text)
    prebuild.add_argument("--lora", action="store_true", help="requests have adapters")
    prebuild.add_argument(
        "--products", action="store_true", help="products of few tokens are fi's, as in vLLM's layers"
    )
    prebuild.add_argument("--logits-dtype", help="of sampled logits; default: that of activations, and fp32")
    prebuild.add_argument("--list", action="store_true", help="list the files and where they are; compile nothing")
    text = "write the files as a folder for FI_CUBIN_DIR, which needs no compiler of the same version"
    prebuild.add_argument("--output", type=Path, metavar="FOLDER", help=text)
    prebuild.add_argument("--progress", action="store_true", help="print a line for each file, also into a file")
    prebuild.add_argument("--rebuild", action="store_true", help="also compile modules that exist")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = _Parser(prog="fi-core", description="Inspects, builds and replays the kernels of fi.")
    top.add_argument("--version", action="version", version=f"fi-core {fi_core.__version__}")
    top.set_defaults(run=None, parser=top)
    commands = _Commands(top)
    commands.add("show-config", "machine:show_config", "Show versions, settings, compilers and how much is compiled.")
    commands.add("collect-env", "machine:collect_env", "Describe this machine for a bug report, without secrets.")
    commands.add("doctor", "doctor:run", "Find missing or broken software, and print the command that repairs it.")

    text = "Compare installed packages with their indexes, their RECORD and the installed sources. Needs no network."
    verify = commands.add("verify", "verify:run", text)
    verify.add_argument("--deep", action="store_true", help="unpack each binary, and compare its compiler and target")
    verify.add_argument("--rebuild", type=_count, default=0, metavar="N", help="compile N binaries and compare bytes")
    verify.add_argument("--seed", type=_count, default=0, metavar="S", help="which binaries those are; default: 0")

    text = "Explain how a call is computed: the implementation, its kernel launch, the origin of its files, and the "
    text += "reason against each other implementation. Nothing runs, nothing is compiled, and no GPU is needed."
    why = commands.add("why", "why:run", text, targets=True)
    names = "a function or wrapper, such as fi_core.rmsnorm or BatchDecodeWithPagedKVCacheWrapper, or an op"
    why.add_argument("name", metavar="NAME", help=names)
    facts = "facts of the call, such as dtype=bf16 batch_size=64 page_size=16; others have default values"
    why.add_argument("facts", type=_fact, nargs="*", metavar="KEY=VALUE", help=facts)
    why.add_argument("--backend", help="the backend argument of the call, or an implementation")
    sms = "SMs of the device; default: those of the largest device of the architecture"
    why.add_argument("--multiprocessors", type=int, metavar="N", help=sms)
    launchers = "compile, for this answer alone, launchers that are neither installed nor in the store: they make the "
    launchers += "requests and launches; without them the answer is what declarations tell"
    why.add_argument("--compile", action="store_true", help=launchers)

    text = "List the modules that can be built ahead of time, or show one of them."
    listing = commands.add("list-modules", "modules:list_modules", text, targets=True)
    listing.add_argument("name", nargs="?", metavar="NAME", help="the module to show")
    text = "Show which modules are prebuilt, compiled here, or neither."
    status = commands.add("module-status", "modules:module_status", text, targets=True)
    status.add_argument("--detailed", action="store_true", help="show the files of each")
    choices = ("all", "aot", "jit", "compiled", "not-compiled")
    status.add_argument("--filter", choices=choices, default="all", help=f"{', '.join(choices)}; default: all")

    _add_prebuild(commands)
    text = "Write compile_commands.json for editors."
    export = commands.add("export-compile-commands", "modules:export_compile_commands", text, targets=True)
    export.add_argument("path", nargs="?", type=Path, metavar="PATH", help="default: compile_commands.json")
    export.add_argument("--output", "-o", type=Path, metavar="PATH", help="the same as PATH")

    _add_cache(commands)

    text = "Run a command in which `import flashinfer` is fi, also in the processes that it starts."
    execute = commands.add("exec", "execute:run", text)
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="such as -- vllm serve MODEL")

    replay = commands.add("replay", "replay:run", "Run dumped calls again and compare what they return.")
    replay.add_argument("--dir", type=Path, required=True, help="a dump, or the folder of a session of dumps")
    replay.add_argument("--device", help="for tensors that were on a GPU; default: cuda if there is one, else cpu")
    return top


def _add_cache(commands: _Commands) -> None:
    cache = commands.group("cache", "Manage the cache of compiled kernels.")
    cache.add("ls", "cache:ls", "List the entries with size and last use.")
    cache.add("verify", "cache:verify", "Check every entry against its manifest; fails if one is damaged.")
    text = "Remove leftovers, and entries beyond the limits, least recently used first."
    prune = cache.add("prune", "cache:prune", text)
    prune.add_argument("--max-age-days", type=_days, metavar="DAYS", help="keep entries used within DAYS days")
    prune.add_argument("--max-bytes", type=_size, metavar="SIZE", help="keep at most this much, such as 500M")
    cache.add("clear", "cache:clear", "Remove every entry.")
    commands.add("clear-cache", "cache:clear", "Remove every entry, as `cache clear` does.")
