"""Run a command of the shell in this process."""

from __future__ import annotations


def lobs_command(*words, capsys):
    """Return what the command writes to standard output; errors are raised."""
    from lobs.cli import app

    capsys.readouterr()
    code = app([str(word) for word in words], standalone_mode=False)
    assert not code, code
    return capsys.readouterr().out
