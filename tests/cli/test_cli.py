from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from lobs import LobsError
from lobs.cli import app

USER_CODE = """
import torch
from torch import nn

def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(200, 10)
    with torch.no_grad():
        y = model(x).argmax(1)
    def error(net):
        return 100 * float((net(x).argmax(1) != y).float().mean())
    return model, [x[:100], x[100:]], error

def silent():
    return network()[:2]

def wrong():
    return 5

def raises():
    raise ValueError("my bug")

def needs(argument):
    return network()

def wide():
    return network()[0], [torch.randn(10, 21)]

def labels_first():
    return network()[0], [(torch.zeros(10, dtype=torch.long), torch.randn(10, 10))]

def one_tensor():
    return network()[0], torch.randn(100, 10)

def odd_score():
    return *network()[:2], lambda net: "good"

def talkative():
    print("hello from the user's code")
    return network()

def bare():
    return nn.Linear(10, 8), [torch.randn(100, 10)]

number = 3
"""


def run(*args, cwd=None):
    """The command in a process of its own, as a user runs it: with buffered output."""
    done = subprocess.run(
        [sys.executable, "-m", "lobs", *map(str, args)],
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def invoke(*args):
    """The command in this process: faster, and shows exceptions."""
    return CliRunner().invoke(app, list(map(str, args)), catch_exceptions=False)


def as_json(*args):
    """The command's document; a default name may be taken again."""
    unnamed = args[0] == "prune" and "--out" not in args
    result = invoke(*args, "--json", *(["--force"] if unnamed else []))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_help_is_quick_and_does_not_import_torch():
    began = time.monotonic()
    code, out, _ = run("--help")
    assert code == 0 and "demo" in out
    assert time.monotonic() - began < 30  # a hang guard; the measured time stands in the docs
    probe = (
        "import sys; sys.argv = ['lobs', '--help']\n"
        "try:\n    import lobs.cli; lobs.cli.main()\nexcept SystemExit: pass\n"
    )
    check = f"{probe}assert 'torch' not in sys.modules"
    assert (
        subprocess.run([sys.executable, "-c", check], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.parametrize(
    "command",
    sorted(command.name for command in app.registered_commands),
)
def test_every_command_teaches_with_an_example_at_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(command, "--help")
    assert result.exit_code == 0 and "--json" in result.output
    examples = [line for line in result.output.splitlines() if line.startswith("  lobs ")]
    assert any(f"lobs {command}" in line for line in examples)
    assert all(len(line) <= 80 for line in result.output.splitlines())
    assert "…\n" not in result.output and "<bool>" not in result.output


def test_the_help_of_prune_has_panels_and_fits_on_90_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke("prune", "--help").output
    titles = re.findall(r"╭─ (\w+)", text)
    assert titles == ["Argument", "Target", "Pattern", "Data", "Output", "Machine", "Expert"]
    assert len(text.splitlines()) < 90
    assert "lobs prune lenet300 --keep 7%" in text.splitlines()[5]  # the easiest comes first


def test_names_that_help_and_completion_list_are_those_that_exist():
    from lobs import SOLVERS, zoo
    from lobs.cli import options

    assert list(options.NETWORKS) == list(zoo.ZOO)
    assert list(options.SOLVERS) == list(SOLVERS)
    text = " ".join(invoke("prune", "--help").output.replace("│", " ").split())
    assert all(name in text for name in SOLVERS if "+" not in name)


def test_the_shell_completes_commands_options_networks_and_files(tmp_path):
    (tmp_path / "small.safetensors").touch()
    (tmp_path / "notes.txt").touch()

    def completions(words):
        shell = {"_PYTHON _M LOBS_COMPLETE": "complete_bash", "_LOBS_COMPLETE": "complete_bash"}
        variables = {**shell, "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        code = "import sys; sys.argv = ['lobs']; from lobs.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout.split()

    assert completions("lobs pru") == ["prune"]
    assert set(completions("lobs prune lenet")) == {"lenet300", "lenet5"}
    assert completions("lobs bench sm") == ["small.safetensors"]
    assert completions("lobs prune lenet5 --solver gre") == ["greedy", "greedy+refine"]
    assert "--keep" in completions("lobs prune lenet5 --k")


def test_prune_eval_and_verify_a_zoo_network(tmp_path):
    out, report = tmp_path / "small.safetensors", tmp_path / "report.html"
    done = as_json(
        "prune",
        "lenet300",
        "--keep",
        "fc1=6.7%,fc2=20%,fc3=0.65",
        "--samples",
        2000,
        "--out",
        out,
        "--report",
        report,
    )
    assert (
        done["kept"] == 22_408
        and done["after"] < done["before"] + 1
        and report.stat().st_size > 10_000
    )
    evaluated = as_json("eval", out)
    assert evaluated["value"] == done["after"] and evaluated["nonzero"] <= 22_408 + 410
    verified = as_json("verify", out)
    assert verified["holds"] and len(verified["findings"]) == 13
    stay = ["answers that stay", "held-out answers that stay"]
    assert [f["check"] for f in verified["findings"][-3:-1]] == stay
    assert verified["findings"][-1]["check"] == "guarantee"


def test_a_users_own_network_from_the_shell(tmp_path):
    (tmp_path / "mycode.py").write_text(USER_CODE)
    code, out, err = run(
        "prune",
        "mycode:network",
        "--epsilon",
        "0.1",
        "--relative",
        "--out",
        "x.safetensors",
        cwd=tmp_path,
    )
    assert code == 0, err
    assert "evaluate()" in out and (tmp_path / "x.safetensors").is_file()
    code, _, err = run("verify", "x.safetensors", cwd=tmp_path)
    assert code == 1 and "Add --trust to run that code" in err
    code, out, err = run("verify", "x.safetensors", "--trust", cwd=tmp_path)
    assert code == 0 and "everything holds" in out, out + err
    code, out, _ = run("prune", "mycode:silent", "--keep", "50%", cwd=tmp_path)
    assert code == 0 and (tmp_path / "mycode-silent-keep50.safetensors").is_file()
    assert out.splitlines()[0] == "result goes to mycode-silent-keep50.safetensors"


def test_a_network_wide_budget_from_the_shell():
    done = as_json("prune", "lenet300", "--keep", "10%", "--scope", "network", "--samples", 500)
    assert (
        done["kept"] == 26_620
        and done["layers"][2]["kept_fraction"] > done["layers"][0]["kept_fraction"]
    )


def test_json_is_pure_whatever_user_code_prints(tmp_path):
    (tmp_path / "mycode.py").write_text(USER_CODE)
    code, out, err = run("prune", "mycode:talkative", "--keep", "50%", "--json", cwd=tmp_path)
    assert code == 0 and json.loads(out)["kept"] == 52 and "hello" in err
    code, out, err = run("prune", "mycode:talkative", "--keep", "7", "--json", cwd=tmp_path)
    assert (
        code == 1 and "did you mean 7%?" in json.loads(out)["error"] and err.startswith("error: ")
    )


def test_a_bare_layer_can_be_saved_and_verified(tmp_path):
    (tmp_path / "mycode.py").write_text(USER_CODE)
    code, _, err = run(
        "prune", "mycode:bare", "--keep", "50%", "--out", "x.safetensors", cwd=tmp_path
    )
    assert code == 0, err
    code, out, _ = run("verify", "x.safetensors", "--no-recompute", cwd=tmp_path)
    assert code == 0 and "kept 40, recorded 40" in out


def test_a_file_cannot_run_code_that_the_user_did_not_name(tmp_path):
    import lobs

    path = tmp_path / "evil.safetensors"
    lobs.save(
        {"w": torch.zeros(2)},
        path,
        {"w": torch.zeros(2, dtype=torch.bool)},
        {"network": "os:abort", "origin": "os:abort"},
    )
    for command in ("eval", "verify", "inspect"):
        code, _, err = run(command, path)
        assert code == 1 and "Add --trust to run that code" in err


@pytest.mark.parametrize(
    "record", [{"layers": "abc"}, {"layers": [{"name": "w"}]}, {"layers": [3]}, {"network": 5}]
)
def test_a_damaged_record_is_one_clear_line(tmp_path, record):
    import lobs

    path = lobs.save(
        {"w": torch.zeros(2)},
        tmp_path / "x.safetensors",
        {"w": torch.zeros(2, dtype=torch.bool)},
        record,
    )
    code, _, err = run("verify" if "layers" in record else "eval", path)
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1


def test_version():
    assert run("--version")[1].startswith("lobs 0.")


def test_sweep_writes_csv_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    done = as_json(
        "sweep",
        "lenet300",
        "--samples",
        1000,
        "--points",
        6,
        "--solver",
        "magnitude",
        "--out",
        tmp_path / "s",
    )
    ours, paper = done["methods"]
    assert len(ours["points"]) == len(paper["points"]) == 6
    assert ours["inflection"] is not None and paper["method"] == "L-OBS as published"
    lines = (tmp_path / "s" / "sweep.csv").read_text().splitlines()
    assert len(lines) == 13 and lines[0].startswith("method,asked,kept_fraction")
    assert (tmp_path / "s" / "sweep.png").stat().st_size > 5_000


def test_inspect_lists_layers_and_quantiles():
    done = as_json("inspect", "lenet5", "--samples", 200)
    assert [row["name"] for row in done["layers"]] == ["conv1", "conv2", "fc1", "fc2"]
    quantiles = list(done["layers"][0]["sensitivity_quantiles"].values())
    assert quantiles == sorted(quantiles) and quantiles[0] >= 0


def test_train_writes_a_checkpoint_that_eval_reads(tmp_path):
    done = as_json(
        "train", "lenet300", "--epochs", 1, "--seed", 3, "--out", tmp_path / "mine.safetensors"
    )
    assert (
        done["test_error"] < 10
        and as_json("eval", tmp_path / "mine.safetensors")["value"] == done["test_error"]
    )


def test_demo_ends_in_a_table_a_report_and_a_network(tmp_path):
    result = invoke("demo", "--out", tmp_path / "d", "--samples", 2000)
    assert result.exit_code == 0
    assert all(
        word in result.output
        for word in ("L-OBS as published", "magnitude", "greedy OBS", "defaults", "report.html")
    )
    assert invoke("verify", tmp_path / "d" / "lenet300-7pct.safetensors").exit_code == 0


def test_verify_fails_loudly_when_a_zero_came_back(tmp_path):
    import torch

    import lobs

    out = tmp_path / "small.safetensors"
    as_json(
        "prune",
        "lenet300",
        "--keep",
        "20%",
        "--samples",
        500,
        "--solver",
        "magnitude",
        "--out",
        out,
    )
    saved = lobs.load(out)
    state = dict(saved.state_dict)
    state["fc1.weight"] = (
        state["fc1.weight"]
        + torch.full_like(state["fc1.weight"], 1e-3) * ~saved.masks["fc1.weight"]
    )
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(out, "pt") as file:
        header = file.metadata()
    save_file(state, out, metadata=header)
    code, _, err = run("verify", out)
    assert code == 1 and "error:" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["prune", "lenet300"], "give exactly one of --keep, --drop, --parameters"),
        (["prune", "lenet300", "--keep", "7%", "--epsilon", "1"], "give exactly one"),
        (["prune", "lenet300", "--keep", "much"], "is not a number"),
        (["prune", "lenet300", "--keep", "170%"], "--keep 170% is 170 %, not between 0 and 100 %"),
        (
            ["prune", "lenet300", "--keep", "7"],
            "--keep 7 is 700 %, not between 0 and 100 %; did you mean 7%?",
        ),
        (["prune", "lenet300", "--keep", "7%", "--relative"], "--relative goes with --epsilon"),
        (["prune", "lenet300", "--keep", "7%", "--out", "."], "it is a folder"),
        (["prune", "mycode:raises", "--keep", "7%"], "'mycode:raises' raised ValueError: my bug"),
        (["prune", "mycode:needs", "--keep", "7%"], "raised TypeError"),
        (["prune", "mycode:number", "--keep", "7%"], "raised TypeError"),
        (
            ["prune", "mycode:wide", "--keep", "7%"],
            "layer '0' takes floating-point inputs of 10 features, but was given",
        ),
        (["prune", "mycode:labels_first", "--keep", "7%"], "In a tuple the input comes first"),
        (["prune", "mycode:one_tensor", "--keep", "7%"], "one tensor x is [x]"),
        (["prune", "mycode:odd_score", "--keep", "7%"], "evaluate returned 'good'"),
        (["prune", ":f", "--keep", "7%"], "raised ValueError"),
        (
            ["sweep", "mycode:network", "--start", "5%", "--stop", "50%"],
            "sizes fall from start to stop",
        ),
        (["sweep", "mycode:network", "--by", "rato"], "use keep or epsilon"),
        (["sweep", "mycode:network", "--out", "mycode.py"], "cannot make the folder"),
        (["prune", "nonsense", "--keep", "7%"], "neither a zoo network"),
        (["prune", "no_such_module:f", "--keep", "7%"], "cannot import"),
        (["prune", "mycode:nothing", "--keep", "7%"], "has no 'nothing'"),
        (["prune", "mycode:wrong", "--keep", "7%"], "must return (model, batches)"),
        (["prune", "mycode:network", "--keep", "7%", "--solver", "best"], "unknown solver 'best'"),
        (
            ["prune", "mycode:network", "--keep", "7%", "--inputs", "odd"],
            "use 'dense', 'pruned', 'asymmetric'",
        ),
        (["prune", "mycode:network", "--keep", "7%", "--scope", "odd"], "use 'layer' or 'network'"),
        (
            ["prune", "mycode:network", "--epsilon", "1", "--scope", "network"],
            "--scope goes with --keep",
        ),
        (["prune", "mycode:network", "--keep", "fc9=7%"], "matches no prunable layer"),
        (["prune", "mycode:network", "--keep", "7%", "--out", "no/such/x"], "there is no folder"),
        (["sweep", "mycode:silent"], "has no evaluate function"),
        (
            ["export", "mycode:network", "--format", "onnx", "--values", "int8"],
            "--values int8 goes with --format compact",
        ),
        (["prune", "mycode:network", "--bytes", "10"], "what cannot be removed takes"),
        (["eval", "mycode:silent"], "has no evaluate function"),
        (["verify", "missing.safetensors"], "there is no file"),
        (
            ["verify", "mycode.py"],
            "not a readable safetensors file: it is text that begins 'import torch'",
        ),
        (
            ["verify", "lenet300"],
            "names a network, and this takes a file: `lobs prune lenet300 --keep 10% --out",
        ),
        (["report", "mycode:network"], "names a network, and this takes a file"),
        (["retrain", "lenet300", "--out", "x"], "names a network, and this takes a file"),
        (["eval", "."], "'.' is a folder: name a safetensors file in it"),
        (["train", "resnet"], "There are: lenet300, lenet5"),
    ],
)
def test_bad_input_is_one_clear_line(args, message, tmp_path, monkeypatch, capsys):
    from lobs.cli import main

    (tmp_path / "mycode.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lobs", *args])
    sys.modules.pop("mycode", None)
    with pytest.raises(SystemExit) as stop:
        main()
    err = capsys.readouterr().err
    assert stop.value.code == 1 and message in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"mycode.py", "__pycache__"}


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(tmp_path):
    few = ("prune", "lenet300", "--keep", "10%", "--samples", "200", "--dry-run")
    code, out, _ = run(*few, "--out", tmp_path / "small.safetensors")
    assert code == 0 and "passes over the data" in out and "memory: about" in out
    assert not any(tmp_path.iterdir())
    code, out, _ = run(*few, "--memory", "4GB", "--json")
    assert json.loads(out)["limit"] == 4_000_000_000


