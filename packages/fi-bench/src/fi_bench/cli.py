"""The command `fi-bench`: verbs, help and exit codes. What needs torch is imported by the verb that needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from fi_bench import __version__
from fi_bench.errors import (
    FAILED,
    INTERRUPTED,
    MISMATCH,
    OK,
    USAGE,
    MismatchError,
    OutputError,
    UsageError,
    did_you_mean,
)

_OVERVIEW = """\
usage: fi-bench [run] --routine NAME [--backends NAME ...] [flags of the routine]
       fi-bench [run] --testlist FILE | --preset NAME [flags]
       fi-bench VERB ...

verbs:
  run            time a routine, a test list or a preset (the word may be left out)
  list           routines, backends or presets, and what of them works here
  compare        two results: FASTER, SLOWER, SAME or AMBIGUOUS, with intervals
  compare-trees  two checkouts of the library, interleaved on this device
  gate           check results against the rules of a TOML file (exit code 3 on a regression)
  report         one self-contained HTML file from results
  profile        print and run the ncu or nsys command for a case
  calibrate      measure this machine's copy, read and matmul ceilings
  startup        time the first call of each function in a fresh process
  rerun          repeat a row of a result file by its id
  env            what results of this machine depend on

`fi-bench --routine NAME -h` shows the flags of a routine, `fi-bench VERB -h` those of a verb.
exit codes: 0 ok, 1 a case failed or no backend could run it, 2 usage, 3 regression, 4 ambiguous (--strict), 5 mismatch
"""


def _run(words: Sequence[str]) -> int:
    from fi_bench import parsing

    routine = parsing.routine_asked_for_help(words)
    if routine is not None:
        from fi_bench.catalog import family_of

        parsing.family_parser(family_of(routine), routine).print_help()
        return OK
    if {"-h", "--help"} & set(words) or not words:
        print(_OVERVIEW)
        _print_routines()
        print(parsing.general_parser().format_help().partition("\n\n")[2], end="")
        return OK
    from fi_bench import schedule

    return schedule.run(words)


def _print_routines() -> None:
    import textwrap

    from fi_bench.catalog import FAMILIES

    print("routines:")
    for family in FAMILIES.values():
        first = f"  {family.name.ljust(17)}"
        print(textwrap.fill(" ".join(family.routines), 118, initial_indent=first, subsequent_indent=" " * 19))
    print()


def _child(words: Sequence[str]) -> int:
    from fi_bench import worker

    return worker.serve(words)


def _rank(words: Sequence[str]) -> int:
    from fi_bench import ranks

    return ranks.serve(words)


def _list(words: Sequence[str]) -> int:
    from fi_bench import listing

    return listing.main(words)


def _compare(words: Sequence[str]) -> int:
    from fi_bench import compare

    return compare.main(words)


def _compare_trees(words: Sequence[str]) -> int:
    from fi_bench.trees import interleave

    return interleave.main(words)


def _gate(words: Sequence[str]) -> int:
    from fi_bench import gate

    return gate.main(words)


def _report(words: Sequence[str]) -> int:
    from fi_bench.report import page

    return page.main(words)


def _profile(words: Sequence[str]) -> int:
    from fi_bench import profile

    return profile.main(words)


def _calibrate(words: Sequence[str]) -> int:
    from fi_bench import calibrate

    return calibrate.main(words)


def _startup(words: Sequence[str]) -> int:
    from fi_bench import startup

    return startup.main(words)


def _rerun(words: Sequence[str]) -> int:
    from fi_bench import listing

    return listing.rerun(words)


def _env(words: Sequence[str]) -> int:
    from fi_bench import listing

    return listing.env(words)


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "list": _list,
    "compare": _compare,
    "compare-trees": _compare_trees,
    "gate": _gate,
    "report": _report,
    "profile": _profile,
    "calibrate": _calibrate,
    "startup": _startup,
    "rerun": _rerun,
    "env": _env,
    "_child": _child,
    "_rank": _rank,
}


def _dispatch(words: Sequence[str]) -> int:
    if words and words[0] == "--version":
        print(f"fi-bench {__version__}")
        return OK
    if not words or words[0].startswith("-"):
        return _run(words)
    if words[0] not in VERBS:
        known = [verb for verb in VERBS if not verb.startswith("_")]
        hint = did_you_mean(words[0], known) or f"; verbs are {', '.join(known)}"
        raise UsageError(f"unknown verb {words[0]!r}{hint}")
    return VERBS[words[0]](words[1:])


def main(argv: Sequence[str] | None = None) -> int:
    from fi_bench.console import complain

    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except UsageError as error:
        complain(str(error))
        return USAGE
    except OutputError as error:
        complain(str(error))
        return FAILED
    except ModuleNotFoundError as error:
        complain(f"{error}; `fi-core doctor` says what to install")
        return FAILED
    except MismatchError as error:
        complain(str(error))
        return MISMATCH
    except KeyboardInterrupt:
        complain("interrupted; what was measured is on disk")
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
