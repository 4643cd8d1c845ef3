"""Measurements. Each file prints what it measured; times are ratios within one run, because machines differ and are shared."""
