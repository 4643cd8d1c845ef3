"""Patterns: N:M groups, blocks, whole units and channels."""
