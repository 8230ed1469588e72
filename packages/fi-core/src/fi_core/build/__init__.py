"""From an artifact to its file: rendering, identity, compilers. Knows specs; knows neither stores nor tensors."""
