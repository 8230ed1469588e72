"""`fi-bench compare-trees`: two checkouts on one device, interleaved. `interleave` leads, `side` measures."""
