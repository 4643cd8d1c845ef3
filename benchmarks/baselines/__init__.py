"""Rival methods, written here from their papers and tuned fairly: what `lobs` is measured against."""
