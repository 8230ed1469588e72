"""One module per routine family; each has `CASES`. Importing them does not import torch."""
