"""`lobs data`: download a data set that is too large to ship."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lobs.cli.options import JsonOption
from lobs.cli.output import print_json, say


def data(
    name: Annotated[str, typer.Argument(help="cifar10.", metavar="NAME")],
    folder: Annotated[Path, typer.Argument(help="Where to put it.", metavar="FOLDER")],
    json: JsonOption = False,
) -> None:
    """Download a data set and check every file's hash.

    Examples:
      lobs data cifar10 ~/data
      lobs --data ~/data train cifarnet
    """
    from lobs.errors import DataError
    from lobs.zoo.datasets import cifar10

    if name != "cifar10":
        raise DataError(
            f"'{name}' cannot be downloaded by lobs: only cifar10 can. MNIST is in the package."
        )
    where = cifar10.download(folder)
    if json:
        print_json({"data": name, "path": str(where)})
        return
    say(f"CIFAR-10: {where}; use it with --data {folder} or LOBS_DATA={folder}")
