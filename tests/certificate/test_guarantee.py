"""The statistical guarantee: exact limits, the coverage that is stated, and where it is shown."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import lobs
from lobs import Budget, LobsError
from lobs.calibration.batches import guarded
from lobs.calibration.kept_back import divided
from lobs.certificate.guarantee import (
    LEAST_COST,
    Tally,
    chernoff_hoeffding,
    clopper_pearson,
    tightest,
)
from lobs.pruning.drop_search import Trial, _warn_of_failure
from lobs.report.words import number


def tail(hits, trials, p):
    """P(at most `hits`), in whole numbers."""
    p = Fraction(p)
    return sum(math.comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(hits + 1))


@pytest.mark.parametrize("confidence", [0.95, 0.99375])
def test_the_limit_is_the_exact_quantile_and_never_below_it(confidence):
    for trials in (1, 2, 7, 40, 200):
        for hits in {0, 1, trials // 3, trials // 2, trials - 1, trials}:
            p = clopper_pearson(hits, trials, confidence)
            if hits >= trials:
                assert p == 1.0
                continue
            assert tail(hits, trials, p) <= 1 - Fraction(confidence)
            assert tail(hits, trials, p * (1 - 1e-9)) > 1 - Fraction(confidence)


def test_known_values_and_large_numbers():
    assert clopper_pearson(0, 10**6) == pytest.approx(1 - 0.05**1e-6, rel=1e-8)
    assert clopper_pearson(0, 0) == 1.0 == chernoff_hoeffding(1.0, 9)
    assert tightest(60) == clopper_pearson(0, 60)
    assert clopper_pearson(3, 50) <= chernoff_hoeffding(3 / 50, 50)


@pytest.mark.parametrize("truth", [0.002, 0.03, 0.4])
def test_the_limits_cover_as_often_as_they_say(truth):
    generator = torch.Generator().manual_seed(0)
    hits = (torch.rand(2000, 300, generator=generator) < truth).sum(dim=1).tolist()
    covered = sum(clopper_pearson(k, 300) >= truth for k in hits) / len(hits)
    assert covered >= 0.95 - 2 * math.sqrt(0.05 * 0.95 / len(hits))
    assert all(chernoff_hoeffding(k / 300, 300) >= clopper_pearson(k, 300) for k in hits[:50])


def test_answers_sequences_and_other_outputs_are_told_apart():
    tally, logits = Tally(), torch.eye(4)
    tally.add(torch.zeros(4, 1), logits, logits.roll(1, 0))
    assert tally.answers and tally.whole and tally.changed == 4 and tally.divergence > 0
    words, other = torch.zeros(2, 3, 5), torch.zeros(2, 3, 5)
    words[..., 0] = other[..., 0] = 1.0
    other[0, 2, 1] = other[1, 2, 1] = 9.0
    batch = {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    tally = Tally()
    tally.add(batch, {"logits": words}, {"logits": other})
    found = tally.guarantee()
    assert found.answers and not found.whole and found.changed == pytest.approx(1 / 6)
    assert found.changes_at_most == chernoff_hoeffding(1 / 6, 2)
    tally = Tally()
    tally.add(torch.zeros(2, 1), torch.ones(2, 3, 3), torch.full((2, 3, 3), 1.5))
    found = tally.guarantee()
    assert not found.answers and found.error == pytest.approx(0.5) and found.at_most > 0.5
    tally.add(torch.zeros(2, 1), torch.ones(3), torch.ones(3))
    assert not tally.finite


@pytest.mark.parametrize("sizes", [[16, 9, 24], [1] * 40, [3, 50]])
def test_every_sample_has_one_part(sizes):
    numbers = torch.arange(sum(sizes)).unsqueeze(1)
    batches = [(x, x) for x in numbers.split(sizes)]
    parts = divided(guarded(batches))
    found = [torch.cat([x for x, _ in part]).flatten().tolist() for part in parts]
    assert sorted(n for part in found for n in part) == list(range(len(numbers)))
    assert [len(part) for part in found] == pytest.approx(
        [len(numbers) / 2, len(numbers) * 3 / 8, len(numbers) / 8], abs=4
    )
    only, rest, none = divided(guarded(batches), certify=False)
    assert none is None and sum(len(x) for part in (only, rest) for x, _ in part) == len(numbers)


def classifier():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3)).eval()
    return model, [torch.randn(500, 12) for _ in range(4)]


def test_a_tolerance_needs_no_labels_and_its_guarantee_is_shown_and_stored(tmp_path):
    model, batches = classifier()
    result = lobs.prune(model, batches, Budget(drop=0.05), refit="layers", progress=False)
    guarantee = result.certificate.guarantee
    certifying = divided(guarded(batches))[2]
    other = [model(x).argmax(1) != result.model(x).argmax(1) for x in certifying]
    assert guarantee.samples == 250 and result.kept < result.total
    changed = int(torch.cat(other).sum())
    assert result.certificate.changes_at_most == clopper_pearson(changed, 250)
    passed = [t for t in result.settings["trials"] if t["at_most"] <= 0.05]
    assert min(t["kept"] for t in passed) == result.kept
    assert "of answers change, with 95 % confidence" in result.summary()
    loaded = lobs.load(result.save(tmp_path / "x.safetensors"))
    again = type(result).from_record(loaded.record)
    assert again.certificate.guarantee == guarantee
    assert loaded.record["certificate"]["changes_at_most"] == guarantee.changes_at_most
    findings = lobs.certificate.verify_guarantee(loaded, model, result.model, certifying)
    assert [f.holds for f in findings] == [True]
    loaded.record["certificate"]["guarantee"]["changes_at_most"] /= 4
    for inputs in (certifying, None):
        (wrong,) = lobs.certificate.verify_guarantee(loaded, model, result.model, inputs)
        assert not wrong.holds
    page = result.report(tmp_path / "r.html").read_text()
    assert "of answers change" in page


def test_a_trial_that_fails_by_its_limit_alone_is_explained(tmp_path):
    model, batches = classifier()
    result = lobs.prune(model, batches, Budget(drop=0.05), refit="layers", progress=False)
    trials = result.settings["trials"]
    assert any(t["drop"] <= 0.05 < t["at_most"] for t in trials)  # it looks as if it had passed
    texts = result.summary(), result.report(tmp_path / "r.html").read_text()
    assert all("only if the upper confidence limit of its drop is within" in text for text in texts)
    for trial in trials:
        drop, limit = f"{trial['drop']:.4g}", f"{trial['at_most']:.4g}"
        assert f"kept, estimated drop {drop}, at most {limit}" in texts[0]
        assert f"<td>{number(trial['drop'])}</td><td>{number(trial['at_most'])}</td>" in texts[1]


def test_a_score_of_the_users_own_has_no_confidence_limit(tmp_path):
    model, batches = classifier()
    budget = Budget(drop=5.0, evaluate=lambda network: 0.0)
    result = lobs.prune(model, batches, budget, refit="layers", progress=False)
    page = result.report(tmp_path / "r.html").read_text()
    assert "score 0 (" in result.summary()
    assert "upper confidence limit of its drop" not in result.summary() + page


def test_the_warning_of_a_failed_search_gives_the_limit_that_counts():
    trials = [Trial(30, 0.97, 0.03, 0.06), Trial(20, 0.975, 0.025, 0.09)]
    said = r"the best lost up to 0\.06 \(upper confidence limit; estimate 0\.03\) with 30 of 90"
    with pytest.warns(lobs.NumericalWarning, match=said):
        _warn_of_failure(trials, 0.05, 1.0, 90)


def test_inputs_that_are_too_few_for_a_tolerance_are_refused_before_any_trial():
    model, batches = classifier()
    with pytest.raises(LobsError, match=r"750 kept-back inputs cannot show .* at least 2,7\d\d"):
        lobs.prune(model, batches, Budget(drop=0.005), progress=False)
    with pytest.raises(LobsError, match="without evaluate it is the accuracy that may be lost"):
        Budget(drop=2.0)


def test_held_out_inputs_give_a_guarantee_for_a_network_without_a_bound():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 12)

        def forward(self, x):
            return (x + self.b(self.norm(self.a(x)).relu())).unsqueeze(2)

    torch.manual_seed(0)
    result = lobs.prune(
        Normed(), [torch.randn(100, 12)], keep=0.5, held_out=[torch.randn(80, 12)], progress=False
    )
    assert result.certificate.bound is None and result.certificate.guarantee.samples == 80
    assert not result.certificate.guarantee.answers
    assert (
        "The output changes by at most" in result.summary() and "No bound" not in result.summary()
    )


def test_a_shuffled_loader_keeps_its_parts_apart():
    """Each pass shuffles anew, so parts by number would share samples."""

    numbers = torch.arange(160.0).unsqueeze(1)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(numbers), batch_size=32, shuffle=True
    )
    parts = divided(guarded(loader))
    seen = [{float(x) for batch in part for x in batch[0]} for part in parts for _ in range(3)]
    for own, later in ((seen[i], seen[i : i + 3]) for i in (0, 3, 6)):
        assert all(part == own for part in later)
    assert not (seen[0] & seen[3] | seen[0] & seen[6] | seen[3] & seen[6])
    assert len(seen[0] | seen[3] | seen[6]) == 160


def test_padding_counts_neither_in_the_held_out_distance_nor_in_the_relative_error():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3)

        def forward(self, x, attention_mask=None):
            return self.b(torch.relu(self.a(x)))

    torch.manual_seed(0)
    mask = torch.ones(8, 6, dtype=torch.long)
    mask[:, 4:] = 0
    x = torch.randn(8, 6, 4)
    loud = torch.where(mask.bool().unsqueeze(-1), x, 100.0)
    quiet, noisy = ([{"x": t, "attention_mask": mask}] * 8 for t in (x, loud))
    model = Tagger()
    found = [
        lobs.prune(model, quiet, keep=0.5, held_out=held, progress=False).certificate
        for held in (quiet, noisy)
    ]
    assert found[0].held_out == pytest.approx(found[1].held_out)
    assert found[0].held_out == pytest.approx(found[0].measured)
    assert found[0].guarantee == found[1].guarantee


def test_a_changed_answer_costs_the_confidence_that_is_lost_and_a_quarter_at_least():
    p = torch.tensor([[0.9, 0.05, 0.05], [0.5, 0.4, 0.1], [0.6, 0.3, 0.1], [0.7, 0.2, 0.1]])
    other = torch.eye(3)[torch.tensor([1, 1, 0, 2])]
    for dense in (p, p.log(), p.log() + 7):  # probabilities, or logits of them
        tally = Tally()
        tally.add(torch.zeros(4, 1), dense, other)
        assert tally.changed == 3
        assert tally.lost == pytest.approx(0.85 + 0.25 + 0.6, abs=1e-6)  # 0.1 counts 0.25
        share, limit = tally.drop(0.95)
        assert share == pytest.approx(1.7 / 4) and limit == chernoff_hoeffding(share, 4)
    broken = other.clone()
    broken[0] = torch.nan
    tally = Tally()
    tally.add(torch.zeros(4, 1), p, broken)
    assert tally.lost == pytest.approx(1 + 0.25 + 0.6, abs=1e-6)


def test_the_expected_loss_of_calibrated_answers_is_the_true_one():
    """Labels are drawn from the dense network's own probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(40_000, 5, generator=generator)
    other = logits + 2 * torch.randn(40_000, 5, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    right = [(t.argmax(1) == labels).double().mean() for t in (logits, other)]
    tally = Tally()
    tally.add(torch.zeros(40_000, 1), logits, other)
    true, (lost, limit) = float(right[0] - right[1]), tally.drop(0.95)
    assert true - 0.01 <= lost <= true + LEAST_COST * tally.changed / 40_000 and lost < limit


def test_even_probabilities_do_not_make_changes_free():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3)).eval()
    with torch.no_grad():
        model[2].weight.mul_(1e-3), model[2].bias.mul_(1e-3)  # every answer has nearly a third
    batches = [torch.randn(500, 12) for _ in range(4)]
    result = lobs.prune(model, batches, Budget(drop=0.1), refit="layers", progress=False)
    assert result.certificate.guarantee.changed <= 0.1 / LEAST_COST
    assert result.kept > 0.02 * result.total
