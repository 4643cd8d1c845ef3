"""The run itself: from `prune` and its options to the result."""
