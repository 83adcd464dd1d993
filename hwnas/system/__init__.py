"""Files, locks, processes and signals, written and ended so that a kill loses nothing."""
