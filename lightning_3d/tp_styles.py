# SPDX-License-Identifier: Apache-2.0
"""What tensor parallelism does to each module, as data: styles, and who gets which by name.

Three sources, the first that knows a module wins:

1. the user's patterns (`tp_styles={"*.attn.in": "column"}`),
2. the plan that a Hugging Face config carries (`base_model_tp_plan`),
3. a table of the names that model families use.

A layer with low-rank adapters around it (LoRA) is treated as that layer: see `AdaptedLayer`.

A name from the table is a guess, so it counts only where the sizes agree with it (see `_drop_unpaired`); what the user
or the config says is taken as said, and checked when it is applied.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lightning_3d.errors import ModelError

KINDS = {
    "column": "output features are sharded; the input is whole",
    "row": "input features are sharded; the outputs are summed",
    "column_fused": "as column, for a weight that stacks q, k, v or gate, up: each part is sharded for itself",
    "vocab_embedding": "rows of the embedding are sharded; outputs are summed",
    "vocab_head": "output classes are sharded; the logits stay sharded until something needs them whole",
    "replicate": "weights are the same on every rank",
    "partial": "as replicate, used on head- or feature-sharded activations: gradients are summed over ranks",
}
"""The kinds of style a module can have."""


@dataclass(frozen=True, kw_only=True)
class TpStyle:
    """What happens to one module."""

    kind: str
    """One of `KINDS`."""
    role: str = ""
    """What a column is to its parent: `q`, `k`, `v`, `qkv`, `gate_up` or `ffn`; sizes of heads follow from it."""
    source: str = "user"
    """`user`, `config` or `table`: how sure the style is."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(f"tp style {self.kind!r} is unknown. Use one of: {', '.join(KINDS)}.")


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """What matching needs to know of a module that has parameters of its own."""

    layout: str
    """`linear` (weight [out, in]), `transposed` ([in, out]), `embedding` ([rows, width]), or `other`."""
    num_out: int = 0
    """Output features, or width of an embedding."""
    num_in: int = 0
    """Input features, or rows of an embedding."""
    block: str = ""
    """Name of the block the module is in; empty outside the blocks."""


@dataclass(frozen=True, kw_only=True)
class AdaptedLayer:
    """A module that adds to a linear layer what pairs of low-rank ones give for its input: `base(x) + up(down(x))`."""

    base: str
    """Name of the adapted layer [in, out]."""
    downs: tuple[str, ...]
    """Names of the layers [in, rank]."""
    ups: tuple[str, ...]
    """Names of the layers [rank, out]."""

    def styles(self, style: TpStyle) -> dict[str, TpStyle]:
        """Styles of the parts, for a style of the whole."""
        if style.kind in ("column", "column_fused"):
            inner = TpStyle(kind="partial", source=style.source)
            return {**dict.fromkeys((self.base, *self.ups), style), **dict.fromkeys(self.downs, inner)}
        if style.kind == "row":
            return dict.fromkeys((self.base, *self.downs), style)
        return dict.fromkeys((self.base, *self.downs, *self.ups), style)


class ResolvedStyles(dict[str, TpStyle]):
    """Styles by name of module, decided on the whole model."""


def _table(*rows: tuple[str, str, str]) -> dict[str, tuple[str, str]]:
    return {name: (kind, role) for names, kind, role in rows for name in names.split()}


