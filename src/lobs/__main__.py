"""`python -m lobs` is the `lobs` command."""

from lobs.cli import main

main()
