"""Measure. Each file prints its numbers.

Times are ratios within one run, because machines differ and are shared.
"""
