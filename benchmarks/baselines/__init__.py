"""Our own implementations of rival methods, tuned fairly, to measure against."""
