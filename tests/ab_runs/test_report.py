"""The report: text always, a self-contained page with every plot, looked at as a picture in a real browser."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ab_runs import report
from ab_runs.judge import judge
from tests.ab_runs.made import Made, bench

PLOTS = ("plot-order", "plot-distribution", "plot-effect", "plot-hits")
WIDTH, HEIGHT = 1000, 3600


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    made = Made(tmp_path_factory.mktemp("report") / "run", {"patched": -0.05})
    said = report.write(made.store.folder, judge(made.store.folder))
    assert len(said) == 2
    return made.store.folder


def test_the_text_holds_verdict_effects_answers_boots_and_hits(run):
    text = (run / "report.md").read_text()
    assert "**faster**: patched against stock: TPOT mean" in text
    for part in (
        "| patched | TPOT p99 |",
        "| patched | identical |",
        "| 7 | stock |",
        "| patched | fast | hit | 400 |",
        "avx2",
    ):
        assert part in text, part


def test_the_page_needs_nothing_from_elsewhere(run):
    page = (run / "report.html").read_text()
    links = re.findall(r"""(?:src|href)=["']([^"']+)""", page) + re.findall(r"url\(([^)]+)\)", page)
    assert not [link for link in links if not link.startswith(("#", "data:"))]
    assert "<script" not in page and "@import" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) and set(PLOTS) <= set(
        ids
    )  # clip paths and glyphs of one plot do not hit another's
    for link in (link for link in links if link.startswith("#")):
        assert link[1:] in ids
    assert len(page) < 1_500_000


def test_what_others_wrote_is_escaped(tmp_path):
    made = Made(tmp_path / "run")
    made.change(0, notes=["<script>alert(1)</script>"])
    report.write(made.store.folder, judge(made.store.folder))
    page = (made.store.folder / "report.html").read_text()
    assert "<script>alert" not in page and html.escape("<script>") in page


def test_an_invalid_run_says_why_and_puts_its_verdicts_in_brackets(tmp_path):
    made = Made(tmp_path / "run")
    made.change(1, window__prefix_cache={"queries": 80, "hits": 16})
    failed = {
        "index": 2,
        "arm": "patched",
        "status": "failed",
        "reason": {"code": "server-died", "detail": "d", "log": "the end"},
    }
    made.store.finish_sample(made.slot(2), failed, [])
    report.write(made.store.folder, judge(made.store.folder))
    for name in ("report.md", "report.html"):
        text = (made.store.folder / name).read_text()
        assert "warm-prefix-cache" in text and "(no difference)" in text and "the end" in text


def test_a_run_without_a_single_good_boot_still_has_a_report(tmp_path):
    made = Made(tmp_path / "run", boots=2)
    for index in range(4):
        failed = {
            "index": index,
            "arm": made.slot(index).arm,
            "status": "failed",
            "reason": {"code": "x", "detail": "d", "log": ""},
        }
        made.store.finish_sample(made.slot(index), failed, [])
    assert len(report.write(made.store.folder, judge(made.store.folder))) == 2


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_without_the_report_libraries_there_is_the_text_alone_and_it_is_said(tmp_path, monkeypatch, missing):
    made = Made(tmp_path / "run")
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    said = report.write(made.store.folder, judge(made.store.folder))
    assert (made.store.folder / "report.md").exists() and not (made.store.folder / "report.html").exists()
    assert f"{missing} is not installed" in said[1]


# -- as a picture


def chromium():
    found = next(
        (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name)), None
    )
    if found is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    return found


def browse(page: Path, folder: Path, *flags: str) -> str:
    command = [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder}/profile",
    ]
    command += [f"--window-size={WIDTH},{HEIGHT}", "--force-device-scale-factor=1", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=True).stdout


def look(page: Path, folder: Path) -> dict[str, str]:
    """What is wrong with each plot of a page, as a browser shows it: plot -> complaint; empty where all are there.

    The boxes come from the laid-out page, the pixels from a screenshot: a plot must have a size, lines and text on it, and
    colours of its data.
    """
    import numpy as np
    from PIL import Image

    script = (
        "<script>document.body.dataset.boxes = JSON.stringify(Object.fromEntries([...document.querySelectorAll('svg.plot')]"
        ".map(e => { const b = e.getBoundingClientRect(); return [e.id, [b.x + scrollX, b.y + scrollY, b.width, b.height]] })))"
        "</script>"
    )
    measured = folder / "measured.html"
    measured.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    dom = browse(measured, folder, "--dump-dom")
    boxes = json.loads(html.unescape(re.search(r'data-boxes="([^"]*)"', dom)[1]))
    shot = folder / "shot.png"
    browse(page, folder, f"--screenshot={shot}")
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    wrong = {}
    for plot in PLOTS:
        if plot not in boxes:
            wrong[plot] = "is not on the page"
            continue
        x, y, width, height = (round(value) for value in boxes[plot])
        part = pixels[y : y + height, x : x + width]
        if width < 300 or height < 60 or part.size == 0:
            wrong[plot] = f"is {width} x {height} pixels"
            continue
        dark = (part.max(axis=2) < 110).sum()
        coloured = ((part.max(axis=2) - part.min(axis=2)) > 60).sum()
        if dark < 300 or coloured < 60:
            wrong[plot] = f"is empty: {dark} dark and {coloured} coloured pixels"
    return wrong


@pytest.mark.browser
def test_a_browser_shows_every_plot_with_its_data(run, tmp_path):
    assert look(run / "report.html", tmp_path) == {}


@pytest.mark.browser
@pytest.mark.parametrize("plot", PLOTS)
def test_the_look_fails_when_a_plot_is_missing_or_blank(run, tmp_path, plot):
    page = (run / "report.html").read_text()
    whole = re.search(rf'<svg id="{plot}".*?</svg>', page, re.S)[0]
    broken = tmp_path / "broken.html"
    broken.write_text(page.replace(whole, ""))
    assert look(broken, tmp_path) == {plot: "is not on the page"}
    blank = re.sub(r"(<svg[^>]*>).*</svg>", r"\1</svg>", whole, flags=re.S)
    broken.write_text(page.replace(whole, blank))
    found = look(broken, tmp_path)
    assert set(found) == {plot} and "is empty" in found[plot]


def test_plots_show_the_boots_of_the_run(run):
    """A plot that forgot a boot would still look like one: the markers are counted."""
    page = (run / "report.html").read_text()
    order = re.search(r'<svg id="plot-order".*?</svg>', page, re.S)[0]
    verdict = judge(run)
    from ab_runs.plots import colours

    for arm, colour in colours(verdict).items():
        boots = sum(boot["arm"] == arm for boot in verdict["boots"])
        # each boot one marker, and one more in the legend
        assert order.lower().count(f'fill: {colour.lower()}; stroke: {colour.lower()}"') >= boots + 1 == 5


def test_the_made_up_bench_is_what_the_reader_expects():
    import numpy as np

    from ab_runs import load

    figures = load.parse(bench(50, np.random.default_rng(0))).figures()
    assert figures["mean_tpot"] == pytest.approx(50, rel=0.02)
