"""The report in a real browser: what moves, what it says then, and that it talks to nobody."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lobs
from lobs.report import Run, whatif, write_report
from tests.report import chrome

pytestmark = [
    pytest.mark.skipif(bool(chrome.missing()), reason=chrome.missing() or "there is one"),
    pytest.mark.xdist_group("browser"),
]
DRAWN = (
    "return [...document.querySelectorAll('.plot')].filter(p => !p.closest('[hidden]'))"
    ".every(p => p.querySelector('.main-svg'))"
)


def pruned(fraction=0.8, **more):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(128, 12), nn.ReLU(), nn.Linear(12, 5)),
    )
    images = torch.rand(200, 1, 16, 16)
    result = lobs.prune(
        model,
        [images],
        fraction,
        solver=lobs.GreedyOBS(backend="torch"),
        progress=False,
        **more,
        execution=lobs.Execution(diagnostics=True),
    )
    return Run("main", result, 1.5, 1.8, dense=model, example=images)


@pytest.fixture(scope="module")
def browser():
    with chrome.Chrome() as found:
        yield found


@pytest.fixture(scope="module")
def run():
    return pruned()


@pytest.fixture(scope="module")
def pages(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    other = pruned(lobs.Sparsity(0.5, scope="layer"), inputs="dense")
    other = Run("<b>other</b>", other.pruning, dense=other.dense, example=other.example)
    write_report(folder / "one.html", [run], title="one", command="lobs prune net --keep 20%")
    write_report(folder / "two.html", [run, other], title="two", command="lobs report a b")
    write_report(folder / "none.html", [other], title="none", command="lobs prune net --keep a=1")
    return folder


@pytest.fixture
def opened(browser, pages):
    def visit(name, **look):
        browser.emulate(**look)
        browser.log("performance")
        browser.log("browser")
        browser.open(pages / name)
        browser.wait(DRAWN)
        return browser

    return visit


def move(browser, stop):
    browser.run(
        "const s = document.getElementById('budget'); s.value = arguments[0]; s.dispatchEvent(new "
        "Event('input'))",
        stop,
    )


def text(browser, place):
    return browser.run("return document.getElementById(arguments[0]).textContent", place)


def test_the_slider_redraws_kept_fractions_and_predicted_errors_from_the_stored_curves(opened, run):
    page, preview = opened("one.html"), run.pruning.preview
    names = list(preview.totals)
    for stop in (0, preview.at // 2, len(preview.change) - 1, preview.at):
        move(page, stop)
        bars = page.run("return document.getElementById('what-if-kept').data[0].x")
        assert bars == pytest.approx(
            [100 * (1 - preview.removed[n][stop] / preview.totals[n]) for n in names]
        )
        marks = page.run("return document.getElementById('what-if-errors').data[0].x")
        assert marks == [preview.errors[n][stop] or None for n in names]
        shown = page.run("return document.getElementById('what-if-change').data[1].y[0]")
        assert shown == (preview.change[stop] or None)
        share = float(text(page, "budget-share").rstrip("\u202f %"))
        assert share == pytest.approx(100 * preview.kept_fraction(stop), rel=5e-3)
        assert float(text(page, "budget-change")) == pytest.approx(preview.change[stop], rel=1e-3)


def test_at_the_budget_that_was_run_the_slider_says_what_the_run_recorded(opened, run):
    page, result = opened("one.html"), run.pruning
    bars = page.run("return document.getElementById('what-if-kept').data[0].x")
    assert bars == pytest.approx([100 * layer.kept_fraction for layer in result.layers])
    assert text(page, "budget-count") == f"{result.kept:,} of {result.total:,} weights"
    assert text(page, "budget-place").startswith("This is the budget that was run")
    move(page, 3)
    assert "not run" in text(page, "budget-place")
    page.run("document.getElementById('budget-back').click()")
    assert text(page, "budget-count") == f"{result.kept:,} of {result.total:,} weights"


@pytest.mark.parametrize("name", ["one.html", "two.html", "none.html"])
def test_the_console_is_silent_and_nothing_is_fetched(opened, pages, name):
    page = opened(name)
    if name != "none.html":
        move(page, 2)
    page.run("document.querySelectorAll('button').forEach(b => b.click())")
    page.run(
        "document.querySelectorAll('select').forEach(s => { s.selectedIndex = 1; "
        "s.dispatchEvent(new Event('change')) })"
    )
    assert page.complaints() == []
    assert {address for address in page.requests() if not address.startswith("data:")} == {
        (pages / name).as_uri()
    }


def test_a_run_without_curves_says_why_there_is_no_slider(opened, run):
    page = opened("none.html")
    assert not page.run("return document.getElementById('budget')")
    said = page.run("return document.getElementById('what-if').textContent")
    assert "No slider" in said and "each layer by itself" in said
    assert whatif.slider([run]) is not None


def test_tables_sort_by_number_both_ways(opened, run):
    page = opened("one.html")
    column = "return [...document.querySelectorAll('table.sortable tbody tr')].map(r => r.cells[2].textContent)"
    click = "document.querySelectorAll('table.sortable thead button')[2].click()"
    kept = sorted(layer.kept for layer in run.pruning.layers)
    page.run(click)
    assert page.run(column) == [f"{k:,}" for k in kept]
    page.run(click)
    assert page.run(column) == [f"{k:,}" for k in kept[::-1]]


def test_every_plot_can_be_hovered_and_zoomed(opened):
    page = opened("one.html")
    plots = page.run("return [...document.querySelectorAll('.plot')].map(p => p.id)")
    assert {"kept", "what-if-change", "bounds", "ledger-0", "pixels-0", "gallery-0-1"} <= set(plots)
    for plot in plots:
        zooms = page.run(
            "const p = document.getElementById(arguments[0]); const l = p._fullLayout;"
            "return l.dragmode === 'zoom' && !l.xaxis.fixedrange && !l.yaxis.fixedrange && !!l._modeBar", plot,
        )  # fmt: skip
        assert zooms, plot
        hovered = page.run(
            "const p = document.getElementById(arguments[0]);"
            "return p._fullData.some(t => t.hoverinfo === 'text' && (t.hovertext ?? t.text)?.flat().some(Boolean))", plot,
        )  # fmt: skip
        assert hovered, plot
    page.run("Plotly.relayout('relative', {'xaxis.range': [-1.2, -0.9]})")
    page.wait(
        "return document.getElementById('relative').querySelectorAll('.xtick text').length > 1"
    )


def test_pictures_show_what_was_removed_as_gaps(opened, run):
    page = opened("one.html")
    gaps = "return document.getElementById(arguments[0]).data[0].text.flat().filter(t => t.endsWith('removed')).length"
    weight = run.pruning.model[0].weight
    assert page.run(gaps, "gallery-0-0") == 0
    assert page.run(gaps, "gallery-0-1") == int((weight == 0).sum())


def test_dark_and_light_are_both_drawn(opened):
    page = opened("one.html", scheme="light")
    look = (
        "const p = document.getElementById('kept');"
        "return [getComputedStyle(document.body).backgroundColor, p._fullLayout.font.color, "
        "p._fullLayout.xaxis.gridcolor]"
    )
    light = page.run(look)
    page.emulate(scheme="dark")
    page.wait(f"return (() => {{ {look} }})()[1] !== '{light[1]}'")
    dark = page.run(look)
    assert all(a != b for a, b in zip(light, dark, strict=True))


@pytest.mark.parametrize("name", ["one.html", "two.html"])
def test_a_phone_needs_no_sideways_scrolling(opened, name):
    page = opened(name, width=390, height=844, phone=True)
    assert page.run("return document.documentElement.scrollWidth") <= 390
    assert page.run(
        "return [...document.querySelectorAll('.plot')].every(p => p.getBoundingClientRect().right "
        "<= 391)"
    )


def test_the_command_is_copied(opened):
    page = opened("one.html")
    label = page.run(
        "const b = document.querySelector('[data-copy=command]'); b.click(); return b.textContent"
    )
    assert label in ("Copied", "Press Ctrl+C")
    assert page.run("return getSelection().toString().trim()") == "lobs prune net --keep 20%"
