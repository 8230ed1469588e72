"""Other libraries on fi's kernels: each module here adapts one of them, and imports it only when it is asked to."""
