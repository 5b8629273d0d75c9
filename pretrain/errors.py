"""The exceptions that a person is meant to read: each names the field, the values and the mend.

A `ConfigError` is raised before a device is touched and ends a command with exit status 2.
Everything else that goes wrong is a bug or a fault of the machine and keeps its traceback.
"""


class ConfigError(Exception):
    """A setting, file or combination of them that cannot work; the message says what to change."""


class MachineError(Exception):
    """This node or its network is not what the launcher promised: a crash, which another start may not meet."""


class CheckpointError(Exception):
    """A checkpoint is damaged, incomplete or of another model; the message says which and what to do."""


class AnomalyError(Exception):
    """A policy of `[anomalies]` stopped the run (exit status 70)."""
