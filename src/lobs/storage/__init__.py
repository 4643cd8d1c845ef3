"""Everything on disk: checkpoints, compact files, run stores and training state."""
