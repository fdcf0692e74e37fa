# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that load in any layout, are whole or not there, and run no code.

```python
save_checkpoint("run/step=100.ckpt", model=model, optimizers=[optimizer], metadata={"global_step": 100})
metadata = load_checkpoint("run/step=100.ckpt", model=model, optimizers=[optimizer])
```

Read in this order: `save` and `load` are the two flows; `shards` says what a rank holds; `model_state` and
`optimizer_state` name it; `tensor_files` writes and reads it; `folder` and `commit` make a folder whole or nothing;
`agreement` makes an error of one rank everybody's; `codec` and `metadata` store the rest without pickle.
"""

from lightning_3d.checkpoint.async_save import AsyncCheckpointer, SaveOptions
from lightning_3d.checkpoint.commit import link_checkpoint, remove_checkpoint
from lightning_3d.checkpoint.convert import (
    export_lightning,
    export_safetensors,
    import_weights,
    load_weights,
)
from lightning_3d.checkpoint.load import (
    is_checkpoint,
    load_checkpoint,
    load_full_state_dict,
    newest_checkpoint,
    read_metadata,
    read_rank_metadata,
)
from lightning_3d.checkpoint.save import save_checkpoint

__all__ = [
    "AsyncCheckpointer",
    "SaveOptions",
    "export_lightning",
    "export_safetensors",
    "import_weights",
    "is_checkpoint",
    "link_checkpoint",
    "load_checkpoint",
    "load_full_state_dict",
    "load_weights",
    "newest_checkpoint",
    "read_metadata",
    "read_rank_metadata",
    "remove_checkpoint",
    "save_checkpoint",
]
