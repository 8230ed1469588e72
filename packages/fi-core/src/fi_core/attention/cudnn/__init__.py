"""Attention by cuDNN's own kernels, where its Python frontend is installed."""
