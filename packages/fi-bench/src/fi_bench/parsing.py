"""From words to namespaces: one argparse parser per routine family, presets, sweeps and testlists."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fi_bench import backends, presets, sweep
from fi_bench.catalog import FAMILIES, Family, family_of
from fi_bench.errors import UsageError, did_you_mean
from fi_bench.files import text_of
from fi_bench.flags import GENERAL, Flag


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UsageError, and whose help is coloured where rich-argparse is installed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_formatter, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _formatter(prog: str) -> argparse.HelpFormatter:
    try:
        from rich_argparse import RawDescriptionRichHelpFormatter
    except ImportError:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=32)
    return RawDescriptionRichHelpFormatter(prog, max_help_position=32)


def underscored(words: Sequence[str]) -> list[str]:
    """--page-size as --page_size; values stay as they are."""

    def fold(word: str) -> str:
        name, equals, value = word.partition("=")
        return name[:2] + name[2:].replace("-", "_") + equals + value if name.startswith("--") else word

    return [fold(word) for word in words]


def add_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup, flags: Sequence[Flag]) -> None:
    for flag in flags:
        names = [f"--{flag.name}", *([f"-{flag.short}"] if flag.short else [])]
        if flag.kind == "switch":
            parser.add_argument(*names, action="store_true", default=flag.default, help=flag.help)
        elif flag.kind == "off":
            parser.add_argument(
                *names, action="store_false", dest=flag.dest or flag.name, default=flag.default, help=flag.help
            )
        elif flag.kind == "count":
            parser.add_argument(*names, action="count", default=flag.default, help=flag.help)
        else:
            parser.add_argument(
                *names,
                type=flag.type or str,
                default=flag.default,
                required=flag.required,
                metavar=flag.metavar,
                nargs="+" if flag.kind in ("words", "axis") else None,
                help=flag.help + (f" (default: {flag.default})" if flag.default not in (None, "", False) else ""),
            )


def general_parser() -> Parser:
    """Only the flags that every routine has; its help is what `fi-bench -h` shows."""
    parser = Parser(prog="fi-bench", add_help=False)
    add_flags(parser, GENERAL)
    return parser


def family_parser(family: Family, routine: str) -> Parser:
    usage = f"fi-bench --routine {routine} [--backends NAME ...] [flags]"
    parser = Parser(usage=usage, description=f"Flags of {routine} (family {family.name}).")
    own, general = parser.add_argument_group(f"{family.name} flags"), parser.add_argument_group("general flags")
    add_flags(general, GENERAL)  # first in the namespace, last in the help
    add_flags(own, family.flags)
    return parser


def _unknown(word: str, family: Family, routine: str) -> str:
    name = word.partition("=")[0].lstrip("-")
    own = [flag.name for flag in (*family.flags, *GENERAL)]
    owners = [f.name for f in FAMILIES.values() if any(flag.name == name for flag in f.flags)]
    if owners:
        return f"{word} is a flag of {', '.join(owners)} routines, not of {routine}; see `--routine {routine} -h`"
    return f"unknown argument {word!r} for {routine}{did_you_mean(name, own) or f'; see `--routine {routine} -h`'}"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The namespace of one line; swept flags hold an Axis."""
    words = underscored(words)
    known, _ = _pre_parser().parse_known_args(list(words))
    if known.routine is None:
        raise UsageError("--routine is required; `fi-bench list routines` shows all")
    family = family_of(known.routine)
    names = {name for flag in (*family.flags, *GENERAL) for name in (f"--{flag.name}", "--help")}
    misspelt = next((w for w in words if w.startswith("--") and w.partition("=")[0] not in names), None)
    if misspelt:  # argparse would report the intended flag as missing
        raise UsageError(_unknown(misspelt, family, known.routine))
    args, unknown = family_parser(family, known.routine).parse_known_args(list(words))
    if unknown:
        raise UsageError(_unknown(unknown[0], family, known.routine))
    for flag in family.flags:
        if flag.kind == "axis" and getattr(args, flag.name) is not None:
            setattr(args, flag.name, sweep.one_or_axis(getattr(args, flag.name)))
    args.refcheck |= getattr(args, "validate", False)
    _check(args)
    for flag in family.flags:
        _check_bounds(flag, getattr(args, flag.dest or flag.name))
    if family.name == "attention":
        _check_lengths(args)
    return args


