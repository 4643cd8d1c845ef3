"""The last step: all surviving weights refitted together."""