_IN_BLOCKS = _table(
    ("q_proj wq query to_q q_lin q", "column", "q"),
    ("k_proj wk key to_k k_lin k", "column", "k"),
    ("v_proj wv value to_v v_lin v", "column", "v"),
    ("qkv qkv_proj c_attn Wqkv wqkv in_proj", "column_fused", "qkv"),
    ("gate_up_proj w13", "column_fused", "gate_up"),
    ("gate_proj up_proj w1 w3 fc1 c_fc lin1 linear1 fc_in wi wi_0 wi_1 dense_h_to_4h", "column", "ffn"),
    ("o_proj wo out_proj out_lin o to_out proj c_proj", "row", ""),
    ("down_proj w2 fc2 lin2 linear2 fc_out dense_4h_to_h", "row", ""),
)
_SPLIT_LAYERS = (
    (("attention.self.query", "attention.self.key", "attention.self.value"), "attention.output.dense"),
    (("intermediate.dense",), "output.dense"),
)
"""Columns and the row behind them, in blocks that keep the two in different modules (BERT and its kin)."""
_EMBEDDINGS = frozenset(
    name
    for names in (
        "tok_embeddings tok_embed tok_emb embed_tokens wte embed embedding embeddings embed_in emb shared",
        "token_embedding token_embeddings word_embeddings",
    )
    for name in names.split()
)
_HEADS = frozenset(("lm_head", "head", "output", "embed_out", "unembed", "to_logits"))
_PARTIAL = frozenset(("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"))
_CONFIG_KINDS = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocab_embedding",
    "replicated_with_grad_allreduce": "partial",
}
_ROLES = {name: role for name, (_, role) in _IN_BLOCKS.items() if role}


def resolve_styles(
    names: Iterable[str],
    facts: Mapping[str, ModuleFacts],
    *,
    user: Mapping[str, str | TpStyle] | None = None,
    config_plan: Mapping[str, str] | None = None,
) -> ResolvedStyles:
    """Gives modules their styles.

    Args:
        names: names of all modules, relative to the model.
        facts: of the modules with parameters of their own.
        user: `fnmatch` pattern on the name -> kind or style.
        config_plan: `base_model_tp_plan` of a Hugging Face config; names are relative to the base model.

    Returns:
        Name -> style. Modules that are in none of the sources are absent: they are replicated.

    Raises:
        ModelError: a pattern of the user matches nothing, or a kind is unknown.
    """
    names = [name for name in names if name]
    user = user or {}
    _check_patterns(user, names)
    adapted = _adapted_layers(names, facts, user)
    inside = {part for layer in adapted.values() for part in (layer.base, *layer.downs, *layer.ups)}
    names = [name for name in names if name not in inside]
    facts = {name: fact for name, fact in facts.items() if name not in inside} | {
        name: facts[layer.base] for name, layer in adapted.items()
    }
    chosen: dict[str, TpStyle] = {}
    for name in names:
        style = _from_user(name, user)
        if style is None and not _is_routed(name):
            style = _from_config(name, config_plan or {}) or _from_table(name, facts)
        if style is not None:
            chosen[name] = style
    for name, style in _from_sequences(facts).items():
        chosen.setdefault(name, style)
    paired = _drop_unpaired(_drop_foreign_heads(chosen, facts), facts)
    resolved = ResolvedStyles()
    for name, style in (_from_split_layers(facts) | paired).items():
        resolved |= adapted[name].styles(style) if name in adapted else {name: style}
    return resolved


def _adapted_layers(
    names: Collection[str], facts: Mapping[str, ModuleFacts], user: Mapping[str, str | TpStyle]
) -> dict[str, AdaptedLayer]:
    """Adapted layers by the name of the module around them; none of whose parts the user gives styles."""
    found: dict[str, AdaptedLayer] = {}
    for name in names:
        if name in facts or any(name.startswith(f"{outer}.") for outer in found):
            continue
        inside = [part for part in facts if part.startswith(f"{name}.")]
        layer = _adapted_layer(inside, facts) if len(inside) > 2 else None
        if layer is not None and all(_from_user(part, user) is None for part in inside):
            found[name] = layer
    return found


