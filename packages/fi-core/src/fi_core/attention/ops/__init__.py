"""The attention ops: what each kernel is compiled for, and the functions that launch them."""
