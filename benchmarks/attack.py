"""Attack the library from outside its test suite, and count what broke.

    python -m benchmarks.attack [--only threads flips inputs half interrupts networks] [--scale 1]

Every line says how often something was tried and how often it failed. All numbers must be zero but
the first of each line. `--scale 0.1` makes a tenth of the tries.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lobs
from lobs import Execution, LobsError, Numerics, Sparsity

Bits = dict[str, bytes]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--scale", type=float, default=1.0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    broken = 0
    for name in given.only:
        began, (attack, tries) = time.perf_counter(), ATTACKS[name]
        count = max(1, round(tries * given.scale))
        with tempfile.TemporaryDirectory() as folder:
            tried, faults, more = attack(count, Path(folder))
        broken += faults
        spent = time.perf_counter() - began
        print(f"{name}: {tried} tried, {faults} failed{more} ({spent:.0f} s)", flush=True)
    sys.exit(broken > 0)


def network(seed: int) -> tuple[nn.Module, list[Tensor]]:
    """Return a small network of one of three kinds, and inputs for it."""
    torch.manual_seed(seed)
    if seed % 3 == 0:
        model: nn.Module = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        return model.eval(), list(torch.randn(3, 12, 5, 8))
    if seed % 3 == 1:
        layers = [nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(24, 5)).eval(), list(torch.randn(3, 12, 2, 4, 4))
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    return model.eval(), list(torch.randn(3, 12, 8))


def bits(model: nn.Module) -> Bits:
    """Return the bytes of all tensors of a network."""
    return {name: t.cpu().numpy().tobytes() for name, t in model.state_dict().items()}


def cut(model: nn.Module, batches: list[Any], **options: Any) -> nn.Module:
    """Prune without a joint refit, quietly."""
    return lobs.prune(model, batches, keep=0.4, refit="layers", progress=False, **options).model


def threads(tries: int, _: Path) -> tuple[int, int, str]:
    """Prune in two threads while a third runs a network of its own."""
    jobs = {seed: network(seed) for seed in range(tries)}
    alone = {seed: bits(cut(*jobs[seed])) for seed in range(min(tries, 12))}
    jobs = {seed: jobs[seed % 12] for seed in range(tries)}
    jobs = {seed: (copy.deepcopy(model), batches) for seed, (model, batches) in jobs.items()}
    faults: list[str] = []
    done = threading.Event()

    def work(first: int) -> None:
        for seed in range(first, tries, 2):
            faults.extend(differences(jobs[seed], alone[seed % 12]))

    def beside() -> None:
        model, (x, *_) = network(2)
        right = model(x)
        while not done.is_set():
            if not torch.equal(model(x), right):
                faults.append("another output beside")

    pair = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    third = threading.Thread(target=beside)
    for thread in (*pair, third):
        thread.start()
    for thread in pair:
        thread.join()
    done.set()
    third.join()
    return tries, len(faults), f" {faults[0]}" if faults else ""


def differences(job: tuple[nn.Module, list[Tensor]], right: Bits) -> list[str]:
    """Return what went wrong with one prune: an error, or other weights."""
    try:
        return [] if bits(cut(*job)) == right else ["other weights"]
    except BaseException as error:
        return [f"{type(error).__name__}: {error}"]


def flips(tries: int, folder: Path) -> tuple[int, int, str]:
    """Flip one bit in a file that is read back: it must be refused, or change nothing."""
    rng, silent, raw, refused = random.Random(0), 0, 0, 0
    for read, right in stored(folder):
        files = [p for p in sorted(read.folder.rglob("*")) if p.is_file() and p.stat().st_size]
        whole = {p: p.read_bytes() for p in files}
        for _ in range(-(-tries // 3)):
            path = rng.choice(files)
            data = bytearray(whole[path])
            at = rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
            path.write_bytes(bytes(data))
            try:
                silent += read() != right
            except LobsError:
                refused += 1
            except Exception as error:
                raw += 1
                print(f"  {path.name} at {at}: {type(error).__name__}: {error}")
            for p in read.folder.rglob("*"):
                if p.is_file() and p not in whole:
                    p.unlink()
            for p, content in whole.items():
                p.write_bytes(content)
    return 3 * -(-tries // 3), silent + raw, f" ({refused} refused, {silent} silent, {raw} raw)"


class Reader:
    """A function that reads files back, and the folder they are in."""

    def __init__(self, folder: Path, read: Callable[[], Any]) -> None:
        self.folder, self._read = folder, read

    def __call__(self) -> Any:
        """Read the files."""
        return self._read()


def stored(folder: Path) -> Iterator[tuple[Reader, Any]]:
    """Yield readers of a run store, a checkpoint and a training state, with what they give."""
    model, batches = network(1)
    places = [folder / name for name in ("run", "file", "training")]
    for place in places:
        place.mkdir()
    runs = Reader(
        places[0], lambda: bits(cut(model, batches, execution=Execution(resume=places[0])))
    )
    yield runs, runs()
    result = lobs.prune(model, batches, keep=0.5, refit="layers", progress=False)
    path = result.save(places[1] / "x.safetensors")

    def loaded() -> Any:
        saved = lobs.load(path)
        tensors = {**saved.state_dict, **{f"mask {n}": m for n, m in saved.masks.items()}}
        return {n: t.numpy().tobytes() for n, t in tensors.items()}, saved.record["kept"]

    checkpoint = Reader(places[1], loaded)
    yield checkpoint, checkpoint()
    training = Reader(places[2], lambda: bits(retrained(places[2], result, batches)))
    yield training, training()


def retrained(place: Path, result: Any, batches: list[Any], **more: Any) -> nn.Module:
    """Retrain with a training state in a folder; a second call takes it up."""
    labels = torch.arange(12) % 5
    options = {"iterations": 6, **more}
    data = [(x, labels) for x in batches]
    return lobs.retrain(
        result.model, result.masks, data, progress=False,
        execution=Execution(resume=place / "state"), **options,
    ).model  # fmt: skip


def inputs(_: int, folder: Path) -> tuple[int, int, str]:
    """Change one input of a resumed run: it must be refused."""
    accepted: list[str] = []
    changes = [*changed_runs(folder), *changed_trainings(folder)]
    for name, call in changes:
        with contextlib.suppress(LobsError):
            call()
            accepted.append(name)
    return len(changes), len(accepted), f" accepted: {', '.join(accepted)}" if accepted else ""


def changed_runs(folder: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Return calls of `prune` that take up a run store with another input each."""
    model, batches = network(1)
    how = {"execution": Execution(resume=folder / "run")}
    lobs.prune(model, batches, Sparsity(0.5), refit="layers", progress=False, **how)

    def again(net: nn.Module = model, data: list[Any] = batches, **more: Any) -> Any:
        options = {"target": Sparsity(0.5), "refit": "layers", **more}
        return lobs.prune(net, data, progress=False, **how, **options)

    weight, buffer, mode, attribute = (copy.deepcopy(model) for _ in range(4))
    weight[0].weight.data[0, 0, 0, 0] += 1e-3
    buffer[1].running_mean[0] += 1e-3
    mode[0].padding_mode = "circular"
    attribute[1].eps = 1e-2
    other = [x.clone() for x in batches]
    other[1][5, 1, 2, 2] += 1e-3
    return [
        ("a weight", lambda: again(weight)),
        ("a buffer", lambda: again(buffer)),
        ("a padding mode", lambda: again(mode)),
        ("an epsilon", lambda: again(attribute)),
        ("one number of the data", lambda: again(data=other)),
        ("the order of the data", lambda: again(data=batches[::-1])),
        ("fewer batches", lambda: again(data=batches[:2])),
        ("the target", lambda: again(target=Sparsity(0.6))),
        ("the scope", lambda: again(target=Sparsity(0.5, scope="layer"))),
        ("the solver", lambda: again(solver="magnitude")),
        ("the inputs", lambda: again(inputs="dense")),
        ("the skipped layers", lambda: again(skip="0")),
        ("the damping", lambda: again(numerics=Numerics(damping=0.1))),
        ("the biases", lambda: again(numerics=Numerics(prune_bias=True))),
    ]


