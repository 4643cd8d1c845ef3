"""`lobs eval`: measure how good a network is."""

from __future__ import annotations

from lobs.cli.folders import (
    DataOption,
    DenseOption,
    FieldOption,
    JudgedOption,
    LengthOption,
    evaluate_folder,
    is_folder,
    refuse_data,
)
from lobs.cli.options import CodeOption, JsonOption, SubjectArgument, TrustOption
from lobs.cli.output import print_json, say


def evaluate(
    network: SubjectArgument,
    data: DataOption = None,
    dense: DenseOption = None,
    field: FieldOption = None,
    length: LengthOption = None,
    samples: JudgedOption = None,
    code: CodeOption = None,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Measure a network: test error for the zoo's, your evaluate function otherwise.

    A folder is measured on --data: perplexity, accuracy, or the cosine with the dense network.

    Examples:
      lobs eval lenet300
      lobs eval small.safetensors --network mycode:network
      lobs eval small/ --data test.txt --length 1024
    """
    if is_folder(network, data):
        from lobs.zoo.hub.rows import Reading

        reading = Reading(length=length, samples=samples, field=field)
        evaluate_folder(network, data, dense, reading, json=json)
        return
    refuse_data(data, network)
    from lobs.cli.subject import open_subject

    subject = open_subject(network, trust=trust, network=code)
    subject.require_metric("lobs eval")
    value = subject.measure(subject.model)
    weights = sum(p.numel() for p in subject.model.parameters())
    nonzero = sum(int((p != 0).sum()) for p in subject.model.parameters())
    if json:
        print_json(
            {
                "network": network,
                "metric": subject.metric,
                "value": value,
                "parameters": weights,
                "nonzero": nonzero,
            }
        )
        return
    say(f"{subject.title}: {subject.metric} {value:.4g}")
    say(f"{nonzero:,} of {weights:,} parameters are not zero ({nonzero / max(weights, 1):.1%})")