def _check_bounds(flag: Flag, value: Any) -> None:
    values = value if isinstance(value, sweep.Axis) else (value,)
    low = [v for v in values if flag.least is not None and v is not None and v < flag.least]
    if low:
        raise UsageError(f"--{flag.name} must be at least {flag.least}, got {low[0]}")
    high = [v for v in values if flag.most is not None and v is not None and v > flag.most]
    if high:
        raise UsageError(f"--{flag.name} must be at most {flag.most}, got {high[0]}")


def _check(args: argparse.Namespace) -> None:
    for name, least in (("dry_run_iters", 0), ("trials", 1), ("draw", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} must be at least {least}, got {value}")
    if args.timeout is not None and args.timeout <= 0:
        raise UsageError(f"--timeout must be above 0 seconds, got {args.timeout:g}")
    if args.num_iters != "auto" and args.num_iters < 1:
        raise UsageError(f"--num_iters must be `auto` or at least 1, got {args.num_iters}")
    for name in args.backends or ():
        backends.canonical(name)
    if args.resume and not args.output_path:
        raise UsageError("--resume needs --output_path, the file with the finished rows")


def _check_lengths(args: argparse.Namespace) -> None:
    """Attention takes --s_kv (with --batch_size and --s_qo), or --case."""
    if args.case is None:
        if args.s_kv is None:
            raise UsageError("the following arguments are required: --s_kv (or --case)")
        return
    usual = {"batch_size": 1, "s_qo": 1, "s_kv": None, "random_actual_seq_len": False}
    also = [f"--{name}" for name, default in usual.items() if getattr(args, name) != default]
    if also:
        raise UsageError(f"--case gives all lengths of the batch: leave out {', '.join(also)}")


def _pre_parser() -> Parser:
    parser = Parser(add_help=False)
    for names in (("--routine", "-R"), ("--testlist",), ("--preset",), ("--output_path",)):
        parser.add_argument(*names)
    return parser


def routine_asked_for_help(words: Sequence[str]) -> str | None:
    """The routine of `--routine X -h`."""
    if not {"-h", "--help"} & set(words):
        return None
    known, _ = _pre_parser().parse_known_args(underscored(words))
    routine: str | None = known.routine
    return routine


@dataclass(frozen=True)
class Line:
    """One test: its words as typed, their place, and its points; or its error."""

    words: tuple[str, ...]
    where: str
    points: tuple[argparse.Namespace, ...] = ()
    error: str | None = None


def _line(words: Sequence[str], where: str) -> Line:
    return Line(tuple(words), where, tuple(sweep.points(parse(words))))


def read_lines(words: Sequence[str]) -> list[Line]:
    """The tests of a command line: one, those of --testlist, or those of --preset.

    All lines are parsed before anything runs; a bad line of a testlist is kept with its error.
    """
    known, rest = _pre_parser().parse_known_args(underscored(words))
    if known.testlist:
        return list(_testlist(known, rest))
    if known.preset:
        lines = presets.preset_lines(known.preset, known.routine)
        plain = _without(words, "--preset")
        plain = _without(_without(plain, "--routine"), "-R")
        return [_line([*line, *plain], f"--preset {known.preset}") for line in lines]
    return [_line(words, "command line")]


def _without(words: Sequence[str], option: str) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == option:
            skip = True
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def _testlist(known: argparse.Namespace, outer: Sequence[str]) -> Iterator[Line]:
    path = Path(known.testlist)
    try:
        text = text_of(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--testlist {path}: cannot be read ({error})") from None
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path.name}:{number}"
        if not line.strip() or line.strip().startswith("#"):
            continue
        try:
            words = shlex.split(line)
            # flags after --testlist apply to every line; those of the line come last and win
            yield _line([*outer, *words, *(["--output_path", known.output_path] if known.output_path else [])], where)
        except (UsageError, ValueError) as error:
            yield Line((line.strip(),), where, error=str(error))
