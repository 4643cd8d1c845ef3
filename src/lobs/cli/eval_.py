"""`lobs eval`: how good is a network?"""

from __future__ import annotations

from lobs.cli.common import JsonOption, SubjectArgument, TrustOption, print_json, say


def evaluate(
    network: SubjectArgument, trust: TrustOption = False, json: JsonOption = False
) -> None:
    """Evaluate a network: test error for the zoo's, the user's own function for others.

    Example: `lobs eval lobs-demo/lenet300-7pct.safetensors`
    """
    from lobs.cli.subject import open_subject
    from lobs.errors import LobsError

    subject = open_subject(network, trust=trust)
    score = subject.score(subject.model)
    if score is None:
        raise LobsError(
            f"'{network}' returns no evaluate function: return (model, batches, evaluate)."
        )
    weights = sum(p.numel() for p in subject.model.parameters())
    nonzero = sum(int((p != 0).sum()) for p in subject.model.parameters())
    if json:
        print_json(
            {
                "network": network,
                "metric": subject.metric,
                "value": score,
                "parameters": weights,
                "nonzero": nonzero,
            }
        )
        return
    say(
        f"{subject.title}: {subject.metric} {score:.4g}; {nonzero:,} of {weights:,} parameters are "
        "not zero"
    )
