from __future__ import annotations

import dataclasses
import itertools
import json
import math
import platform
import re
import subprocess
import sys
from html import escape
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import lobs
from lobs.certificate.bound import Certificate
from lobs.errors import FileError, LobsError
from lobs.pruning import summary
from lobs.report import (
    Run,
    figures,
    headline,
    panels,
    pictures,
    read_run,
    tables,
    waterfall,
    whatif,
    words,
    write_report,
)
from lobs.report.headline import Facts
from lobs.report.tables import environment
from lobs.solvers.scores import Histogram

HOSTILE = [
    '<img src="https://evil.example/x">',
    "</script><script>alert(1)</script>",
    "%{x} & <a href='https://evil.example'>",
]
SOLVERS = {"greedy": lobs.GreedyOBS(backend="torch"), "lobs": "lobs", "magnitude": "magnitude"}


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.b(x * torch.relu(self.a(x)))  # a product: no bound is known


def run(solver, model=None, **more):
    torch.manual_seed(1)
    network = model or nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)
    )
    batches = [torch.randn(40, 6)]
    result = lobs.prune(
        network,
        batches,
        lobs.Sparsity(0.5, scope="layer"),
        inputs="dense",
        solver=SOLVERS[solver],
        progress=False,
        execution=lobs.Execution(diagnostics=True),
    )
    return Run(solver, dataclasses.replace(result, **more), 1.66, 1.85)


@pytest.fixture(scope="module")
def three():
    return [run(solver) for solver in SOLVERS]


@pytest.fixture
def page(tmp_path):
    def write(runs, **more):
        given = {"title": "a title", "command": "lobs prune net", **more}
        return write_report(tmp_path / "report.html", runs, **given).read_text(encoding="utf-8")

    return write


def drawn(text):
    return json.loads(
        re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)[1]
    )


