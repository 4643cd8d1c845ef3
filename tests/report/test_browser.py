"""The report in a real browser: what moves, what it then shows, and that it loads nothing."""

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
    ".every(p => !p.clientWidth || p.querySelector('.chart'))"
)


def pruned(target=None, **more):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(128, 12), nn.ReLU(), nn.Linear(12, 5)),
    )
    images = torch.rand(200, 1, 16, 16)
    result = lobs.prune(
        model,
        [images],
        target or lobs.Sparsity(0.8),
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
    blind = nn.Sequential(nn.Flatten(), nn.Linear(256, 5))
    nn.init.zeros_(blind[1].weight[:, :100])
    seen = Run("main", run.pruning, 1.5, 1.8, pruned=blind, example=run.example)
    write_report(folder / "pixels.html", [seen], title="pixels", command="lobs prune net")
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
    norm = run.pruning.certificate.output_norm
    names = list(preview.totals)
    for stop in (0, preview.at // 2, len(preview.change) - 1, preview.at):
        move(page, stop)
        bars = page.run("return document.getElementById('what-if-kept').data[0].x")
        assert bars == pytest.approx(
            [100 * (1 - preview.removed[n][stop] / preview.totals[n]) for n in names]
        )
        marks = page.run("return document.getElementById('what-if-errors').data[0].x")
        assert marks == pytest.approx([100 * preview.errors[n][stop] or None for n in names])
        shown = page.run("return document.getElementById('what-if-change').data[1].y[0]")
        assert shown == pytest.approx(100 * preview.change[stop] / norm or None)
        share = float(text(page, "budget-share").rstrip("\u202f %"))
        assert share == pytest.approx(100 * preview.kept_fraction(stop), rel=5e-3)
        change = float(text(page, "budget-change").rstrip("\u202f %"))
        assert change == pytest.approx(100 * preview.change[stop] / norm, rel=5e-3)


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


def test_a_run_without_curves_has_no_empty_panel_and_says_why(opened, run):
    page = opened("none.html")
    assert not page.run("return document.getElementById('what-if')")
    said = page.run("return document.getElementById('absent').textContent")
    assert "Slider" in said and "each layer by itself" in said
    assert whatif.slider([run]) is not None


def test_tables_sort_by_number_both_ways(opened, run):
    page = opened("one.html")
    column = (
        "return [...document.querySelectorAll('table.sortable tbody tr')]"
        ".map(r => r.cells[2].textContent)"
    )
    click = "document.querySelectorAll('table.sortable thead button')[2].click()"
    kept = sorted(layer.kept for layer in run.pruning.layers)
    page.run(click)
    assert page.run(column) == [f"{k:,}" for k in kept]
    page.run(click)
    assert page.run(column) == [f"{k:,}" for k in kept[::-1]]


POINT = """
const plot = document.getElementById(arguments[0]);
plot.scrollIntoView({block: 'center'});
const box = plot.getBoundingClientRect();
const send = (kind, x, y) => plot.dispatchEvent(new PointerEvent(kind, {
  pointerType: 'mouse', button: 0, bubbles: true, clientX: box.left + x, clientY: box.top + y,
}));
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one.html", {"result", "kept", "what-if-change", "ledger-0", "gallery-0-1"}),
        ("pixels.html", {"pixels-mean", "pixels-0"}),
    ],
)
def test_every_plot_can_be_hovered_and_zoomed(opened, name, expected):
    page = opened(name)
    plots = page.run("return [...document.querySelectorAll('.plot')].map(p => p.id)")
    assert expected <= set(plots)
    for plot in plots:
        hovered = page.run(
            POINT + "for (let x = plot.area.left; x < plot.area.right; x += 2)"
            " for (let y = plot.area.top; y < plot.area.bottom; y += 2)"
            " if (plot.hover(x, y)) {"
            " send('pointermove', x, y); return document.getElementById('tip').textContent; }",
            plot,
        )
        assert hovered, plot
        zoomed = page.run(
            POINT + "const a = plot.area, w = a.right - a.left, h = a.bottom - a.top;"
            "send('pointerdown', a.left + 0.2 * w, a.top + 0.2 * h);"
            "send('pointermove', a.left + 0.6 * w, a.top + 0.6 * h);"
            "send('pointerup', a.left + 0.6 * w, a.top + 0.6 * h);"
            "const size = ([a, b]) => Math.abs(a - b);"
            "const share = (side) => size(plot.view[side]) / size(plot.whole[side]);"
            "return [share('x'), share('y')]",
            plot,
        )
        assert zoomed == pytest.approx([0.4, 0.4], abs=0.02), plot
        back = page.run(
            POINT + "plot.dispatchEvent(new MouseEvent('dblclick', {bubbles: true}));"
            "return plot.zoom === null && !!plot.querySelector('.chart')",
            plot,
        )
        assert back, plot


def test_a_zoomed_logarithmic_axis_keeps_at_least_two_ticks(opened):
    page = opened("one.html")
    ticks = page.run(
        "const plot = document.getElementById('relative');"
        "plot.zoom = {x: [0.8, 1.35], y: plot.whole.y}; draw(plot);"
        "return [...plot.querySelectorAll('.xtick')].map(t => t.textContent)"
    )
    assert ticks == ["10", "20"]


def test_names_from_a_user_are_shown_as_text(opened):
    page = opened("two.html")
    page.run(
        POINT + "const spot = plot.spots.find(s => s.text.includes('other'));"
        "send('pointermove', spot.x + 3, spot.y + spot.height / 2)",
        "kept",
    )
    assert "<b>other</b>: " in page.run("return document.getElementById('tip').textContent")
    assert not page.run("return document.querySelector('#tip *, .chart b')")


def test_pictures_show_what_was_removed_as_gaps(opened, run):
    page = opened("one.html")
    gaps = (
        "return document.getElementById(arguments[0]).data[0].text.flat()"
        ".filter(t => t.endsWith('removed')).length"
    )
    weight = run.pruning.model[0].weight
    assert page.run(gaps, "gallery-0-0") == 0
    assert page.run(gaps, "gallery-0-1") == int((weight == 0).sum())


def test_dark_and_light_are_both_drawn(opened):
    page = opened("one.html", scheme="light")
    look = (
        "const p = document.getElementById('kept');"
        "return [getComputedStyle(document.body).backgroundColor, "
        "getComputedStyle(p.querySelector('.xtick')).fill, "
        "getComputedStyle(p.querySelector('.rule')).stroke]"
    )
    light = page.run(look)
    page.emulate(scheme="dark")
    page.wait(f"return (() => {{ {look} }})()[1] !== '{light[1]}'")
    dark = page.run(look)
    assert all(a != b for a, b in zip(light, dark, strict=True))


@pytest.mark.parametrize("name", ["one.html", "two.html"])
@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_cut_on_a_phone_or_a_wide_screen(opened, name, width):
    page = opened(name, width=width, height=844, phone=width < 600)
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert page.run("return document.documentElement.scrollWidth") <= width
    wide = "s => s.scrollWidth > s.clientWidth + 1"
    assert not page.run(f"return [...document.querySelectorAll('.scroll, pre')].some({wide})")
    cut = page.run(
        "return [...document.querySelectorAll('.plot, .chart, .chart text, td, th')]"
        ".filter(e => e.getClientRects().length)"
        ".filter(e => e.getBoundingClientRect().right > arguments[0] + 1"
        " || e.getBoundingClientRect().left < -1).map(e => e.outerHTML.slice(0, 80))",
        width,
    )
    assert cut == []


def test_the_command_is_copied(opened):
    page = opened("one.html")
    label = page.run(
        "const b = document.querySelector('[data-copy=command]'); b.click(); return b.textContent"
    )
    assert label in ("Copied", "Press Ctrl+C")
    assert page.run("return getSelection().toString().trim()") == "lobs prune net --keep 20%"
