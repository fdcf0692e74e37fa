# SPDX-License-Identifier: Apache-2.0
"""What becomes of each module: decided and checked completely before anything is changed or sent."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_3d.errors import ModelError
from lightning_3d.parallel.tensor.heads import HeadLayout, head_layout
from lightning_3d.parallel.tensor.mixing import check_layer
from lightning_3d.parallel.tensor.parameters import shard_bounds
from lightning_3d.tp_styles import ModuleFacts, TpStyle, parent_of, scope_of


@dataclass(frozen=True, kw_only=True)
class ModuleSharding:
    """What becomes of one module that has a style."""

    name: str
    kind: str
    """A kind of `tp_styles.KINDS`."""
    transposed: bool = False
    weight_dim: int | None = None
    """Dim of the weight that is sharded; None if it stays whole."""
    bias_dim: int | None = None
    """0 if the bias is sharded."""
    parts: tuple[tuple[int, int], ...] = ()
    """For a whole weight: the output features that this rank computes."""


@dataclass(kw_only=True)
class ShardingPlan:
    """What becomes of a model."""

    modules: dict[str, ModuleSharding] = field(default_factory=dict)
    heads: dict[str, HeadLayout] = field(default_factory=dict)
    """Attention modules whose attributes are divided."""
    inputs: set[str] = field(default_factory=set)
    """Modules whose input is made whole once for all column layers inside."""
    own_inputs: set[str] = field(default_factory=set)
    """Column layers that make their input whole themselves."""


def gather_facts(model: nn.Module, blocks: Collection[str]) -> dict[str, ModuleFacts]:
    """The facts that styles are matched with, from what modules look like rather than from their classes."""
    facts: dict[str, ModuleFacts] = {}
    for name, module in model.named_modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            block = next((block for block in blocks if name.startswith(f"{block}.")), "")
            facts[name] = _facts_of(module, block)
    return facts


def _facts_of(module: nn.Module, block: str) -> ModuleFacts:
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return ModuleFacts(layout="other", block=block)
    first, second = weight.shape
    if hasattr(module, "num_embeddings"):
        return ModuleFacts(layout="embedding", num_in=first, num_out=second, block=block)
    if getattr(module, "nf", None) == second:
        return ModuleFacts(layout="transposed", num_in=first, num_out=second, block=block)
    if hasattr(module, "out_features"):
        return ModuleFacts(layout="linear", num_in=second, num_out=first, block=block)
    return ModuleFacts(layout="other", block=block)


class ShardingPlanner:
    """Turns styles into a `ShardingPlan` for one rank; every refusal happens here, alike on all ranks."""

    def __init__(
        self, model: nn.Module, blocks: Collection[str], styles: Mapping[str, TpStyle], size: int, rank: int
    ) -> None:
        self._model, self._blocks, self._styles = model, blocks, styles
        self._size, self._rank = size, rank
        self._facts = gather_facts(model, blocks)
        self._plan = ShardingPlan()

    def plan(self) -> ShardingPlan:
        """Decides for every styled module.

        Raises:
            ModelError: sizes that tp does not divide, or styles that contradict the model.
        """
        self._check_modules()
        self._plan_heads()
        for name, style in self._styles.items():
            if style.kind not in ("replicate", "partial"):
                self._plan.modules[name] = self._plan_module(name, style)
        self._check_blocks()
        self._plan_inputs()
        return self._plan

    def _check_modules(self) -> None:
        layouts = {"vocab_embedding": ("embedding",), "vocab_head": ("linear",)}
        for name, style in self._styles.items():
            if style.kind in ("replicate", "partial"):
                continue
            module, fact = self._model.get_submodule(name), self._facts.get(name)
            allowed = layouts.get(style.kind, ("linear", "transposed"))
            if fact is None or fact.layout not in allowed:
                raise ModelError(
                    f"tp style {style.kind!r} of {name} needs a {' or '.join(allowed)} layer with a weight of two dims,"
                    f" but it is {type(module).__name__}. Change tp_styles."
                )
            check_layer(module, name, transposed=fact.layout == "transposed")
            extra = [key for key, value in module.named_parameters() if key not in ("weight", "bias")]
            if extra:
                raise ModelError(
                    f"{name} has parameters that tp style {style.kind!r} does not know: {', '.join(extra)}. Give"
                    " styles to its parts, or make it 'replicate'."
                )
            unknown = [key for key in ("max_norm", "sparse", "scale_grad_by_freq") if vars(module).get(key)]
            if fact.layout == "embedding" and unknown:
                raise ModelError(
                    f"{name}: {', '.join(unknown)} does not work on a vocabulary that is sharded over tp."
                )

    def _plan_heads(self) -> None:
        """Finds the attention modules, in which layers have the roles q or qkv."""
        for name, style in self._styles.items():
            scope = scope_of(name)
            if style.kind not in ("column", "column_fused") or style.role not in ("q", "qkv"):
                continue
            module = self._model.get_submodule(scope)
            fused = style.role == "qkv"
            key = next((n for n, s in self._styles.items() if s.role == "k" and scope_of(n) == scope), None)
            width = self._facts[name].num_out
            key_width = width if fused else self._facts[key].num_out if key else None
            config = getattr(module, "config", None)
            layout = head_layout(scope or "model", module, 0 if fused else width, key_width, config)
            layout.check(self._size)
            self._check_head_norms(scope, layout)
            self._plan.heads[scope] = layout

    def _check_head_norms(self, scope: str, layout: HeadLayout) -> None:
        for name, style in self._styles.items():
            is_norm = name not in self._facts or self._facts[name].layout == "other"
            if style.kind != "partial" or scope_of(name) != scope or not is_norm or layout.num_heads == 1:
                continue
            for parameter in self._model.get_submodule(name).parameters():
                if parameter.numel() > layout.head_dim:
                    raise ModelError(
                        f"{name} normalises over all heads ({parameter.numel()} features), of which a rank has a part."
                        f" Tensor parallelism needs norms of single heads ({layout.head_dim} features). Use tp=1, or"
                        f" give all layers of {scope} the tp style 'replicate'."
                    )

    def _plan_module(self, name: str, style: TpStyle) -> ModuleSharding:
        rules: dict[str, Callable[[str, TpStyle], ModuleSharding]] = {
            "column": self._column,
            "column_fused": self._fused,
            "row": self._row,
            "vocab_embedding": self._vocabulary,
            "vocab_head": self._vocabulary,
        }
        return rules[style.kind](name, style)

    def _column(self, name: str, style: TpStyle) -> ModuleSharding:
        fact, heads = self._facts[name], self._plan.heads.get(scope_of(name))
        transposed = fact.layout == "transposed"
        if heads is not None and style.role in ("k", "v") and heads.shares_kv_heads(self._size):
            parts = (heads.kv_features(self._size, self._rank),)
            return ModuleSharding(name=name, kind="column", transposed=transposed, parts=parts)
        self._check_divides(name, "output", fact.num_out)
        return ModuleSharding(
            name=name, kind="column", transposed=transposed, weight_dim=int(transposed), bias_dim=0
        )

    def _row(self, name: str, style: TpStyle) -> ModuleSharding:
        fact = self._facts[name]
        self._check_divides(name, "input", fact.num_in)
        transposed = fact.layout == "transposed"
        return ModuleSharding(name=name, kind="row", transposed=transposed, weight_dim=int(not transposed))

    def _fused(self, name: str, style: TpStyle) -> ModuleSharding:
        fact, heads = self._facts[name], self._plan.heads.get(scope_of(name))
        size, rank = self._size, self._rank
        if style.role == "qkv" and heads is not None:
            q, kv = heads.query_width, heads.key_value_width
            own, (start, stop) = q // size, heads.kv_features(size, rank)
            parts: tuple[tuple[int, int], ...] = (
                (rank * own, (rank + 1) * own),
                (q + start, q + stop),
                (q + kv + start, q + kv + stop),
            )
        else:
            half = fact.num_out // 2
            self._check_divides(name, "output", half)
            own = half // size
            parts = tuple((offset + rank * own, offset + (rank + 1) * own) for offset in (0, half))
        return ModuleSharding(name=name, kind="column", transposed=fact.layout == "transposed", parts=parts)

    def _vocabulary(self, name: str, style: TpStyle) -> ModuleSharding:
        fact = self._facts[name]
        rows = fact.num_in if fact.layout == "embedding" else fact.num_out
        start, stop = shard_bounds(rows, self._size, self._size - 1)
        if start == stop:
            raise ModelError(
                f"{name} has {rows} rows, too few to share among tp={self._size}. Give it 'replicate'."
            )
        return ModuleSharding(name=name, kind=style.kind, weight_dim=0, bias_dim=0)

    def _check_divides(self, name: str, side: str, features: int) -> None:
        if features % self._size:
            allowed = [str(degree) for degree in range(1, min(features, 64) + 1) if features % degree == 0]
            raise ModelError(
                f"{name} has {features} {side} features, which tp={self._size} does not divide."
                f" Use tp={', '.join(allowed)}, or give the layer and its partners the tp style 'replicate'."
            )

    def _check_blocks(self) -> None:
        """Columns and rows come together in each part of a block, and some block has any."""
        parts: dict[str, dict[str, set[str]]] = {}
        for name, item in self._plan.modules.items():
            block = self._facts[name].block
            if block:
                inner = name[len(block) + 1 :].split(".")
                part = f"{block}.{inner[0]}" if len(inner) > 1 else block
                parts.setdefault(block, {}).setdefault(part, set()).add(item.kind)
        for block, kinds_of in parts.items():
            for part, kinds in kinds_of.items():
                kinds = kinds | kinds_of.get(block, set())
                if ("column" in kinds) != ("row" in kinds) and not self._has_partner(part, block, kinds_of):
                    raise ModelError(
                        f"{part} has tp styles of one kind only ({', '.join(sorted(kinds))}): what column layers shard"
                        " must reach a row layer. Complete tp_styles."
                    )
        inside = [name for name, fact in self._facts.items() if fact.block or name in self._blocks]
        if inside and not parts:
            raise ModelError(
                f"No layer of the blocks has a known name, so tp={self._size} would shard nothing there. Give"
                f" tp_styles={{pattern: 'column' or 'row'}} for layers such as {', '.join(inside[:6])}."
            )

    def _has_partner(self, part: str, block: str, kinds_of: Mapping[str, set[str]]) -> bool:
        """Whether what a part of a block lacks is in another part that lacks the opposite, and the widths fit."""
        halves = {"column": set[int](), "row": set[int]()}
        for other, kinds in kinds_of.items():
            if other == block or len(kinds & halves.keys()) != 1:
                continue
            for name, item in self._plan.modules.items():
                if name.startswith(f"{other}.") and item.kind in halves:
                    fact = self._facts[name]
                    halves[item.kind].add(fact.num_out if item.kind == "column" else fact.num_in)
        return bool(part) and halves["column"] == halves["row"]

    def _plan_inputs(self) -> None:
        """The parent of column layers makes its input whole once; layers directly in a block do it themselves."""
        columns = [name for name, item in self._plan.modules.items() if item.kind == "column"]
        for name in columns:
            parent = self._caller_of(name)
            if parent in self._blocks or not self._facts[name].block:
                self._plan.own_inputs.add(name)
            else:
                self._plan.inputs.add(parent)
        outer = frozenset(self._plan.inputs)

        def is_inside(name: str) -> bool:
            return any(name.startswith(f"{other}.") for other in outer)

        self._plan.inputs = {name for name in outer if not is_inside(name)}
        self._plan.own_inputs = {name for name in self._plan.own_inputs if not is_inside(name)}

    def _caller_of(self, name: str) -> str:
        """The innermost module around a layer that has a forward: a `ModuleDict` is never called."""
        parent = scope_of(name)
        while parent and type(self._model.get_submodule(parent)).forward is nn.Module.forward:
            parent = parent_of(parent)
        return parent


def config_of(model: nn.Module) -> Any:
    """The outermost Hugging Face config that carries a tensor-parallel plan, or None."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(getattr(config, "base_model_tp_plan", None), Mapping):
            return config
    return None
