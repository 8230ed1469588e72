"""From an artifact to its file: rendering, identity, compilers. It depends on specs, not on stores or tensors."""
