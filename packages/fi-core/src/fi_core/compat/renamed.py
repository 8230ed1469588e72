"""Modules of FlashInfer that have another name here."""

RENAMED = {
    "autotuner.autotuner": "compat.autotuner",
    "fi_trace": "observe.trace",
    "trace": "observe.trace",
}
