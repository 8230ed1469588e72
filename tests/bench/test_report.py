"""The report: complete, self-contained, well-formed, and drawn by a real browser in light and dark."""

from __future__ import annotations

import itertools
import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path

import pytest

from bench.helpers import made, write
from fi_bench import calibrate
from fi_bench.calibrate import Ceilings
from fi_bench.cli import main
from fi_bench.report import charts, page
from fi_bench.report import rows as rows_of

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
QUIETLY = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
]  # fmt: skip
CEILINGS = {"test cpu x2": Ceilings(copy=2e9, read=2e9, matmul=1e12, matmul_fp8=2e12)}


def records() -> list[dict[str, object]]:
    found = []
    for batch in (1, 4, 16, 64):
        line = f"--routine rmsnorm --batch_size {batch} --hidden_size 64 --case_tag <b>"
        found.append(made(line, median_ns=1000.0 * batch**0.5))
        found.append(made(line, backend="torch", median_ns=2000.0 * batch**0.5))
    skip = made(backend="cutlass", status="skipped", reason="no <such> thing")
    del skip["stats"]
    return [*found, skip]


def text() -> str:
    return page.html(records(), CEILINGS, "torch", "A & B")


def test_page_is_self_contained_and_escaped() -> None:
    html = text()
    assert not re.search(r"(src|href)\s*=|https?://|<script|@import|url\(", html), "nothing from elsewhere"
    assert "<title>A &amp; B</title>" in html
    assert "no &lt;such&gt; thing" in html
    assert "prefers-color-scheme: dark" in html


def test_every_row_and_reason_is_there() -> None:
    html = text()
    assert html.count("</tr>") == (1 + 8) + (1 + 1)
    assert "skipped" in html
    assert html.count("<h2>rmsnorm <span") == 1, "one heading per routine"
    assert 'class="shared">hidden_size=64<' in html
    assert "Roofline" in html
    assert "Speed-up over torch" in html
    assert html.count('<td class="n">2.00x</td>') == 4
    # 1024 bytes at 2 GB/s are 512 ns: half of the measured 1000 ns
    assert "</i></span>51<" in html
    assert re.search(r"2.00x</b><span>cpu over torch, the median case; 2.00x .. 2.00x", html)
    assert ">1</b><span>rows not measured" in html


def test_one_extreme_case_does_not_move_the_speed_up() -> None:
    """A loop in torch may take thousands of times longer: the median says what users get, the range shows the rest."""
    found = []
    for batch, times in ((1, 1.1), (4, 1.2), (16, 7156.0)):
        line = f"--routine rmsnorm --batch_size {batch} --hidden_size 64"
        found += [made(line), made(line, backend="torch", median_ns=1000.0 * times)]
    html = page.html(found, {}, "torch", "A")
    assert "1.20x</b><span>cpu over torch, the median case; 1.10x .. 7156.0x" in html


DRAWINGS = re.findall(r'<svg class="chart".*?</svg>', text(), re.S)


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_drawings_are_well_formed_and_inside_their_box(drawing: str) -> None:
    root = ET.fromstring(drawing)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert root.attrib["style"] == f"max-width:{width:.0f}px", "text is never larger than drawn"
    for node in root.iter():
        for name, limit in (("x", width), ("cx", width), ("x1", width), ("y", height), ("cy", height), ("y1", height)):
            if name in node.attrib:
                assert 0 <= float(node.attrib[name]) <= limit
        for pair in node.attrib.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    assert len(root.findall("circle")) + len(root.findall("rect")) == 8, "a mark for each row"


def test_there_are_a_roofline_and_both_charts_of_the_sweep() -> None:
    assert [ET.fromstring(d).attrib["aria-label"] for d in DRAWINGS] == [
        "roofline", "time, us over batch_size", "% of limit over batch_size",
    ]  # fmt: skip


def spots(path: charts.Path) -> list[tuple[float, ...]]:
    return [tuple(map(float, pair.split(","))) for pair in path.points.split()]


def test_lines_rise_with_their_values() -> None:
    points = tuple(charts.Point(x, 10 * x, 9 * x, 11 * x) for x in (1.0, 10.0, 100.0))
    chart = charts.lines([charts.Series("a", points, 0)], "n", "us")
    (path,) = chart.paths
    first, middle, last = spots(path)
    assert middle[0] == pytest.approx((first[0] + last[0]) / 2, abs=0.2), "logarithmic"
    assert first[1] > middle[1] > last[1], "upwards is more"
    assert all(m.whisker and m.whisker[0] > m.y > m.whisker[1] for m in chart.marks), "intervals"


