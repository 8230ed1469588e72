"""Interfaces that serving engines use besides the operators: autotuner, backend decorators, compilation context."""
