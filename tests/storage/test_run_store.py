"""A killed run that is resumed ends with the same bits; another run's folder is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import lobs
from lobs import Budget, Execution, LobsError, Numerics, Sparsity
from lobs.pruning import run as run_module
from lobs.storage.run_store import RunStore, open_run_store

# One process that has everything loaded; its children do the work and are killed, whenever they
# have written a little more.
PROGRAM = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import lobs, lobs.storage.run_store

lobs.storage.run_store._SHORTEST_SECONDS = 0.0  # save after every batch
lobs.storage.run_store._LARGEST_SHARE = 1e9
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
    nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5),
)
batches = [torch.randn(30, 16) for _ in range(4)]

def run(out, folder=None):
    execution = lobs.Execution(resume=folder)
    lobs.prune(model, batches, keep=0.3, progress=False, execution=execution).save(out)

def content(path):
    saved = lobs.load(path)
    wanted = ("name", "kept", "error", "relative_error")
    rows = [[row[key] for key in wanted] for row in saved.record["layers"]]
    weights = {n: t.numpy().tobytes() for n, t in saved.state_dict.items()}
    return weights, rows, saved.record["certificate"]

def child(*work):
    process = os.fork()
    if not process:
        try:
            run(*work)
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    return process

here, kills, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
run(here / "whole.safetensors")
truth, done, resumes = content(here / "whole.safetensors"), 0, 0
while done < kills:
    folder, out, goal = here / f"run_store{resumes}", here / f"out{resumes}", 0
    while True:
        goal += rng.randrange(1, 9)
        process = child(out, folder)
        ended = 0
        while not ended and len(list(folder.glob("[!.]*.safetensors"))) < goal:
            time.sleep(0.001)
            ended, status = os.waitpid(process, os.WNOHANG)
        if not ended:
            time.sleep(rng.random() * 0.01)
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        done += 1
    resumes += 1
    assert content(out) == truth, f"resume {resumes} differs"
print(done, resumes)
"""


