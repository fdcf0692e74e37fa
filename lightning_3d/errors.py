# SPDX-License-Identifier: Apache-2.0
"""Every error this package raises on purpose.

```
Lightning3DError
├── PlanError            a layout that cannot be: degrees against the world, the model, the cluster
├── HardwareError        an unknown GPU, node or link, or a cluster file that does not read
├── ScheduleError        a pipeline table that is not valid, or a schedule that cannot be built
├── ModelError           a model that cannot be cut, sharded or tied the way the plan asks
├── BatchError           a batch that cannot be split into microbatches, or differs between ranks
├── StepError            a `training_step` that a pipeline cannot run
├── LinkError            a rank or a link that is far slower than its peers
├── SupportError         a Trainer feature that this layout does not have
├── TraceError           a memory trace that is empty, or a file that is none
└── CheckpointError      a checkpoint that is not whole, not safe, or not of this model
```

A message gives the value, the rule and the remedy. The errors of configuration are `ValueError`s too, so that
a command line shows them as bad arguments.
"""


class Lightning3DError(Exception):
    """Base of all errors of `lightning_3d`."""


class PlanError(Lightning3DError, ValueError):
    """The degrees of a plan do not fit the world, the model or the cluster."""


class HardwareError(Lightning3DError, ValueError):
    """A cluster description names hardware that is unknown or inconsistent."""


class ScheduleError(Lightning3DError, ValueError):
    """A pipeline schedule cannot be built, or its table breaks a rule."""


class ModelError(Lightning3DError, ValueError):
    """A model cannot be cut, sharded or tied the way the plan asks."""


class BatchError(Lightning3DError, ValueError):
    """A batch cannot be split into microbatches, or ranks of one replica hold different batches."""


class StepError(Lightning3DError, RuntimeError):
    """A step method does what a pipeline stage cannot follow."""


class SupportError(Lightning3DError, TypeError):
    """A Trainer feature that the chosen layout does not support."""


class TraceError(Lightning3DError, ValueError):
    """A memory trace is empty, or a file is none."""


class LinkError(Lightning3DError, RuntimeError):
    """A rank or a link is far slower than its peers, and that was not to be lived with."""


class CheckpointError(Lightning3DError, RuntimeError):
    """A checkpoint is incomplete, damaged, unsafe, or does not match the model."""