def changed_trainings(folder: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Return calls of `retrain` that take up a training state with another input each."""
    model, batches = network(1)
    result = lobs.prune(model, batches, keep=0.5, refit="layers", progress=False)
    (folder / "training").mkdir()
    place = folder / "training"
    retrained(place, result, batches)
    other = [x.clone() for x in batches]
    other[0][3] += 1e-3
    moved = copy.deepcopy(result)
    next(iter(moved.model.parameters())).data[0] += 1e-3
    masks = {name: mask.clone() for name, mask in result.masks.items()}
    first = next(iter(masks.values())).flatten()
    first[first.nonzero()[0]] = False
    less = copy.copy(result)
    object.__setattr__(less, "masks", masks)
    return [
        ("training data", lambda: retrained(place, result, other)),
        ("fewer training batches", lambda: retrained(place, result, batches[:2])),
        ("weights to train", lambda: retrained(place, moved, batches)),
        ("masks", lambda: retrained(place, less, batches)),
        ("a teacher", lambda: retrained(place, result, batches, teacher=model)),
        ("the seed", lambda: retrained(place, result, batches, seed=3)),
    ]


def half(tries: int, _: Path) -> tuple[int, int, str]:
    """Bound layers in half precision: a bound that is given must hold."""
    below = given = 0
    for seed in range(tries):
        torch.manual_seed(seed)
        kind = (torch.float16, torch.bfloat16)[seed % 2]
        model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4)).to(kind)
        if seed % 4 == 0:
            model = nn.Sequential(nn.Linear(10, 8).to(kind))
        x = [(torch.randn(16, 10) * 10 ** (seed % 5 - 2)).to(kind)]
        inputs = ("dense", "pruned", "asymmetric")[seed % 3]
        found = lobs.prune(
            model, x, Sparsity(0.3), inputs=inputs, refit="layers", progress=False
        ).certificate
        given += found.bound is not None
        below += found.bound is not None and found.bound < (found.measured or 0)
    return tries, below, f" ({given} bounds given)"


def interrupts(tries: int, _: Path) -> tuple[int, int, str]:
    """Interrupt a run at any moment: the process must work afterwards."""
    jobs = [network(seed) for seed in range(3)]
    right = [bits(cut(*job)) for job in jobs]
    spent = []
    for job in jobs:
        began = time.perf_counter()
        cut(*job)
        spent.append(time.perf_counter() - began)
    rng, faults, caught = random.Random(0), 0, 0

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for turn in range(tries):
            which = turn % 3
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-3, rng.random() * spent[which]))
                cut(*jobs[which])
            except KeyboardInterrupt:
                caught += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if turn % 5 == 0:
                faults += bits(cut(*jobs[which])) != right[which]
    finally:
        signal.signal(signal.SIGALRM, before)
    return tries, faults, f" ({caught} caught in a run)"


class Random(nn.Module):
    """A random network whose steps join, gate, pool and stack earlier outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.plan = [(rng.randrange(9), rng.randrange(9), rng.randrange(8)) for _ in range(4)]
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in self.plan)
        self.norm = nn.BatchNorm2d(4)
        self.norm.running_var.uniform_(0.3, 2)
        self.scale = nn.Parameter(torch.randn(4, 1, 1))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        seen = [x]
        for conv, (first, second, way) in zip(self.convs, self.plan, strict=True):
            a, b = seen[first % len(seen)], seen[second % len(seen)]
            h = conv(a)
            match way:
                case 0:
                    h = h + b
                case 1:
                    h = h.tanh() * b.sigmoid()
                case 2:
                    h = h - b.mean((2, 3), keepdim=True)
                case 3:
                    h = torch.cat([h, b], 1)[:, ::2]
                case 4:
                    h = self.norm(h).relu() * self.scale
                case 5:
                    h = nn.functional.max_pool2d(h, 3, 1, 1)
                case 6:
                    h = h.softmax(1) * b.tanh() + b
                case _:
                    h = nn.functional.gelu(h) / 2
            seen.append(h)
        return self.head(nn.functional.adaptive_max_pool2d(seen[-1], 2).flatten(1))


