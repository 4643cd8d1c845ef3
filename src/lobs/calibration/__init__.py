"""From data to layer problems: batches, moments, paired activations."""
