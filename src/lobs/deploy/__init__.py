"""Smaller, faster, elsewhere: shrink, accelerate, export."""
