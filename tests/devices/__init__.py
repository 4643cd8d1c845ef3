"""Main paths on a device that this machine does not have."""