def _adapted_layer(inside: list[str], facts: Mapping[str, ModuleFacts]) -> AdaptedLayer | None:
    """The parts by their sizes, if they are one layer in a block and pairs of smaller ones."""
    if any(facts[name].layout != "linear" or not facts[name].block for name in inside):
        return None
    base = max(inside, key=lambda name: facts[name].num_in * facts[name].num_out)
    num_in, num_out = facts[base].num_in, facts[base].num_out
    downs = tuple(name for name in inside if facts[name].num_in == num_in and name != base)
    ups = tuple(name for name in inside if facts[name].num_out == num_out and name not in (base, *downs))
    ranks = [sorted(facts[name].num_out for name in downs), sorted(facts[name].num_in for name in ups)]
    fits = len(inside) == 1 + len(downs) + len(ups) and ranks[0] == ranks[1] and bool(downs)
    return AdaptedLayer(base=base, downs=downs, ups=ups) if fits else None


def _is_routed(name: str) -> bool:
    """Whether a module is in a list of experts, which get tokens of their own and not sequences."""
    return "experts" in name.split(".")


def _check_patterns(user: Mapping[str, str | TpStyle], names: Collection[str]) -> None:
    for pattern in user:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                f"tp_styles pattern {pattern!r} matches no module. Patterns are fnmatch patterns on module names,"
                f" such as {next(iter(names), 'layers.*.attn.wq')!r}."
            )


def _from_user(name: str, user: Mapping[str, str | TpStyle]) -> TpStyle | None:
    for pattern, value in user.items():
        if fnmatchcase(name, pattern):
            return value if isinstance(value, TpStyle) else TpStyle(kind=value, role=role_of(name))
    return None


