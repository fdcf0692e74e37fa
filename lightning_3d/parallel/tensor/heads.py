# SPDX-License-Identifier: Apache-2.0
"""How the heads of an attention module divide over the tp ranks, and the attributes that have to follow.

[Note: key/value heads]
With as many key/value heads as tp divides, each rank gets its own. With fewer heads than ranks (tp a multiple of
them) the weights of K and V stay whole on every rank, and each rank computes the one head that its query heads look
at; the gradients of those weights are partial.
"""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_3d.errors import ModelError
from lightning_3d.parallel.tensor.mixing import source_of_forward

QUERY_HEADS = (
    "num_heads", "n_heads", "n_head", "num_attention_heads", "nheads", "nhead", "heads", "num_q_heads", "n_local_heads",
    "num_query_heads",
)  # fmt: skip
KEY_VALUE_HEADS = (
    "num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_kv_head", "kv_heads", "num_kv_head", "n_local_kv_heads",
)  # fmt: skip
GROUPS = ("num_key_value_groups", "n_rep", "num_kv_groups", "n_groups", "repeats", "num_queries_per_kv")
HEAD_DIMS = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_head", "d_k", "d_kv", "hd")
WIDTHS = (
    "split_size", "embed_dim", "all_head_size", "inner_dim", "hidden_size", "n_embd", "d_model", "dim", "q_size",
    "attn_dim", "num_features", "kv_size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The heads of one attention module."""

    name: str
    """Of the module."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Features of a head, as far as q, k and v have the same; 0 if it plays no role."""
    query_width: int
    """Features of q."""
    key_value_width: int
    """Features of k (and v)."""

    def check(self, size: int) -> None:
        """Raises unless `size` ranks can share the heads.

        Raises:
            ModelError: names the module, the sizes and the tp degrees that work.
        """
        if self._allows(size):
            return
        allowed = [str(degree) for degree in range(1, self.num_heads + 1) if self._allows(degree)]
        culprit = f"n_heads={self.num_heads}"
        rule = "tp must divide the number of query heads"
        if self.num_heads % size == 0:
            culprit = f"n_kv_heads={self.num_kv_heads}"
            rule = "tp must divide the number of key/value heads or be a multiple of it"
        raise ModelError(
            f"tp={size} does not fit {culprit} of {self.name} (n_heads={self.num_heads},"
            f" n_kv_heads={self.num_kv_heads}): {rule}. Use tp={', '.join(allowed)}."
        )

    def _allows(self, size: int) -> bool:
        kv = self.num_kv_heads
        return self.num_heads % size == 0 and (kv % size == 0 or size % kv == 0)

    def shares_kv_heads(self, size: int) -> bool:
        """Whether several ranks use the same key/value head."""
        return self.num_kv_heads % size != 0

    def kv_features(self, size: int, rank: int) -> tuple[int, int]:
        """First and one past the last feature of k or v that a rank computes."""
        if self.shares_kv_heads(size):
            head, width = rank * self.num_kv_heads // size, self.key_value_width // self.num_kv_heads
            return head * width, (head + 1) * width
        width = self.key_value_width // size
        return rank * width, (rank + 1) * width


def head_layout(
    name: str, module: nn.Module, query_width: int, key_value_width: int | None, config: Any
) -> HeadLayout:
    """Reads the heads of an attention module from its attributes, or from its config.

    Args:
        name: of the module.
        module: the attention module, parent of the q, k and v layers.
        query_width: output features of q; for a fused weight 0.
        key_value_width: output features of k; for a fused weight its total output features, with `query_width` 0.
        config: a Hugging Face config or None.

    Raises:
        ModelError: the number of heads cannot be known.
    """
    heads = _find(module, config, QUERY_HEADS)
    kv_heads = _find(module, config, KEY_VALUE_HEADS)
    head_dim = _find(module, config, HEAD_DIMS)
    if query_width == 0:
        query_width, key_value_width = _fused_widths(name, key_value_width or 0, heads, kv_heads, head_dim)
    key_value_width = query_width if key_value_width is None else key_value_width
    if heads is None and head_dim:
        heads = query_width // head_dim
    if heads is None or query_width % heads:
        raise ModelError(
            f"The number of attention heads of {name} is unknown: none of the attributes {', '.join(QUERY_HEADS)} or"
            f" {', '.join(HEAD_DIMS)} divides the width {query_width} of its queries. Name the attribute in"
            " tp_head_attributes, so that it can be divided by tp."
        )
    head_dim = query_width // heads
    if key_value_width % head_dim == 0:  # a config may name key/value heads that the module does not have
        kv_heads = key_value_width // head_dim
    if not kv_heads or key_value_width % kv_heads:
        raise ModelError(
            f"{name} has keys of width {key_value_width}, which is not a multiple of its head width {head_dim}."
            " Name the attribute that holds the number of key/value heads in tp_head_attributes."
        )
    return HeadLayout(
        name=name,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        query_width=query_width,
        key_value_width=key_value_width,
    )


def _find(module: nn.Module, config: Any, names: Collection[str]) -> int | None:
    for owner in (module, config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _fused_widths(
    name: str, total: int, heads: int | None, kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Widths of q and of k in a weight that stacks q, k and v."""
    if heads and head_dim and total > heads * head_dim:
        width = total - heads * head_dim
        if width % (2 * head_dim) == 0:
            return heads * head_dim, width // 2
    heads = heads or 1
    kv_heads = kv_heads or heads
    width, rest = divmod(total, heads + 2 * kv_heads)
    if rest:
        raise ModelError(
            f"{name}: a fused weight of {total} outputs does not divide into {heads} query and 2 x {kv_heads}"
            " key/value heads. Name the attributes that hold them in tp_head_attributes."
        )
    return heads * width, kv_heads * width


def divide_attributes(module: nn.Module, layout: HeadLayout, size: int, extra: Collection[str] = ()) -> None:
    """Divides the head counts and widths that the module's own code uses in its views.

    Args:
        module: the attention module.
        layout: its heads.
        size: tp ranks.
        extra: further integer attributes to divide.
    """
    kv_heads = max(1, layout.num_kv_heads // size)
    whole_and_part = {
        **dict.fromkeys(QUERY_HEADS, (layout.num_heads, layout.num_heads // size)),
        **dict.fromkeys(KEY_VALUE_HEADS, (layout.num_kv_heads, kv_heads)),
        **dict.fromkeys(
            GROUPS, (layout.num_heads // layout.num_kv_heads, layout.num_heads // size // kv_heads)
        ),
        **dict.fromkeys(WIDTHS, (layout.query_width, layout.query_width // size)),
        "kv_size": (layout.key_value_width, layout.key_value_width * kv_heads // layout.num_kv_heads),
    }
    for name, (whole, part) in whole_and_part.items():
        if vars(module).get(name) == whole:
            setattr(module, name, part)
    if _reads_heads_of_config(module):
        config = copy.copy(vars(module)["config"])
        for name in (*QUERY_HEADS, *KEY_VALUE_HEADS):
            whole, part = whole_and_part[name]
            if vars(config).get(name) == whole:
                setattr(config, name, part)
        vars(module)["config"] = config
    for name in set(extra) - whole_and_part.keys():
        value = vars(module).get(name)
        if isinstance(value, int) and value % size == 0:
            setattr(module, name, value // size)


def _reads_heads_of_config(module: nn.Module) -> bool:
    """Whether a forward says `self.config.num_attention_heads` or the like."""
    source = source_of_forward(module) if "config" in vars(module) else ""
    return any(f"config.{name}" in source for name in (*QUERY_HEADS, *KEY_VALUE_HEADS))