def networks(tries: int, _: Path) -> tuple[int, int, str]:
    """Bound random networks; no certified answer may change."""
    faults = given = certified = 0
    for seed in range(tries):
        model, x = Random(seed).eval(), torch.randn(24, 4, 4, 4)
        inputs = ("asymmetric", "dense", "pruned")[seed % 3]
        result = lobs.prune(
            model, [x[:10], x[10:]], Sparsity(0.3, scope="layer"), inputs=inputs, refit="layers",
            solver="magnitude", progress=False, numerics=Numerics(batch_norm=False),
        )  # fmt: skip
        found = result.certificate
        given += found.bound is not None
        if found.bound is not None and found.measured is not None:
            faults += found.measured > found.bound * (1 + 1e-6)
        with torch.no_grad():
            same = model(x).argmax(1) == result.model(x).argmax(1)
        if found.certified is not None:
            certified += found.certified > 0
            faults += found.certified > float(same.double().mean()) + 1e-9
    return tries, faults, f" ({given} bounds, {certified} with certified answers)"


Attack = Callable[[int, Path], tuple[int, int, str]]
ATTACKS: dict[str, tuple[Attack, int]] = {
    "threads": (threads, 100),
    "flips": (flips, 500),
    "inputs": (inputs, 20),
    "half": (half, 400),
    "interrupts": (interrupts, 200),
    "networks": (networks, 200),
}


if __name__ == "__main__":
    main()
