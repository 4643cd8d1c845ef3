"""Pruning beside other threads, under interrupts, on full disks, and of files that lie."""

from __future__ import annotations

import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import lobs
from lobs import Budget, Execution, LobsError, NumericalWarning
from lobs.cli.files import outside
from lobs.errors import printable
from lobs.solvers.kernels.compiling import compiled


def job(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    if seed % 2:
        model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval()
    return model, list(torch.randn(3, 20, 5, 8))


def bits(seed):
    model, batches = job(seed)
    state = lobs.prune(model, batches, keep=0.4, refit="layers", progress=False).model.state_dict()
    return {name: t.numpy().tobytes() for name, t in state.items()}


def test_threads_get_the_bits_of_one_and_do_not_disturb_others():
    networks = {seed: job(seed) for seed in range(4)}
    alone = {seed: bits(seed) for seed in networks}
    found, faults, done = {}, [], threading.Event()
    own, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(4, 6)
    right = own(x)
    prepared = {seed: (model, batches) for seed, (model, batches) in networks.items()}

    def prune(seeds):
        try:
            for seed in seeds:
                model, batches = prepared[seed]
                cut = lobs.prune(model, batches, keep=0.4, refit="layers", progress=False).model
                found[seed] = {n: t.numpy().tobytes() for n, t in cut.state_dict().items()}
        except BaseException as error:
            faults.append(error)

    def run():
        while not done.is_set():
            if not torch.equal(own(x), right):
                faults.append("another output")

    threads = [threading.Thread(target=prune, args=(range(k, 4, 2),)) for k in (0, 1)]
    beside = threading.Thread(target=run)
    for thread in (*threads, beside):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    beside.join()
    assert not faults and found == alone


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers of Unix")
def test_interrupts_leave_nothing_behind():
    model, batches = job(1)

    def prune():
        return lobs.prune(model, batches, keep=0.4, refit="layers", progress=False)

    prune()  # compiles
    began = time.perf_counter()
    right = prune().model.state_dict()
    each, caught = time.perf_counter() - began, 0
    switches = torch.backends.mha.get_fastpath_enabled(), nn.Module.__call__, nn.Module.__getattr__

    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for turn in range(8):
            try:
                signal.setitimer(signal.ITIMER_REAL, max(0.001, each * turn / 8))
                prune()
            except KeyboardInterrupt:
                caught += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            now = torch.backends.mha.get_fastpath_enabled()
            assert (now, nn.Module.__call__, nn.Module.__getattr__) == switches
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
            assert not any(m.training for m in model.modules())
    finally:
        signal.signal(signal.SIGALRM, before)
    after = prune().model.state_dict()
    assert caught and all(torch.equal(right[name], t) for name, t in after.items())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_under_the_log_does_not_end_the_run():
    model, batches = job(0)
    with pytest.warns(NumericalWarning, match="log is no longer written"):
        lobs.prune(model, batches, keep=0.5, progress=False, execution=Execution(log="/dev/full"))


@pytest.mark.parametrize("value", [10**5000, None, "many"], ids=["huge", "none", "text"])
def test_an_odd_score_is_one_short_line(value):
    model, batches = job(0)
    with pytest.raises(LobsError, match="must return a number") as caught:
        lobs.prune(model, batches, Budget(drop=1.0, evaluate=lambda _: value), progress=False)
    assert len(str(caught.value)) < 200


def test_a_score_that_ends_an_iterator_is_named():
    def score(model):
        raise StopIteration("nothing left")

    model, batches = job(0)
    with pytest.raises(LobsError, match="evaluate raised StopIteration"):
        lobs.prune(model, batches, Budget(drop=1.0, evaluate=score), progress=False)


def test_a_damaged_cache_of_kernels_is_compiled_again(tmp_path, monkeypatch):
    (tmp_path / "kernel.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    module = importlib.import_module("kernel")
    assert compiled(module.twice)(3) == 6
    cached = [p for p in (tmp_path / "__pycache__").iterdir() if p.suffix in (".nbi", ".nbc")]
    for path in cached:
        path.write_bytes(pickle.dumps("garbage")[:-3] + b"\xff" * 9)
    assert cached and compiled(module.twice)(4) == 8
    sys.modules.pop("kernel")


def test_output_inside_the_folder_of_a_run_store_is_refused(tmp_path):
    outside(tmp_path / "x.safetensors", "--out", tmp_path / "work")
    with pytest.raises(LobsError, match="lies in the folder of --resume"):
        outside(tmp_path / "work" / "deep" / "x.safetensors", "--out", tmp_path / "work")


def test_names_from_files_cannot_steer_the_terminal(tmp_path, capsys):
    from lobs.cli import app

    mask = torch.zeros(2, 2, dtype=torch.bool)
    name = "a\x1b[2K\nok    everything holds"
    path = tmp_path / "x.safetensors"
    rows = [{"name": name, "kept": 3, "total": 4, "error": 0.0}]
    lobs.save({name: torch.zeros(2, 2)}, path, {name: mask}, {"layers": rows})
    app(["verify", str(path), "--no-recompute"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "a\\x1b[2K\\nok" in out
    assert "everything holds" not in [line.strip() for line in out.splitlines()]
    assert printable("größe ✓") == "größe ✓"


@pytest.mark.parametrize("command", ["verify", "report"])
def test_a_file_cannot_name_another_file_to_be_opened(tmp_path, capsys, command):
    from lobs.cli import app

    secret = tmp_path / "secret.txt"
    secret.write_text("root:x:0:0\n")
    model, batches = job(0)
    result = lobs.prune(model, batches, keep=0.5, progress=False)
    path = result.save(tmp_path / "x.safetensors", origin=str(secret), network="lenet300")
    words = [command, str(path)] + (["--out", str(tmp_path / "r.html")] * (command == "report"))
    try:
        app(words, standalone_mode=False)
        said = capsys.readouterr().out + (tmp_path / "r.html").read_text()
    except LobsError as error:
        said = str(error)
    assert "root:x" not in said and "--trust" in said


def test_loading_takes_memory_for_the_tensors_alone(tmp_path):
    resource = pytest.importorskip("resource")
    import subprocess

    size = 30_000_000
    tensor = torch.zeros(size, dtype=torch.uint8)
    tensor[::4000] = 1
    path = lobs.storage.save_compact(
        {"w": tensor}, tmp_path / "x.safetensors", {"w": tensor != 0}
    ).path
    script = (
        "import resource, sys, lobs, torch\n"
        "lobs.load\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "lobs.load(sys.argv[1])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(out.stdout) * unit < 5 * size and resource
