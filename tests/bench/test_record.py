"""Result files: columns, appending, half-written lines, quoting, resuming."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from bench.helpers import made, write
from fi_bench import parsing, record
from fi_bench.cli import main
from fi_bench.errors import UsageError

FIRST = ["routine", "median_time", "std_time", "tflops", "tb_per_sec", "backend", "resolved_backend", "s_qo", "s_kv"]
LAST = ["allow_output_mismatch", "random_seed", "case_tag", "generate_repro_command", "repro_command"]


def test_columns_are_those_of_the_contract_in_order() -> None:
    contract = record.COLUMNS[: record.COLUMNS.index("repro_command") + 1]
    assert list(contract[:9]) == FIRST
    assert list(contract[-5:]) == LAST
    assert len(contract) == 145
    repeated = {name for name in contract if contract.count(name) > 1}
    assert repeated == {"num_tokens", "top_k", "num_experts", "ep_size", "weight_dtype"}
    ours = record.COLUMNS[len(contract) :]
    assert len(set(ours)) == len(ours)
    assert not set(ours) & set(contract)


def test_rows_are_appended_and_quoted(tmp_path: Path) -> None:
    out = tmp_path / "r.csv"
    tag = 'A, "B"'
    first = made()
    first["args"]["case_tag"] = tag
    write(out, [first])
    write(out, [made(median_ns=2e6, backend="torch")])
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["backend"] for row in rows] == ["cpu", "torch"]
    assert rows[0]["case_tag"] == tag
    assert float(rows[1]["median_time"]) == pytest.approx(2.0), "milliseconds"
    assert rows[0]["batch_size"] == "4"
    assert rows[0]["random_seed"] == "42"
    assert len(record.read(out)) == 2, "all samples are in the JSONL beside it"
    assert len(record.read(out)[0]["samples_ns"]) == 6


def test_an_incomplete_line_is_skipped(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    write(out, [made()])
    whole = out.read_text()
    out.write_text(whole + whole[:50])
    write(out, [made(backend="torch")])
    assert out.read_text().startswith(whole + whole[:50] + "\n")
    assert [r["backend"] for r in record.read(out)] == ["cpu", "torch"]


def test_a_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    foreign = tmp_path / "f.csv"
    foreign.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="other columns"):
        record.Sink(str(foreign))
    assert foreign.read_text() == "a,b\n1,2\n"
    notes = tmp_path / "n.jsonl"
    notes.write_text("hello\n")
    with pytest.raises(UsageError, match=r"n\.jsonl:1: not a record"):
        record.read(notes)
    notes.write_text('{"schema_version": 99}\n')
    with pytest.raises(UsageError, match="schema 1"):
        record.read(notes)


@pytest.mark.parametrize("path", ["no/such/folder/r.csv", "."])
def test_unwritable_output_is_one_usage_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--output_path"):
        record.Sink(str(tmp_path / path))


def test_what_is_not_finite_stays_json(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    write(out, [made(refcheck={"status": "mismatch", "max_abs": float("inf"), "rel_l2": float("nan")})])
    parsed = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert parsed["refcheck"] == {"status": "mismatch", "max_abs": "inf", "rel_l2": "nan"}


def test_the_key_depends_on_the_computation_only() -> None:
    def key(more: str) -> str:
        args = parsing.parse(f"--routine rmsnorm --batch_size 4 --hidden_size 64 {more}".split())
        return record.case_key(args.routine, args)

    assert key("") == key("--backends cpu torch --num_iters 99 -vv --refcheck --output_path x.csv")
    assert (
        len({key(""), key("--eps 1e-5"), key("--random_seed 1"), key("--input_dtype float16"), key("--enable_pdl")})
        == 5
    )


def test_only_ok_rows_are_finished() -> None:
    good, bad = made(), made(backend="torch", status="crashed")
    assert record.finished([good, bad]) == {(good["case_key"], "cpu", 0)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("params", None),
        ("trial", "0"),
        ("samples_ns", []),
        ("samples_ns", ["nan"]),
        ("samples_ns", [0.0]),
        ("stats", {"median": 1.0}),
        ("derived", {}),
        ("clocks", None),
        ("env", "H200"),
    ],
)
def test_an_old_or_broken_record_is_one_line(
    field: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every verb that reads results names the line."""
    found = made()
    found[field] = value
    path = tmp_path / "old.jsonl"
    path.write_text("\n".join([record.dumps(made()), record.dumps(found), ""]))
    for words in (["compare", str(path), str(path)], ["report", str(path), "-o", str(tmp_path / "r.html")],
                  ["list", "cases", str(path)], ["rerun", "zz", str(path)]):  # fmt: skip
        code = main(words)
        said = capsys.readouterr().err
        assert code == 2
        assert f"old.jsonl:2: an incomplete record, perhaps of an older fi-bench: no valid '{field}'" in said
