"""`fi-bench gate FILE.toml`: checks results against rules; exit code 3 if one is broken."""

from __future__ import annotations

import fnmatch
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fi_bench import compare, record, spread
from fi_bench.console import say, table
from fi_bench.errors import AMBIGUOUS, OK, REGRESSION, UsageError, did_you_mean
from fi_bench.files import text_of
from fi_bench.parsing import Parser, underscored

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TOP = {"baseline": str, "current": str, "threshold": (int, float), "rule": list}
_RULE = {
    "routine": str,
    "backend": str,
    "threshold": (int, float),
    "max_us": (int, float),
    "min_tb_per_sec": (int, float),
    "min_tflops": (int, float),
    "not_slower_than": str,
    "factor": (int, float),
    "tag": str,
    **dict.fromkeys(spread.LIMITS, (int, float)),
}


class Finding(NamedTuple):
    """The verdict on one rule."""

    verdict: str  # ok | ambiguous | regression
    text: str


def load(path: Path) -> dict[str, Any]:
    """The rules of a gate file, checked."""
    try:
        rules: dict[str, Any] = tomllib.loads(text_of(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{path}: not TOML ({error})") from None
    _check(rules, _TOP, f"{path}")
    for i, rule in enumerate(rules.get("rule", []), 1):
        _check(rule, _RULE, f"{path}: rule {i}")
    return rules


def _check(table: dict[str, Any], known: dict[str, Any], where: str) -> None:
    for name, value in table.items():
        if name not in known:
            raise UsageError(f"{where}: unknown key {name!r}{did_you_mean(name, known)}")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            raise UsageError(f"{where}: {name} has a value of the wrong type, {value!r}")


Tags = dict[compare.Key, set[str]]


def _rule_for(rules: dict[str, Any], key: compare.Key, tags: Tags) -> dict[str, Any]:
    """The first rule whose patterns of routine, backend and one of the tags match."""
    named = {"routine": {key.routine}, "backend": {key.backend}, "tag": tags[key]}
    for rule in rules.get("rule", []):
        if all(fnmatch.filter(values, rule.get(name, "*")) for name, values in named.items()):
            return dict(rule)
    return {}


def _tags(records: Iterable[record.Record]) -> Tags:
    """The --case_tag of each case; a drawn case may be a named one too."""
    found: Tags = {}
    for r in records:
        key = compare.Key(r["routine"], r["case_key"], r["backend"])
        found.setdefault(key, set()).add(r["args"].get("case_tag") or "")
    return found


def findings(
    rules: dict[str, Any], current: Sequence[record.Record], baseline: Sequence[record.Record] | None
) -> Iterator[Finding]:
    """Limits on the current results, comparisons with other backends, and with the baseline."""
    now, tags = compare.sides(current), _tags(current)
    derived = _best(current)
    for key, side in now.items():
        rule = _rule_for(rules, key, tags)
        name = f"{key.routine} {side.words} {key.backend}"
        yield from _limits(rule, name, side.median / 1e3, derived[key])
        peer = rule.get("not_slower_than")
        if peer:
            other = now.get(key._replace(backend=peer))
            if other is None:
                yield Finding("ambiguous", f"{name}: no row of {peer} to compare with")
            elif peer != key.backend:
                ratio, factor = side.median / other.median, rule.get("factor", 1.0)
                verdict = "regression" if ratio > factor else "ok"
                yield Finding(verdict, f"{name}: {ratio:.3f}x the time of {peer}, allowed is {factor:g}x")
    for rule, _, found in _spreads(rules, current):
        for name, value, most in spread.exceeded(rule, found):
            verdict = "ambiguous" if value is None else "regression" if value > most else "ok"
            measured = "no row to compare with" if value is None else f"{value:.3f}"
            yield Finding(verdict, f"{_label(rule)}: {name} {measured}, allowed is {most:g}")
    if baseline is not None:
        yield from _against(rules, compare.sides(baseline), now, _tags([*current, *baseline]))


def _label(rule: dict[str, Any]) -> str:
    return " ".join(str(rule[name]) for name in ("tag", "routine", "backend") if name in rule) or "all cases"


def _spreads(
    rules: dict[str, Any], current: Sequence[record.Record]
) -> Iterator[tuple[dict[str, Any], dict[compare.Key, str], spread.Ratios]]:
    """The rules with limits on all of their cases together, the words of these, and their ratios."""
    now, tags, others = compare.sides(current), _tags(current), spread.peers(current)
    applies = {key: _rule_for(rules, key, tags) for key in now if key.backend not in others}
    for rule in rules.get("rule", []):
        keys = [key for key, own in applies.items() if own == rule]
        if keys and rule.keys() & set(spread.LIMITS):
            yield rule, {key: f"{key.routine} {now[key].words}" for key in keys}, spread.ratios(now, keys, others)


def _best(records: Iterable[record.Record]) -> dict[compare.Key, dict[str, float]]:
    """Median rates over the processes of a case."""
    rates: dict[compare.Key, list[dict[str, float]]] = {}
    for r in records:
        if r.get("stats"):
            rates.setdefault(compare.Key(r["routine"], r["case_key"], r["backend"]), []).append(r["derived"])
    return {
        key: {name: statistics.median(d[name] for d in group) for name in ("tb_per_sec", "tflops")}
        for key, group in rates.items()
    }


def _limits(rule: dict[str, Any], name: str, median_us: float, rates: dict[str, float]) -> Iterator[Finding]:
    if "max_us" in rule:
        verdict = "regression" if median_us > rule["max_us"] else "ok"
        yield Finding(verdict, f"{name}: {median_us:.4g} us, allowed is {rule['max_us']:g}")
    for rate in ("tb_per_sec", "tflops"):
        least = rule.get(f"min_{rate}")
        if least is not None:
            verdict = "regression" if rates[rate] < least else "ok"
            yield Finding(verdict, f"{name}: {rates[rate]:.4g} {rate}, asked is {least:g}")


def _against(
    rules: dict[str, Any], before: dict[compare.Key, compare.Side], now: dict[compare.Key, compare.Side], tags: Tags
) -> Iterator[Finding]:
    for key, side in before.items():
        name = f"{key.routine} {side.words} {key.backend}"
        if key not in now:
            yield Finding("regression", f"{name}: in the baseline and no longer measured")
            continue
        threshold = _rule_for(rules, key, tags).get("threshold", rules.get("threshold", compare.THRESHOLD))
        args = Namespace(threshold=threshold, confidence=compare.CONFIDENCE, force=False)
        _, _, verdict = compare.compare({key: side}, {key: now[key]}, args)[key]
        words = f"{name}: {verdict.ratio:.3f}x the baseline [{verdict.low:.3f}, {verdict.high:.3f}] {verdict.verdict}"
        kind = {"SLOWER": "regression", "AMBIGUOUS": "ambiguous"}.get(verdict.verdict, "ok")
        yield Finding(kind, f"{words} {verdict.why}".rstrip())


def main(words: Sequence[str]) -> int:
    parser = Parser(prog="fi-bench gate", description="Check results against the rules of a TOML file.")
    parser.add_argument("file", metavar="FILE.toml")
    parser.add_argument("--current", metavar="FILE", help="results to check (key `current` of the file)")
    parser.add_argument("--baseline", metavar="FILE", help="results to compare with (key `baseline` of the file)")
    parser.add_argument("--strict", action="store_true", help="exit 4 if any rule is undecided")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the rules that hold too")
    args = parser.parse_args(underscored(words))
    path = Path(args.file)
    rules = load(path)
    sources = {}
    for name in ("current", "baseline"):
        typed, written = getattr(args, name), rules.get(name)
        sources[name] = typed or (str(path.parent / written) if written else None)
    if sources["current"] is None:
        raise UsageError(f"{path}: neither the key `current` nor --current names the results")
    current = record.read(sources["current"])
    baseline = record.read(sources["baseline"]) if sources["baseline"] else None
    found = list(findings(rules, current, baseline))
    if not found:
        raise UsageError(f"{path}: no rule applies to any row of {sources['current']}")
    for finding in found:
        if finding.verdict == "regression":
            say("ERROR", finding.text)
        elif finding.verdict == "ambiguous":
            say("WARNING", finding.text)
        elif args.verbose:
            say("INFO", finding.text)
    table([spread.row(_label(rule), ratios, words, rule) for rule, words, ratios in _spreads(rules, current)], "table")
    counts = {kind: sum(f.verdict == kind for f in found) for kind in ("ok", "ambiguous", "regression")}
    print(", ".join(f"{n} {kind}" for kind, n in counts.items()))
    if counts["regression"]:
        return REGRESSION
    return AMBIGUOUS if args.strict and counts["ambiguous"] else OK
