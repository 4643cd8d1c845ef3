"""Data sets: one readable file each."""