def _from_config(name: str, plan: Mapping[str, str]) -> TpStyle | None:
    for pattern, value in plan.items():
        kind = _CONFIG_KINDS.get(value)
        if kind and (fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")):
            return TpStyle(kind=kind, role=role_of(name) if kind == "column" else "", source="config")
    return None


def _from_table(name: str, facts: Mapping[str, ModuleFacts]) -> TpStyle | None:
    base = _base(name)
    fact = facts.get(name)
    if fact is None or fact.layout == "other":
        return TpStyle(kind="partial", source="table") if base in _PARTIAL else None
    if fact.block:
        kind, role = _IN_BLOCKS.get(base, ("", ""))
        if not kind or fact.layout == "embedding":
            return None
        return TpStyle(kind=kind, role=role, source="table")
    if fact.layout == "embedding" and base in _EMBEDDINGS:
        return TpStyle(kind="vocab_embedding", source="table")
    if fact.layout == "linear" and base in _HEADS:
        return TpStyle(kind="vocab_head", source="table")
    return None


def _from_sequences(facts: Mapping[str, ModuleFacts]) -> dict[str, TpStyle]:
    """Feed-forward layers that are numbered: `mlp.0` and `mlp.2` with nothing that has parameters between them."""
    numbered: dict[str, list[str]] = {}
    for name, fact in facts.items():
        if fact.block and name.rpartition(".")[2].isdigit() and not _is_routed(name):
            numbered.setdefault(parent_of(name), []).append(name)
    styles: dict[str, TpStyle] = {}
    for parent, members in numbered.items():
        inside = [name for name in facts if name.startswith(f"{parent}.")]
        first, last = facts[members[0]], facts[members[-1]]
        chain = first.num_out == last.num_in > first.num_in == last.num_out
        if inside == members and len(members) == 2 and first.layout == last.layout == "linear" and chain:
            styles[members[0]] = TpStyle(kind="column", role="ffn", source="table")
            styles[members[1]] = TpStyle(kind="row", source="table")
    return styles


def _from_split_layers(facts: Mapping[str, ModuleFacts]) -> dict[str, TpStyle]:
    """Layers of `_SPLIT_LAYERS`, where the row takes as much as each query's or feed-forward's column gives."""
    styles: dict[str, TpStyle] = {}
    for columns, row in _SPLIT_LAYERS:
        for name in facts:
            prefix = name.removesuffix(columns[0])
            members, last = [prefix + column for column in columns], facts.get(prefix + row)
            if (
                prefix == name
                or not facts[name].block
                or last is None
                or any(m not in facts for m in members)
            ):
                continue
            if facts[name].num_out == last.num_in:
                for member in members:
                    role = role_of(member) or "ffn"
                    styles[member] = TpStyle(kind="column", role=role, source="table")
                styles[prefix + row] = TpStyle(kind="row", source="table")
    return styles


def role_of(name: str) -> str:
    """Role of a module by the last part of its name that says anything: `attn.q_proj.base` is a `q`."""
    return _role_and_scope(name)[0]


def scope_of(name: str) -> str:
    """Name of the module in which a module has its role: `attn` of `attn.q_proj` and of `attn.q_proj.base`."""
    return _role_and_scope(name)[1]


def _role_and_scope(name: str) -> tuple[str, str]:
    part = name
    for _ in range(2):
        role = _ROLES.get(_base(part), "")
        if role:
            return role, parent_of(part)
        part = parent_of(part)
    return "", parent_of(name)


def _base(name: str) -> str:
    parts = name.split(".")
    return parts[-2] if parts[-1].isdigit() and len(parts) > 1 else parts[-1]


def _drop_foreign_heads(styles: dict[str, TpStyle], facts: Mapping[str, ModuleFacts]) -> dict[str, TpStyle]:
    """A table's head must have as many classes as an embedding has rows, where there is an embedding."""
    rows = {
        facts[name].num_in
        for name, style in styles.items()
        if style.kind == "vocab_embedding" and name in facts
    }

    def is_head(name: str, style: TpStyle) -> bool:
        return (
            style.kind != "vocab_head" or style.source != "table" or not rows or facts[name].num_out in rows
        )

    return {name: style for name, style in styles.items() if is_head(name, style)}


def _drop_unpaired(styles: dict[str, TpStyle], facts: Mapping[str, ModuleFacts]) -> dict[str, TpStyle]:
    """Takes back the table's guesses for parents whose columns and rows do not fit each other.

    A column's output must reach a row of the same parent: the row's input is as wide as some column's output (a third
    of it or half of it, or its q part, when fused).
    """
    parents: dict[str, list[str]] = {}
    for name, style in styles.items():
        if style.kind in ("column", "column_fused", "row") and name in facts and facts[name].block:
            parents.setdefault(parent_of(name), []).append(name)
    dropped: set[str] = set()
    sure = [name for name, style in styles.items() if style.source != "table"]
    for parent, members in parents.items():
        if not any(name.startswith(f"{parent}.") for name in sure):
            dropped.update(_unpaired(members, styles, facts))
    return {name: style for name, style in styles.items() if name not in dropped}


def _unpaired(
    members: list[str], styles: Mapping[str, TpStyle], facts: Mapping[str, ModuleFacts]
) -> set[str]:
    columns = [name for name in members if styles[name].kind == "column"]
    fused = [name for name in members if styles[name].kind == "column_fused"]
    rows = [name for name in members if styles[name].kind == "row"]
    widths = {facts[name].num_out for name in columns}
    inputs = {facts[name].num_in for name in rows}

    def feeds(name: str) -> bool:
        width, role = facts[name].num_out, styles[name].role
        if styles[name].kind == "column_fused":
            return any(
                width == 2 * size if role == "gate_up" else size < width <= 3 * size for size in inputs
            )
        return role in ("k", "v") or width in inputs

    roles = {styles[name].role for name in columns}
    if not rows or not (columns or fused) or (roles & {"k", "v"} and "q" not in roles):
        return set(members)
    if fused:
        return set() if all(map(feeds, columns + fused)) else set(members)
    if all(map(feeds, columns)) and inputs <= widths:
        return set()
    return set(members)


def parent_of(name: str) -> str:
    """Name of the module that a module is a child of."""
    return name.rpartition(".")[0]