def killed_and_resumed(tmp_path, kills, seed):
    """Return the number of kills and of killed runs. All of them ended with the same bits."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), str(kills), str(seed)]
    ended = subprocess.run(
        words,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    done, resumes = ended.stdout.split()
    return int(done), int(resumes)


def test_a_run_killed_at_any_point_ends_with_the_same_bits(tmp_path):
    assert killed_and_resumed(tmp_path, kills=8, seed=0)[0] >= 8


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing(tmp_path):
    assert killed_and_resumed(tmp_path, kills=100, seed=1)[0] >= 100


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def data():
    return list(torch.randn(4, 40, 10, generator=torch.Generator().manual_seed(1)))


def score(model):
    return float(model[4].weight.detach().abs().sum())


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("inputs", ["asymmetric", "pruned", "dense"])
@pytest.mark.parametrize(
    "target",
    [Sparsity(0.6), Sparsity(0.5, scope="layer"), Budget(drop=0.5, evaluate=score)],
    ids=["shared", "each", "drop"],
)
def test_work_that_was_done_is_not_done_again(tmp_path, monkeypatch, inputs, target):
    solve = run_module.solve
    solved, stop = [], None

    def counting(problem, *rest):
        if len(solved) == stop:
            raise Interrupt
        solved.append(problem.name)
        return solve(problem, *rest)

    monkeypatch.setattr("lobs.pruning.run.solve", counting)
    run = lambda **options: lobs.prune(  # noqa: E731
        network(), data(), target, inputs=inputs, progress=False, **options
    )
    whole = run()
    wanted, stop = list(solved), len(solved) // 2
    solved.clear()
    with pytest.raises(Interrupt):
        run(execution=Execution(resume=tmp_path))
    stop = None
    resumed = run(execution=Execution(resume=tmp_path))
    assert solved == wanted
    assert all(torch.equal(m, resumed.masks[n]) for n, m in whole.masks.items())
    assert all(
        torch.equal(t, resumed.model.state_dict()[n]) for n, t in whole.model.state_dict().items()
    )
    assert [(x.kept, x.error) for x in whole.layers] == [(x.kept, x.error) for x in resumed.layers]
    assert whole.certificate == resumed.certificate


def test_a_pass_over_the_data_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("lobs.storage.run_store._SHORTEST_SECONDS", 0.0)
    monkeypatch.setattr("lobs.storage.run_store._LARGEST_SHARE", 1e9)
    calls = []

    def interrupted(*_):
        calls.append(1)
        if len(calls) == 3:
            raise Interrupt

    model = network()
    handle = model.register_forward_pre_hook(interrupted)
    with pytest.raises(Interrupt):
        lobs.collect_moments(model, data(), run_store=RunStore(tmp_path))
    resumed = lobs.collect_moments(model, data(), run_store=RunStore(tmp_path))
    assert len(calls) == 3 + 2
    handle.remove()
    whole = lobs.collect_moments(model, data())
    assert all(torch.equal(m.moment, resumed[name].moment) for name, m in whole.items())
    assert (whole.samples, whole.shapes, whole.batches) == (
        resumed.samples,
        resumed.shapes,
        resumed.batches,
    )


SAME = Sparsity(0.6)
CHANGES = {  # the name of what differs, and a run that differs in it
    "target": lambda m, d: (m, d, Sparsity(0.5), {}),
    "target of one round": lambda m, d: (m, d, Sparsity(0.6, rounds=1), {}),
    "data": lambda m, d: (m, d[:-1], SAME, {}),
    "weights": lambda m, d: (nn.Sequential(*m[:4], nn.Linear(6, 3)), d, SAME, {}),
    "network": lambda m, d: (nn.Sequential(*m, nn.ReLU()), d, SAME, {}),
    "solver": lambda m, d: (m, d, SAME, {"solver": "lobs"}),
    "layers": lambda m, d: (m, d, SAME, {"skip": "0"}),
    "numerics": lambda m, d: (m, d, SAME, {"numerics": Numerics(damping=0.1)}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_input_or_setting_is_refused_by_name(tmp_path, what):
    always = {"execution": Execution(resume=tmp_path), "progress": False}
    lobs.prune(network(), data(), SAME, **always)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    model, batches, target, changed = CHANGES[what](network(), data())
    key = what.split()[0]
    with pytest.raises(
        LobsError, match=rf"belongs to another run: .*{key} was .*, is .*Give another folder"
    ):
        lobs.prune(model, batches, target, **always, **changed)
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}


def test_a_folder_in_use_is_refused(tmp_path):
    with (
        open_run_store(tmp_path, {}),
        pytest.raises(LobsError, match="another run is using"),
        open_run_store(tmp_path, {}),
    ):
        pass


def test_somebody_elses_folder_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with (
        pytest.raises(LobsError, match=r"holds 'thesis.txt' but no run store"),
        open_run_store(tmp_path, {}),
    ):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["../../escape", "/etc/passwd", "a" * 500, "x\0y", "…"])
def test_no_layer_name_leaves_the_folder(tmp_path, name):
    inside = tmp_path / "inside"
    inside.mkdir()
    run_store = RunStore(inside)
    run_store.write(name, {"t": torch.ones(1)}, {"a": 1})
    assert [p.parent for p in tmp_path.rglob("*.safetensors")] == [inside]
    found = run_store.read(name)
    assert found is not None and found.record["a"] == 1


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path, monkeypatch):
    run_store = RunStore(tmp_path)
    run_store.write("layer", {"t": torch.ones(3)}, {})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lobs.storage.checkpoint.save_file", full)
    with pytest.raises(LobsError, match=r"cannot write '.*': No space left on device\.$"):
        run_store.write("layer", {"t": torch.zeros(3)}, {})
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(LobsError, match="cannot make the folder"),
        open_run_store(tmp_path / "file" / "below", {}),
    ):
        pass
    with (
        pytest.raises(LobsError, match=r"cannot (write|make)"),
        open_run_store("/proc/self/run_store", {}),
    ):
        pass


def test_a_damaged_piece_names_the_file_to_delete(tmp_path):
    lobs.prune(
        network(),
        data(),
        lobs.Sparsity(0.6),
        progress=False,
        execution=lobs.Execution(resume=tmp_path),
    )
    victim = next(tmp_path.glob("run*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-3])
    with pytest.raises(LobsError, match=victim.stem[:5]):
        lobs.prune(
            network(),
            data(),
            lobs.Sparsity(0.6),
            progress=False,
            execution=lobs.Execution(resume=tmp_path),
        )