def test_memory_that_is_not_enough_is_one_line():
    code, _, err = run("prune", "lenet300", "--keep", "10%", "--samples", "200", "--memory", "50MB")
    assert code == 1 and err.count("\n") == 1 and "is not enough" in err and "Traceback" not in err


def test_memory_is_promised_and_the_plan_printed():
    code, out, err = run(
        "prune", "lenet300", "--keep", "10%", "--samples", "500", "--memory", "2GB"
    )
    assert code == 0, err
    assert "of 2.00 GB" in out and "kept" in out


def test_no_command_writes_over_what_it_reads(tmp_path, monkeypatch):
    (tmp_path / "mycode.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "p.safetensors"
    invoke("prune", "mycode:network", "--keep", "50%", "--out", file)
    before = file.read_bytes()
    page = tmp_path / "page.html"
    page.symlink_to(file)
    for words in (
        ("prune", file, "--trust", "--keep", "40%", "--out", file),
        ("prune", file, "--trust", "--keep", "40%", "--report", page),
        ("prune", file, "--trust", "--keep", "40%", "--log", file),
        ("prune", file, "--trust", "--keep", "40%", "--log", "a.html", "--report", "a.html"),
        ("export", file, "--values", "int8", "--out", file),
        ("shrink", file, "--trust", "--out", file),
        ("retrain", file, "--out", file),
        ("stages", file, "--stages", "5%:3", "--out", file),
    ):
        with pytest.raises(LobsError, match="would overwrite"):
            invoke(*words)
    assert file.read_bytes() == before
    for words in (("retrain", file, "--out", "z"), ("stages", file, "--stages", "5%:3")):
        with pytest.raises(LobsError, match="Add --trust to run that code"):
            invoke(*words)
        with pytest.raises(LobsError, match=r"have no labels: return .* or add --distil"):
            invoke(*words, "--trust")


@pytest.mark.parametrize(
    "command", [["verify"], ["eval"], ["export"], ["export", "--format", "onnx"], ["report"]]
)
def test_a_foreign_file_is_called_what_it_is_with_a_way_out(command, tmp_path, monkeypatch):
    import pickle

    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("to do: prune")
    (tmp_path / "noise").write_bytes(bytes(range(200, 0, -1)))
    (tmp_path / "old.pkl").write_bytes(pickle.dumps({"a": 1}))
    torch.save({"w": torch.ones(2)}, "new.pth")
    save_file({"w": torch.ones(2)}, "other.safetensors")
    words = {
        "empty": r"is empty \(0 bytes\)\. Write or fetch it again",
        "folder": "is a folder: name a safetensors file in it",
        "notes.txt": "is text that begins 'to do: prune'. Give a file",
        "noise": "has another format or is damaged: give a file",
        "old.pkl": "is a pickle, and lobs unpickles nothing. Load it in a function of your own",
        "new.pth": r"zip archive, as torch.save writes.*lobs.save\(state_dict, 'new.safetensors'\)",
    }
    if command != ["export"]:  # which makes any safetensors file smaller
        words["other.safetensors"] = "lobs prune"
    for name, said in words.items():
        with pytest.raises(LobsError, match=said):
            invoke(*command, name)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["prune"], "missing argument 'NETWORK'. See "),
        (["stages", "x"], "missing option '--stages'. See "),
        (["prune", "lenet300", "--kep", "7%"], "no such option: --kep"),
        (["prune", "lenet300", "--samples", "0"], "invalid value for '--samples'"),
        (["prune", "lenet300", "--samples", "many"], "invalid value for '--samples'"),
        (["prune", "lenet300", "--keep"], "option '--keep' requires an argument."),
        (["eval", "lenet300", "lenet5"], "unexpected extra argument"),
        (["prun", "lenet300"], "no such command 'prun'. Did you mean 'prune'? See "),
        (["verify", "--json"], " verify --help."),
    ],
)
def test_a_line_typed_wrong_is_one_clear_line_too_and_exit_code_2(
    args, message, monkeypatch, capsys
):
    from lobs.cli import main, output

    monkeypatch.setattr(sys, "argv", ["lobs", *args])
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # with --json, main replaces both
    monkeypatch.setattr(output, "output", None)
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and message in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in json.loads(out)["error"] if "--json" in args else not out


