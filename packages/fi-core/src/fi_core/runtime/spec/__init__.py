"""What can be asked for: ops, their implementations and axes, dtypes, targets. Data only: no I/O, no torch."""