class Reader(HTMLParser):
    """Tags with their attributes, the text of every table cell, and all text in one."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        self.texts.append(data)
        if self.cells:
            self.cells[-1] += data.strip()


def test_the_page_loads_nothing_from_anywhere(three, page):
    text = page(three, seed=0)
    assert not re.search(r"https?://|@import|url\(", text)
    for tag, attributes in Reader(text).tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        assert not {"src", "href", "srcset", "action"} & set(attributes)
    assert "default-src 'none'" in text


def test_hostile_strings_are_text_and_nothing_else(three, page):
    layers = tuple(
        dataclasses.replace(layer, name=name)
        for layer, name in zip(three[0].pruning.layers, HOSTILE, strict=True)
    )
    solutions = dict(zip(HOSTILE, three[0].pruning.solutions.values(), strict=True))
    result = dataclasses.replace(
        three[0].pruning, layers=layers, solutions=solutions, settings={HOSTILE[1]: HOSTILE[0]}
    )
    text = page(
        [Run(HOSTILE[1], result, metric=HOSTILE[0])],
        title=HOSTILE[1],
        command=f"lobs {HOSTILE[0]} \udce9",
    )
    reader = Reader(text)
    tags = [tag for tag, _ in reader.tags]
    assert tags.count("script") == 2
    assert not {"img", "a"} & set(tags)
    assert set(HOSTILE) <= set(reader.cells)
    # Names are stored as text, and nothing in the scripts reads text as HTML.
    assert HOSTILE[0] in json.dumps(drawn(text), ensure_ascii=False).replace('\\"', '"')
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


def test_the_numbers_are_those_of_the_pruning(three, page):
    text = page(three)
    cells = Reader(text).cells
    for one in three:
        result, certificate = one.pruning, one.pruning.certificate
        assert f"{result.kept:,} ({words.percent(result.kept / result.total)})" in cells
        changes = {
            words.relative(x, certificate) for x in (certificate.bound, certificate.measured)
        }
        assert changes <= set(cells)
        assert certificate.output_norm and all(change.endswith("%") for change in changes)
        for layer in result.layers:
            at = max(
                i
                for i in range(len(cells))
                if cells[i : i + 2] == [layer.name, "×".join(map(str, layer.shape))]
            )
            assert [layer.name, str(layer.kept), str(layer.total)] == [
                cells[at],
                *cells[at + 2 : at + 4],
            ]
            assert {words.number(layer.error), words.percent(layer.relative_error)} <= set(cells)
    assert "1.66 → 1.85" in cells
    shown = drawn(text)
    marks = sorted(tuple(trace["x"]) for trace in shown["relative"]["data"])
    assert marks == sorted(
        tuple(100 * layer.relative_error for layer in one.pruning.layers) for one in three
    )
    for index, one in enumerate(three):
        c = one.pruning.certificate
        unit = 100 / c.output_norm
        measured = [unit * x for x in (c.measured, c.bound, c.frobenius_bound)]
        assert shown["bounds"]["data"][index]["x"] == pytest.approx(measured)
        (bars,) = shown[f"ledger-{index}"]["data"]
        terms = [unit * x for x in c.contributions.values()]
        assert bars["x"][:-2] == pytest.approx(terms)
        assert sum(bars["x"][:-2]) == pytest.approx(unit * c.bound)
        assert bars["x"][-2:] == pytest.approx([unit * c.bound, unit * c.measured])


def test_the_best_of_a_column_is_marked_and_equals_are_not(three, page):
    text = page(three)
    best = re.findall(r"<td[^>]* class=best><span>(.*?)</span>", text)
    least = min((one.pruning.certificate for one in three), key=lambda c: c.measured)
    assert words.relative(least.measured, least) in best
    assert not any("(" in cell for cell in best)  # all runs keep the same number of weights
    assert "class=best" not in page(three[:1])


@pytest.mark.parametrize(("metric", "best"), [("test error (%)", 0), ("evaluate()", 1)])
def test_the_lowest_error_and_the_largest_score_are_best(three, metric, best):
    runs = [
        dataclasses.replace(one, metric=metric, error_after=after)
        for one, after in zip(three[:2], (1.0, 2.0), strict=True)
    ]
    column = next(
        x
        for x in tables.headline([Facts(one, None, None, None) for one in runs])
        if x.heading == metric
    )
    assert [column.best(0), column.best(1)] == [best == 0, best == 1]


def test_kept_bars_are_drawn_once_where_all_runs_agree(three):
    assert [trace["marker"]["color"] for trace in figures.kept(three)["data"]] == [figures.NEUTRAL]
    fewer = dataclasses.replace(
        three[1].pruning,
        layers=tuple(dataclasses.replace(x, kept=1) for x in three[1].pruning.layers),
    )
    assert len(figures.kept([three[0], Run("fewer", fewer)])["data"]) == 2
    assert figures.kept(three[:1])["data"][0]["marker"]["color"] == figures.COLOURS[0]


def test_cuts_lie_where_pruning_stopped(three):
    for name, solution in three[0].pruning.solutions.items():
        line, *cuts = panels.error_curve(name, three)["data"]
        at = line["x"].index(round(100 * solution.removed / solution.prunable, 3))
        drawn = (float(solution.curve[solution.removed]) / solution.energy) ** 0.5
        assert line["y"][at] == pytest.approx(100 * drawn, rel=1e-3)
        assert drawn >= solution.relative_error * (
            1 - 1e-6
        )  # what damping adds to the error is in the curve alone
        places = [
            (100 * s.removed / s.prunable, 100 * s.relative_error)
            for s in (r.pruning.solutions[name] for r in three[::-1])
        ]
        assert [(cut["x"][0], cut["y"][0]) for cut in cuts] == places


@pytest.mark.parametrize("cut", [0, 1, 117_777, 234_999, 235_000])
def test_a_long_curve_is_thinned_but_keeps_its_ends_its_cut_and_its_shape(cut):
    curve = torch.linspace(0, 1, 235_001, dtype=torch.float64).pow(9)
    counts = panels.thin(curve, cut)
    assert {0, cut, 235_000} <= set(counts)
    assert len(counts) <= 400
    assert counts == sorted(set(counts))
    steps = curve[counts].clamp_min(1e-10).log10().diff()
    assert float(steps.max()) < 0.1
    assert max(b - a for a, b in itertools.pairwise(counts)) < 235_000 / 150


def test_a_run_without_curves_and_histograms_leaves_those_sections_out(page):
    plain = run("magnitude")
    layers = tuple(dataclasses.replace(layer, sensitivity=None) for layer in plain.pruning.layers)
    text = page([Run("magnitude", dataclasses.replace(plain.pruning, layers=layers))])
    assert set(drawn(text)) == {"result", "kept", "relative", "bounds", "ledger-0"}
    assert "How much each weight matters" not in text
    assert "What more pruning would cost" not in text
    assert "test error" not in text


def test_a_refused_certificate_is_explained_where_the_page_says_what_it_leaves_out(page):
    refused = run("greedy", Gated())
    certificate = refused.pruning.certificate
    assert certificate.bound is None
    text = page([refused])
    words_of_page = " ".join("".join(Reader(text).texts).split())
    left_out = words_of_page[words_of_page.index("Not on this page") :]
    assert f"Bound: {certificate.reason}." in left_out
    assert "bounds" not in drawn(text) and "Guaranteed and measured" not in text
    assert words.relative(certificate.measured, certificate) in Reader(text).cells


def test_a_sensitivity_histogram_holds_every_weight(three):
    for layer in three[0].pruning.layers:
        (trace,) = panels.sensitivity(layer.sensitivity)["data"]
        assert sum(trace["y"]) + 100 * layer.sensitivity.zeros / layer.total == pytest.approx(
            100, abs=0.1
        )
    assert panels.sensitivity(Histogram((), (), 12)) is None
    assert panels.sensitivity_note(Histogram((-3.0, -2.0, -1.0), (90, 10), 0)).endswith(
        "of the weights lie below 0.01."
    )
    assert "50 (50\u202f%) have none" in panels.sensitivity_note(
        Histogram((-3.0, -2.0, -1.0), (45, 5), 50)
    )


def test_numbers_that_are_not_finite_do_not_break_the_page(three, page):
    odd = [math.nan, math.inf, 0.0]
    rows = zip(three[0].pruning.layers, odd, strict=True)
    layers = tuple(dataclasses.replace(layer, error=x, relative_error=x) for layer, x in rows)
    certificate = Certificate(math.inf, math.nan, 0.0, {layer.name: math.nan for layer in layers})
    result = dataclasses.replace(
        three[0].pruning, layers=layers, certificate=certificate, seconds=math.nan
    )
    text = page([Run("odd", result, math.nan, math.inf), three[1]])
    assert {"NaN", "∞"} <= set(Reader(text).cells)
    assert drawn(text)["bounds"]["data"][0]["x"] == [None, None, None]


def test_many_layers_are_chosen_from_a_list(page):
    deep = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
    tags = Reader(page([run("greedy", deep)])).tags
    assert [tag for tag, _ in tags].count("select") == 2
    shown = [a for tag, a in tags if tag == "figure" and "data-panel" in a and "hidden" not in a]
    assert [a["data-panel"] for a in shown] == ["sensitivity-0", "curve-0", "ledger-0"]


def test_a_long_ledger_joins_small_steps_and_still_adds_up(three):
    result = three[0].pruning
    certificate = Certificate(210.0, 210.0, 1.0, {f"l{i}": i + 1.0 for i in range(20)})
    figure = waterfall.waterfall(
        Run("deep", dataclasses.replace(result, certificate=certificate)), most=12
    )
    assert figure["layout"]["yaxis"]["ticktext"] == [
        *("8 layers between", *(f"l{i}" for i in range(8, 20))),
        *("guaranteed bound", "measured"),
    ]
    bars = figure["data"][0]
    assert bars["x"] == pytest.approx([36.0, *range(9, 21), 210.0, 1.0])
    assert bars["base"][1:13] == pytest.approx(list(itertools.accumulate(range(9, 20), initial=36)))


def test_with_asymmetric_inputs_the_ledger_shows_what_layers_mend(three):
    result = three[0].pruning
    layers = [
        dataclasses.replace(x, relative_error=e)
        for x, e in zip(result.layers, (0.2, 0.5, 0.1), strict=True)
    ]
    settings = {**result.settings, "inputs": "asymmetric"}
    steps = waterfall.deviations(
        Run("mended", dataclasses.replace(result, layers=tuple(layers), settings=settings))
    )
    assert [(s.start, s.stop) for s in steps] == [(0.0, 0.2), (0.2, 0.5), (0.5, 0.1), (0.0, 0.1)]
    figure = waterfall.waterfall(
        Run("mended", dataclasses.replace(result, layers=tuple(layers), settings=settings))
    )
    colours = figure["data"][0]["marker"]["color"]
    assert colours == [waterfall.RISES, waterfall.RISES, waterfall.FALLS, figures.NEUTRAL]
    assert figure["data"][0]["base"] == pytest.approx([0.0, 20.0, 10.0, 0.0])


def test_names_are_cut_to_what_tells_them_apart():
    names = [f"backbone.stage_1.block_{i}.convolution_of_some_kind" for i in range(3)]
    assert words.short_names([*names, "head"]) == ["…block_0…", "…block_1…", "…block_2…", "head"]
    assert words.short_names(["x" * 40]) == ["…" + "x" * 23]
    # One name's parts may be nothing but what is shared.
    same = words.short_names(["a" * 20 + ".weights", "a" * 20 + ".b.weights"])
    assert len(set(same)) == 2
    assert all(len(name) <= 24 for name in same)


def test_the_page_says_how_to_do_it_again_and_not_where_it_was_done(three, page):
    text = page(three, command="lobs prune 'my net' && true", seed=7)
    assert escape("lobs prune 'my net' && true").replace("&#x27;", "&#39;") in text
    assert re.search(r"<dt>seed</dt><dd>7</dd>", text)
    assert {"lobs", "torch", "numpy", "python", "platform", "threads"} == set(environment())
    said = " ".join(environment().values())
    assert "/" not in said
    assert not platform.node() or platform.node() not in said


def test_the_file_appears_whole_or_not_at_all(three, tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("before")

    def fail(self, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", fail)
        with pytest.raises(
            FileError, match=r"cannot write '.*report.html': No space left on device\."
        ):
            write_report(target, three[:1], title="t", command="c")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert target.read_text() == "before"
    assert write_report(str(target), three[:1], title="t", command="c") == target
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_missing_folder_is_named(three, tmp_path):
    with pytest.raises(
        FileError, match=r"cannot write '.*nowhere.report\.html': No such file or directory\."
    ):
        write_report(tmp_path / "nowhere" / "report.html", three[:1], title="t", command="c")


def test_a_folder_is_not_overwritten(three, tmp_path):
    with pytest.raises(FileError, match="cannot write"):
        write_report(tmp_path, three[:1], title="t", command="c")


def test_no_runs_are_refused(tmp_path):
    with pytest.raises(LobsError, match="at least one run"):
        write_report(tmp_path / "report.html", [], title="t", command="c")


def test_importing_the_report_does_not_import_jinja_or_torch():
    code = (
        "import sys, lobs.report;sys.exit(any(name in sys.modules for name in ('jinja2', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def network_budget(**more):
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )
    images = torch.rand(30, 1, 6, 6)
    result = lobs.prune(
        model, [images], lobs.Sparsity(0.7), solver=SOLVERS["greedy"], progress=False, **more
    )
    return Run("budget", result, 1.0, 2.0, dense=model, example=images)


def test_a_saved_run_makes_the_same_page_as_a_live_one(tmp_path, page):
    live = network_budget()
    path = live.pruning.save(
        tmp_path / "net.safetensors", before=1.0, after=2.0, command="lobs prune it"
    )
    saved = read_run(path, "budget")
    assert saved.pruning.preview == live.pruning.preview
    assert saved.pruning.layers == live.pruning.layers
    assert saved.pruning.certificate == live.pruning.certificate
    assert whatif.slider([saved]) == whatif.slider([live])
    assert waterfall.waterfall(saved) == waterfall.waterfall(live)
    assert pictures.gallery([saved])[0]["sheets"] == pictures.gallery([live])[0]["sheets"][1:]
    assert "lobs prune it" in page([saved])


def test_a_file_without_a_record_is_refused(tmp_path):
    lobs.save(nn.Linear(2, 2), tmp_path / "net.safetensors")
    with pytest.raises(FileError, match=r"'.*net\.safetensors' has no record of a pruning"):
        read_run(tmp_path / "net.safetensors")


def test_a_page_with_everything_on_it_is_under_a_megabyte_and_a_half(page):
    """Twenty convolutions with pictures, curves and histograms, in two runs."""
    torch.manual_seed(0)
    deep = nn.Sequential(*(nn.Conv2d(12, 12, 3, padding=1) for _ in range(20)))
    images = torch.rand(4, 12, 6, 6)
    diagnostics = lobs.Execution(diagnostics=True)
    result = lobs.prune(
        deep, [images], keep=0.5, solver=SOLVERS["greedy"], execution=diagnostics, progress=False
    )
    two = [Run(label, result, 1.0, 2.0, dense=deep, example=images) for label in ("a", "b")]
    assert len(page(two).encode()) < 1_500_000
    assert len(page([network_budget()]).encode()) < 150_000


def test_pixels_read_are_those_with_a_weight_left():
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(36, 5))
    with torch.no_grad():
        linear[1].weight[:, 7] = 0
        linear[1].weight[1:, 8] = 0
    share = pictures.pixels_read(linear, torch.rand(2, 1, 6, 6)).flatten()
    assert share[7] == 0
    assert share[8] == pytest.approx(0.2)
    assert bool((share[9:] == 1).all())


def test_pixels_read_by_a_convolution_follow_its_stride_and_padding():
    convolution = nn.Conv2d(1, 1, 3, stride=2, padding=1, bias=False)
    with torch.no_grad():
        convolution.weight.zero_()
        convolution.weight[0, 0, 1, 1] = 1.0
    share = pictures.pixels_read(nn.Sequential(convolution), torch.rand(1, 1, 5, 5))
    expected = torch.zeros(5, 5)
    expected[::2, ::2] = 1.0
    assert torch.equal(share > 0, expected > 0)
    assert bool((share[::2, ::2] == 1).all())


def test_inputs_that_are_no_pictures_give_no_picture():
    for example in (
        torch.rand(3, 6),
        torch.ones(2, 1, 6, 6).long(),
        torch.rand(2, 7, 6, 6),
        None,
        {"x": torch.rand(2, 1, 6, 6)},
    ):
        assert not pictures.is_picture(example)
    result = run("magnitude")
    assert pictures.pixels([dataclasses.replace(result, example=torch.rand(5, 6))]) is None


def test_pixels_are_drawn_only_where_a_run_no_longer_reads_some():
    one = network_budget()
    linear = nn.Sequential(nn.Flatten(), nn.Linear(36, 5))
    blind = nn.Sequential(nn.Flatten(), nn.Linear(36, 5))
    with torch.no_grad():
        blind[1].weight[:, :9] = 0
    sees, misses = (dataclasses.replace(one, pruned=model) for model in (linear, blind))
    assert pictures.pixels([sees]) is None
    shown = pictures.pixels([sees, misses])
    assert [(run["read"], run["of"]) for run in shown["runs"]] == [(36, 36), (27, 36)]


def test_a_convolution_without_pictures_is_left_out_of_the_gallery():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Flatten(), nn.Linear(3 * 16, 4))
    result = lobs.prune(
        model,
        [torch.rand(20, 2, 4, 4)],
        lobs.Sparsity(0.5),
        solver=SOLVERS["greedy"],
        progress=False,
    )
    assert pictures.gallery([Run("1x1", result, dense=model)]) == []


def test_targets_that_allocate_no_budget_say_so(three):
    assert all("each layer by itself" in whatif.absence(one) for one in three)
    assert whatif.slider(three) is None
    budget = network_budget()
    lost = dataclasses.replace(budget.pruning, preview=None)
    assert "the file holds no error curves" in whatif.absence(Run("old", lost))


def test_without_a_curve_of_its_own_a_layers_line_is_the_previews(tmp_path):
    live = network_budget()
    saved = read_run(live.pruning.save(tmp_path / "net.safetensors"))
    for layer in live.pruning.layers:
        line, cut = panels.error_curve(layer.name, [saved])["data"]
        preview = live.pruning.preview
        assert line["line"]["dash"] == "dot"
        assert line["y"] == [100 * error or None for error in preview.errors[layer.name]]
        assert line["x"] == pytest.approx(
            [100 * n / layer.total for n in preview.removed[layer.name]], abs=1e-3
        )
        assert cut["x"] == pytest.approx([100 * (1 - layer.kept_fraction)])
        assert cut["y"] == [100 * layer.relative_error or None]  # a logarithmic axis has no zero


def test_runs_of_different_networks_say_so_and_held_out_change_is_in_the_numbers(page):
    one, held = network_budget(), [torch.rand(20, 1, 6, 6)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    result = lobs.prune(model, [torch.rand(30, 1, 6, 6)], keep=0.5, held_out=held, progress=False)
    other = Run("other", result)
    assert "Different networks" in page([one, other])
    assert "Different networks" not in page([one, network_budget()])
    text = page([other])
    held_out = result.certificate.held_out
    assert words.relative(held_out, result.certificate) in Reader(text).cells
    assert "GB of memory" in text


def lede(text):
    start = text.index('<p class="lede">')
    said = "".join(Reader(text[start : text.index("</p>", start)]).texts)
    return re.sub(r"[ \n]+", " ", said)


def test_the_headline_counts_weights_bytes_and_mistakes(page):
    result = network_budget().pruning
    times_fewer = words.times(result.total / result.kept)
    tested = Run("a", result, 1.50, 1.54, bytes_before=1_066_000, bytes_after=93_400)
    said = lede(page([tested]))
    assert f"{times_fewer} fewer weights: {result.kept:,} of {result.total:,} are left." in said
    assert "File 1.07 MB → 93.4 kB as a compact file." in said
    assert "Test error 1.50 → 1.54\u202f%: 4 more mistakes in 10,000." in said
    better = dataclasses.replace(tested, error_after=1.49)
    assert "1 fewer mistake in 10,000" in lede(page([better]))
    accuracy = dataclasses.replace(
        tested, metric="accuracy (%)", error_before=98.5, error_after=98.0
    )
    assert "Accuracy 98.50 → 98.00\u202f%: 50 more mistakes in 10,000." in lede(page([accuracy]))
    timed = dataclasses.replace(tested, seconds_before=0.004, seconds_after=0.001)
    assert "4.0× faster: 4 ms → 1 ms a call." in lede(page([timed]))
    assert "faster" not in said


def test_without_a_test_the_headline_says_how_often_both_networks_agree(page):
    one = network_budget()
    untested = dataclasses.replace(one, error_before=None, error_after=None)
    answers = [model(one.example).argmax(dim=1) for model in (one.dense, one.pruning.model)]
    same = int((answers[0] == answers[1]).sum())
    assert f"Same answer on {same} of 30 inputs as the dense network." in lede(page([untested]))
    alone = Run("alone", one.pruning)
    certificate = one.pruning.certificate
    change = words.percent(certificate.measured / certificate.output_norm)
    said = f"The output changed by {change} on the calibration samples"
    assert f"{said}; {summary.stay(certificate.certified)}." in lede(page([alone]))


def test_a_compact_files_size_is_what_a_compact_file_takes(tmp_path):
    one = network_budget()
    found = headline.facts(one)
    assert found.bytes_before == sum(4 * t.numel() for t in one.dense.state_dict().values())
    path = one.pruning.save(tmp_path / "net.safetensors")
    saved = headline.facts(read_run(path))
    assert (saved.bytes_before, saved.bytes_after) == (found.bytes_before, found.bytes_after)
    assert 4 * one.pruning.kept < found.bytes_after < found.bytes_before


def test_the_first_chart_compares_one_run_with_the_dense_network_and_several_by_error(three, page):
    result = network_budget()
    shown = drawn(page([result]))["result"]
    assert shown["layout"]["yaxis"]["ticktext"] == ["weights", "file", "test error"]
    assert shown["data"][0]["x"][0] == pytest.approx(100 * result.pruning.kept_fraction)
    assert shown["data"][0]["x"][2] == pytest.approx(200)
    assert shown["layout"]["guide"]["x"] == 100
    shown = drawn(page(three))["result"]
    assert shown["data"][0]["x"] == [1.85] * 3
    assert shown["layout"]["guide"]["x"] == 1.66


def test_a_bound_that_equals_the_measured_change_is_not_drawn(three):
    assert figures.bounds(three) is not None
    equal = [
        dataclasses.replace(
            one.pruning,
            certificate=dataclasses.replace(
                one.pruning.certificate, bound=one.pruning.certificate.measured
            ),
        )
        for one in three
    ]
    assert figures.bounds([Run("equal", pruning) for pruning in equal]) is None


def test_a_waterfall_of_one_step_is_not_drawn(three):
    result = three[0].pruning
    single = Certificate(1.0, 1.0, 0.5, {"fc": 1.0})
    assert waterfall.waterfall(Run("one", dataclasses.replace(result, certificate=single))) is None
