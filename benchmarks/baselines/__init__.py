"""Implement rival methods, tuned fairly, as baselines."""