def test_the_roof_bends_where_memory_meets_arithmetic() -> None:
    roofs = [charts.Roof(4.0, 800.0), charts.Roof(4.0, 1400.0)]
    chart = charts.roofline([charts.Series("a", (charts.Point(1.0, 1.0),), 0, line=False)], roofs)
    roof, higher = map(spots, chart.paths)
    (_, y0), (x1, y1), (x2, y2) = roof
    assert y0 > y1 == y2
    assert x1 < x2
    assert higher[2][1] < y2
    assert {label.text for label in chart.labels} == {"4 TB/s", "800 TFLOP/s", "1400 TFLOP/s"}


def test_bars_leave_the_middle_to_both_sides() -> None:
    fast, slow = charts.bar(2.0, 8.0), charts.bar(0.5, 8.0)
    assert fast.left == 50.0
    assert slow.left + slow.width == pytest.approx(50.0)
    assert fast.width == pytest.approx(slow.width), "twice and half as fast are as long"
    assert fast.width == pytest.approx(50 / 3), "logarithmic"
    assert charts.bar(1 / 8, 8.0).width == 50.0


def test_shades_tell_slow_from_fast_and_much_from_little() -> None:
    ratios = (0.03, 0.3, 0.6, 0.9, 1.0, 1.01, 1.1, 1.5, 3.0, 30.0)
    shades = [charts.shade(ratio) for ratio in ratios]
    assert shades == ["slow4", "slow3", "slow2", "slow1", "same", "same", "fast1", "fast2", "fast3", "fast4"]
    colours = dict(re.findall(r"--((?:slow|fast)\d|same): (#\w+);", text()))
    assert len(set(colours.values())) == len(colours) == 9


def test_a_small_ratio_keeps_its_figures() -> None:
    rows = [made(backend=name, median_ns=ns) for name, ns in (("cpu", 1000.0), ("torch", 31.0))]
    assert '<b class="slow4">0.031x</b>' in page.html(rows, {}, "torch", "t")


def test_a_long_case_is_not_cut() -> None:
    several = ",".join(f"1@{n}" for n in range(100, 130))
    line = "--routine BatchDecodeWithPagedKVCacheWrapper --num_qo_heads 4 --num_kv_heads 4 --case"
    rows = [made(f"{line} {case}", backend=name) for case in (several, "1@8") for name in ("fa2", "torch")]
    html = page.html(rows, {}, "torch", "t")
    assert f'<span class="case">case={several}</span>' in html
    assert "…" not in re.sub(r"<td.*?</td>", "", html), "intervals only"


@pytest.mark.parametrize("values", [[1.0], [0.001, 1e6], [3.0, 3.0], [2.1, 2.4]])
def test_axes_have_ticks_for_any_range(values: list[float]) -> None:
    axis = charts.Axis(values, 0, 100)
    assert 1 <= len(axis.ticks()) <= 40
    assert all(0 <= axis(v) <= 100 for v in values)


def test_tick_labels_do_not_touch() -> None:
    points = tuple(charts.Point(float(x), 1.0) for x in (100000, 101000, 102000, 150000, 900000))
    chart = charts.lines([charts.Series("a", points, 0)], "n", "us")
    labels = [(tick.at, len(tick.label) * 7.0) for tick in chart.columns]
    assert labels
    assert all(b - a > (wide_a + wide_b) / 2 for (a, wide_a), (b, wide_b) in itertools.pairwise(labels))


def test_sweeps_hold_all_else_fixed() -> None:
    rows = rows_of.group_rows(records(), {})
    found = rows_of.axis_of(rows)
    assert [(axis, len(members)) for axis, _, members in found] == [("batch_size", 8)]
    assert "batch_size" not in found[0][1]


def test_numbers_that_move_together_are_one_axis() -> None:
    line = "--routine single_prefill_with_kv_cache --num_qo_heads 4 --num_kv_heads 4 --s_qo {0} --s_kv {0}"
    rows = rows_of.group_rows([made(line.format(n)) for n in (16, 64)], {})
    assert [axis for axis, _, _ in rows_of.axis_of(rows)] == ["s_kv = s_qo"]


