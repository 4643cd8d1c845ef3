"""What decides a result is in the fingerprint: a run with anything else is not taken up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lobs
from lobs import Budget, Execution, LobsError, Sparsity, prune_in_stages
from lobs.storage.digest import digest_of, digest_of_data, identified
from lobs.training import Shuffled, Stage, distillation, sgd


class Scaled(nn.Module):
    """A network with a hidden buffer, an attribute that `forward` reads and one that it writes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(6, 4)
        self.register_buffer("shift", torch.zeros(4), persistent=False)
        self.scale, self.calls = 1.0, 0

    def forward(self, x, table=None):
        self.calls += 1
        shift = 0.0 if table is None else float(np.asarray(table).sum())
        return self.fc(x) * self.scale + self.shift + shift


class Mine:
    """A solver of a user, whose repr says nothing."""

    needs = frozenset()

    def __init__(self, order):
        self.order = order

    def __call__(self, problem, target):
        return lobs.solve(problem, "magnitude", target)


X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(30) % 4


def refused(run, *changed):
    """Run once, once more, and then with every change, which must be refused."""
    run({})
    run({})
    for change in changed:
        with pytest.raises(LobsError, match=r"another run|belongs to a run|holds another"):
            run(change)


def test_resume_refuses_another_network_data_solver_or_score(tmp_path):
    def run(change):
        model = Scaled()
        model.shift += change.get("shift", 0.0)
        model.scale = change.get("scale", 1.0)
        table = np.zeros(5000)
        table[2500] = change.get("table", 0.0)
        lobs.prune(
            model,
            [{"x": X, "table": table}],
            Sparsity(0.5),
            solver=change.get("solver", "magnitude"),
            progress=False,
            execution=Execution(resume=tmp_path),
        )

    refused(run, {"shift": 1.0}, {"scale": 2.0}, {"table": 1.0}, {"solver": Mine(1)})
    assert identified(Mine(1)) != identified(Mine(2)) and identified(Mine(1)) == identified(Mine(1))


def test_resume_refuses_another_evaluate(tmp_path):
    def run(change):
        factor = change.get("factor", 1.0)
        score = change.get("score", lambda model: factor * float(model(X).square().mean()))
        target = Budget(drop=1e9, evaluate=score)
        execution = Execution(resume=tmp_path)
        lobs.prune(Scaled(), [X], target, progress=False, execution=execution)

    other = X + 1
    refused(run, {"factor": 2.0}, {"score": lambda model: float(model(other).mean())})


def test_retrain_refuses_another_network_data_loss_or_teacher(tmp_path):
    def run(change):
        torch.manual_seed(0)
        model, teacher = Scaled(), Scaled()
        with torch.no_grad():
            model.fc.weight[0, 0] += change.get("weight", 0.0)
            teacher.fc.weight[0, 0] += change.get("teacher", 0.0)
        lobs.retrain(
            model,
            {"fc.weight": torch.ones(4, 6, dtype=torch.bool)},
            Shuffled(X, change.get("labels", LABELS), change.get("batch", 10)),
            iterations=4,
            every=change.get("every", 2),
            loss=change.get("loss", distillation(2.0)),
            teacher=teacher,
            progress=False,
            execution=Execution(resume=tmp_path),
        )

    labels = LABELS.flip(0)
    refused(
        run, {"weight": 1.0}, {"teacher": 1.0}, {"labels": labels}, {"batch": 5}, {"every": 1},
        {"loss": distillation(1.0)}, {"loss": None},
    )  # fmt: skip


def test_stages_refuse_other_data_labels_or_score(tmp_path):
    def run(change):
        torch.manual_seed(0)
        score = change.get("score", lambda model: float(model(X).mean()))
        prune_in_stages(
            Scaled(),
            [change.get("inputs", X)],
            Shuffled(X, change.get("labels", LABELS), change.get("batch", 10)),
            [Stage(keep=0.5, iterations=2)],
            evaluate=score,
            retraining={"optimizer": sgd(change.get("rate", 0.05))},
            execution=Execution(resume=tmp_path),
            progress=False,
        )

    other = {"score": lambda model: float(model(X).sum())}
    refused(
        run, {"inputs": X + 1}, {"labels": LABELS.flip(0)}, {"batch": 5}, {"rate": 0.1}, other
    )  # fmt: skip


def test_hashing_data_leaves_all_random_generators_as_they_were():
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(X, LABELS), 10, shuffle=True, generator=generator)
    before = generator.get_state(), torch.get_rng_state(), np.random.get_state()[1].copy()
    assert digest_of_data(loader, 100) == digest_of_data(loader, 100) != digest_of_data(loader, 2)
    assert torch.equal(generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert (np.random.get_state()[1] == before[2]).all()


def test_records_of_calls_and_attributes_that_forward_assigns_do_not_count():
    model, calls = Scaled(), []

    def score(network):
        calls.append(network)
        return 0.0

    before = digest_of(model), digest_of(score)
    model(X)
    score(model)
    assert (digest_of(model), digest_of(score)) == before
    loop = [1]
    loop.append(loop)
    assert digest_of(loop) == digest_of(loop)
