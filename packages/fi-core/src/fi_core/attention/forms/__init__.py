"""Attention in one call: a single request, and batches over block tables without a plan."""