def test_no_words_at_all_are_answered_by_the_help(monkeypatch, capsys):
    from lobs.cli import main

    monkeypatch.setattr(sys, "argv", ["lobs"])
    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    assert "Start with" in out + err and "error" not in err


def test_a_result_that_does_not_hold_is_exit_code_1_through_main(tmp_path, monkeypatch, capsys):
    import lobs
    from lobs.cli import main

    lobs.save(
        {"w": torch.zeros(2)},
        tmp_path / "x.safetensors",
        {"w": torch.tensor([True, False])},
        {"origin": None},
    )
    lobs.save({"w": torch.ones(2)}, tmp_path / "tuned.safetensors")
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "lobs",
            "verify",
            str(tmp_path / "x.safetensors"),
            "--weights",
            str(tmp_path / "tuned.safetensors"),
        ],
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1 and "FAIL" in capsys.readouterr().out


def test_what_nobody_named_is_not_written_over(tmp_path, monkeypatch):
    """A default name is refused where something has it; `--force` or `--out` overwrites it."""
    (tmp_path / "mycode.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mycode", raising=False)
    small = (
        "prune",
        "mycode:network",
        "--keep",
        "50%",
        "--solver",
        "magnitude",
        "--out",
        "p.safetensors",
    )
    for _ in range(2):
        assert invoke(*small).exit_code == 0  # named: the second writes over the first
    commands = {
        "report.html": ("report", "p.safetensors", "--no-pictures"),
        "p.compact.safetensors": ("export", "p.safetensors"),
        "lenet300.safetensors": ("train", "lenet300", "--epochs", "1"),
        "lobs-sweep": ("sweep", "mycode:network", "--points", "2"),
    }
    for name, words in commands.items():
        (tmp_path / name).mkdir() if name == "lobs-sweep" else (tmp_path / name).write_text("mine")
        with pytest.raises(LobsError, match=f"'{name}' exists: overwrite it with --force"):
            invoke(*words)
    assert (tmp_path / "report.html").read_text() == "mine"
    for name in ("report.html", "p.compact.safetensors", "lobs-sweep"):
        assert invoke(*commands[name], "--out", name).exit_code == 0
        assert invoke(*commands[name], "--force").exit_code == 0
    assert (tmp_path / "report.html").read_text(encoding="utf-8") != "mine"
