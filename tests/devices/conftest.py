from __future__ import annotations

# Importing these registers a device for the whole process; the doctest collector imports modules.
collect_ignore = ["paths.py", "pretended.py"]
