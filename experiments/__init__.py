"""Experiments that are too long for tests: each folder reproduces one publication."""
