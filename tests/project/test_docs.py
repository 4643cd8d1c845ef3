"""What the docs show runs, what they name exists, and the architecture page is true."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import typer

import lobs

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in [*PAGES, ROOT / "README.md"]}
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.S | re.M)
RUNNING = {
    name: [code for kind, code in FENCE.findall(text) if kind == "python"]
    for name, text in TEXTS.items()
}
EXTRAS = {"language-models.md": ("transformers", "tokenizers", "peft")}
COMMANDS = [
    (name, line)
    for name, text in TEXTS.items()
    for kind, block in FENCE.findall(text)
    if kind != "python"
    for line in block.splitlines()
    if line.startswith("lobs ")
]


@pytest.mark.parametrize(
    "name", [name for name, blocks in RUNNING.items() if blocks and name != "README.md"]
)
def test_the_code_of_a_page_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    for needed in EXTRAS.get(name, ()):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope = {"__name__": "page"}
    with warnings.catch_warnings():
        if name in EXTRAS:  # other libraries warn each other of what they will remove
            warnings.simplefilter("default", FutureWarning)
        for index, block in enumerate(RUNNING[name]):
            exec(compile(block, f"{name}, block {index + 1}", "exec"), scope)


@pytest.mark.parametrize(
    ("page", "line"), COMMANDS, ids=[f"{page}:{line[:40]}" for page, line in COMMANDS]
)
def test_a_command_parses_with_all_its_options(page, line):
    from lobs.cli import app

    words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(app)
    name, command, rest = group.resolve_command(
        group.make_context("lobs", words, resilient_parsing=False), words
    )
    command.make_context(name, rest)


def test_there_are_commands_and_blocks():
    assert len(COMMANDS) >= 20
    assert {"index.md", "tutorial.md", "own-model.md", "retrain.md", "faq.md"} <= {
        name for name, code in RUNNING.items() if code
    }


def test_the_reference_names_every_public_name_and_only_those():
    sections = re.split(r"^## ", TEXTS["api.md"], flags=re.M)[1:]
    shown = {
        part.splitlines()[0]: re.findall(r"^::: .*\.(\w+)$", part, flags=re.M) for part in sections
    }
    at_root = {name for title, names in shown.items() if "lobs." not in title for name in names}
    assert at_root - {"PruneOptions"} == set(lobs.__all__) - {"__version__", "SOLVERS"}
    for title, names in shown.items():
        if title.startswith("lobs."):
            room = importlib.import_module(title)
            assert [name for name in names if not hasattr(room, name)] == [], title
    assert sum(map(len, shown.values())) > 55
    paths = re.findall(r"^::: lobs\.(.*)$", TEXTS["api.md"], flags=re.M)
    assert [path for path in paths if not _exists(path)] == []


def test_every_benchmark_named_exists():
    named = {
        module
        for text in TEXTS.values()
        for module in re.findall(r"python -m (benchmarks\.\w+)", text)
    }
    assert named and all((ROOT / f"{module.replace('.', '/')}.py").is_file() for module in named)


def test_every_file_named_exists():
    pattern = r"\b(?:tests|benchmarks|experiments|examples|src)/[\w/]+\.(?:py|md|json)"
    named = {file for text in TEXTS.values() for file in re.findall(pattern, text)}
    assert len(named) >= 8
    assert {file for file in named if not (ROOT / file).is_file()} == set()


def test_the_choices_that_are_compared_are_options_of_prune():
    from benchmarks.how_to_choose import CHOICES

    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    batches = list(torch.randn(96, 6).split(12))
    for name, (solver, scope, inputs, refit) in CHOICES.items():
        options = {"solver": solver, "inputs": inputs, "refit": refit}
        result = lobs.prune(model, batches, lobs.Sparsity(0.5, scope), **options)
        assert result.kept == 36, name
        assert f"| {name} |" in TEXTS["how-to-choose.md"]


def test_every_panel_of_the_report_is_explained():
    template = (ROOT / "src/lobs/report/page.html.j2").read_text(encoding="utf-8")
    panels = re.findall(r"^<h2>([^{<]+)", template, flags=re.M)
    page = TEXTS["reading-the-report.md"]
    assert len(panels) > 8
    assert [
        name for name in panels if not re.search(rf"^\*\*{re.escape(name)}[.*]", page, re.M)
    ] == []


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_benchmark_can_be_imported(name):
    assert importlib.import_module(f"benchmarks.{name}").__doc__


def test_every_test_named_exists():
    named = {test for text in TEXTS.values() for test in re.findall(r"`(test_\w+)`", text)}
    assert len(named) > 20
    assert not {test for test in named if f"def {test}(" not in TESTS}


def test_every_function_the_mathematics_points_to_exists():
    text = TEXTS["the-mathematics.md"]
    pointed = [
        name
        for part in re.findall(r"→((?:\s*(?:and\s+)?`[^`]+`[,;]?)+)", text)
        for name in re.findall(r"`([^`]+)`", part)
    ]
    functions = [name for name in pointed if not name.startswith("test_")]
    assert len(functions) > 15
    for name in functions:
        assert _exists(name), name


def _exists(name: str) -> bool:
    """Return whether a file of the package, or a dotted name in it, exists."""
    if name.endswith(".py"):
        return (Path(lobs.__file__).parent / name).is_file()
    parts = name.split(".")
    for count in range(len(parts), -1, -1):
        try:
            found = importlib.import_module(".".join(["lobs", *parts[:count]]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_the_architecture_lists_every_package():
    root = Path(lobs.__file__).parent
    there = {path.name for path in root.iterdir() if (path / "__init__.py").is_file()}
    there |= {path.name for path in root.glob("*.py") if not path.name.startswith("__")}
    section = TEXTS["architecture.md"].split("## The packages")[1].split("\n##")[0]
    listed = re.findall(r"^\| `(\w+)(/|\.py)`", section, flags=re.M)
    assert {name if kind == "/" else name + kind for name, kind in listed} == there


def test_the_architecture_shows_the_ranks_of_the_import_contract():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contract = re.search(r"^layers = \[(.*?)^\]", text, flags=re.S | re.M)[1]
    ranks = [set(re.findall(r"\w+", line)) for line in re.findall(r'"(.*?)"', contract)]
    shown = re.search(r"^    (errors, targets <.*)$", TEXTS["architecture.md"], flags=re.M)[1]
    assert [set(re.findall(r"\w+", rank)) for rank in shown.split("<")] == ranks[::-1]


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    assert set(re.findall(r"[\w-]+\.md", navigation)) == {page.name for page in PAGES}


def test_every_link_between_pages_leads_to_a_page_and_a_heading():
    for name, text in TEXTS.items():
        home = ROOT if name == "README.md" else ROOT / "docs"
        for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
            if link.startswith("http"):
                continue
            path, _, heading = link.partition("#")
            target = (home / path).resolve()
            assert target.is_file(), f"{name}: {link}"
            if heading:
                found = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.M)
                assert heading in map(_anchor, found), f"{name}: {link}"


def _anchor(heading: str) -> str:
    """Return the anchor that mkdocs gives a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_the_site_fetches_nothing_from_elsewhere():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^  - offline", settings, flags=re.M)
    shim = re.search(r"polyfills: \[(.*iframe-worker.*)\]", settings)[1]
    assert (ROOT / "docs" / shim).is_file()


@pytest.mark.slow
def test_the_search_works_on_a_page_that_is_opened_from_a_folder(tmp_path):
    pytest.importorskip("mkdocs")
    browser = shutil.which("chromium") or pytest.skip("no chromium")
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site]
    subprocess.run(build, cwd=ROOT, check=True)
    pages = list(site.glob("*.html"))
    assert len(pages) > 15
    assert not [page for page in pages if re.search(r'src="https?:', page.read_text("utf-8"))]
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --virtual-time-budget=9000"
    look = [browser, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    address = (site / "index.html").as_uri() + "?q=damping"
    shown = subprocess.check_output([*look, address], text=True, timeout=120)
    assert re.search(r"\d+ matching documents", shown)