def test_command_writes_the_file_and_refuses_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "r.jsonl", records())
    out = tmp_path / "out.html"
    assert main(["report", source, "-o", str(out), "--baseline", "torch"]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert main(["report", source, "-o", str(out), "--baseline", "nobody"]) == 2
    assert "there are cpu, torch" in capsys.readouterr().err
    assert main(["report", source, "-o", str(tmp_path / "no" / "out.html")]) == 2
    assert main(["report", source, "-o", str(out), "--ceilings", str(tmp_path / "none.json")]) == 2


def pixels(png: bytes) -> tuple[int, int, list[bytes]]:
    """Width, height and unfiltered RGB(A) rows of an 8-bit PNG."""
    width, height, depth, colour = struct.unpack(">IIBB", png[16:26])
    assert depth == 8
    channels = {2: 3, 6: 4}[colour]
    data, at = b"", 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += 12 + size
    raw, stride, rows, above = zlib.decompress(data), width * channels, [], bytearray(width * channels)
    for y in range(height):
        kind, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1 : (y + 1) * (stride + 1)])
        for i in range(stride):
            left = line[i - channels] if i >= channels else 0
            corner = above[i - channels] if i >= channels else 0
            line[i] = (line[i] + _predict(kind, left, above[i], corner)) & 255
        rows.append(bytes(line))
        above = line
    return width, channels, rows


def _predict(kind: int, left: int, up: int, corner: int) -> int:
    if kind == 4:
        guess = left + up - corner
        return min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
    return (0, left, up, (left + up) // 2)[kind]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(("scheme", "background"), [("1", (251, 251, 250)), ("0", (14, 17, 22))], ids=["light", "dark"])
def test_a_browser_draws_it(scheme: str, background: tuple[int, int, int], tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text(text())
    shot = tmp_path / "shot.png"
    page_uri = (tmp_path / "r.html").as_uri()
    options = [*QUIETLY, f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"]
    command = [str(CHROMIUM), *options, f"--screenshot={shot}", "--window-size=700,1400", page_uri]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    width, channels, rows = pixels(shot.read_bytes())
    seen = {tuple(row[i : i + 3]) for row in rows[::3] for i in range(0, width * channels, channels * 2)}
    assert tuple(rows[2][:3]) == background
    series = {"1": {(29, 99, 216), (217, 102, 11)}, "0": {(98, 168, 255), (245, 146, 63)}}[scheme]
    assert series <= seen, "the colours of both series are on the page"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(width: int, tmp_path: Path) -> None:
    """Tables scroll within their boxes; the page itself does not, on a phone and on a desk."""
    long = "--routine BatchDecodeWithPagedKVCacheWrapper --num_qo_heads 4 --num_kv_heads 4 --case"
    case = ",".join(f"1@{n}" for n in range(100, 140))
    more = [made(f"{long} {c}", backend=name) for c in (case, "1@8") for name in ("flash_attention3", "torch")]
    page_of = page.html([*records(), *more], CEILINGS, "torch", "A report")
    frame = f'<iframe id="f" src="r.html" style="width:{width}px;height:900px;border:0"></iframe>'
    script = (
        "<script>f.onload=()=>{const d=f.contentDocument.documentElement;"
        "document.title=d.scrollWidth+' '+d.clientWidth}</script>"
    )
    (tmp_path / "r.html").write_text(page_of)
    (tmp_path / "frame.html").write_text(f"<!doctype html>{frame}{script}")
    options = [*QUIETLY, f"--user-data-dir={tmp_path / 'profile'}", "--allow-file-access-from-files"]
    command = [str(CHROMIUM), *options, "--virtual-time-budget=5000", "--window-size=1400,1000", "--dump-dom",
               (tmp_path / "frame.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, timeout=120, text=True)
    found = re.search(r"<title>(\d+) (\d+)</title>", done.stdout)
    assert found, done.stdout[-500:]
    assert [int(n) for n in found.groups()] == [width, width]


def test_ceilings_are_measured_kept_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "c" / "ceilings.json"
    assert main(["calibrate", "--device", "cpu", "--size_mb", "8", "--matmul_size", "64", "--output", str(kept)]) == 0
    ((name, found),) = calibrate.load(kept).items()
    assert " x" in name
    assert all(1e6 < rate < 1e16 for rate in found)
    assert "TB/s (read + written)" in capsys.readouterr().out
    rates = Ceilings(2e9, 1e9, 1e12, 2e12)
    assert rates.seconds(flops=10**12, bytes=10**9) == 1.0
    assert rates.seconds(flops=10**12, bytes=10**8, unit="matmul_fp8") == 0.5
    assert rates.seconds(flops=10**9, bytes=10**10) == 5.0
    assert rates._replace(read=4e9).seconds(flops=10**9, bytes=10**10) == 2.5, "what is only read may be faster"
