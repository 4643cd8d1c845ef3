"""How a run uses the machine: processes, memory, threads, progress and the run log."""
