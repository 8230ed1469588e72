"""The wrappers: `plan` once a step, `run` once a layer."""
