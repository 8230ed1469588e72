"""`fi-bench compare-trees`: two checkouts on one device, measured in turns. `interleave` leads, `side` measures."""
