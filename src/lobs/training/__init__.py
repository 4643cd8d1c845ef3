"""Zeros that stay: hold, retrain, prune in stages."""
