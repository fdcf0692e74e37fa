# SPDX-License-Identifier: Apache-2.0
"""What the model wants against what the file has: found over all ranks, reported once, by name."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_3d.checkpoint.agreement import Ranks, listed
from lightning_3d.checkpoint.codec import Json
from lightning_3d.checkpoint.model_state import ModelState
from lightning_3d.checkpoint.optimizer_restore import OptimizerRestore, all_parameters
from lightning_3d.checkpoint.optimizer_state import StoredOptimizer
from lightning_3d.checkpoint.places import Place
from lightning_3d.errors import CheckpointError


@dataclass(kw_only=True)
class Match:
    """One rank's model against the file."""

    names: tuple[str, ...]
    """All entries of the file's model, sorted; the same on every rank."""
    found: dict[str, str] = field(default_factory=dict)
    """This model's tensors that the file has, to their names there."""
    extras: set[str] = field(default_factory=set)
    """Entries that are no tensors, wanted and there."""
    used: set[str] = field(default_factory=set)
    """Entries of the file that this model knows."""
    missing: set[str] = field(default_factory=set)
    shapes: list[str] = field(default_factory=list)
    """Tensors whose shape differs, described."""
    casts: list[str] = field(default_factory=list)
    """Tensors whose dtype differs, described."""


def match_model(
    state: ModelState,
    stored: Mapping[str, TensorStorageMetadata],
    stored_extras: Mapping[str, Json],
    stored_aliases: Mapping[str, str],
) -> Match:
    """Finds each tensor of the model in the file, under any of the names that it is or was tied to."""
    match = Match(names=tuple(sorted([*stored, *stored_extras])))
    own_aliases: dict[str, list[str]] = {}
    for alias, name in state.aliases.items():
        own_aliases.setdefault(name, []).append(alias)
    for name, tensor in state.tensors.items():
        known_as = [name, *own_aliases.get(name, ())]
        candidates = [*known_as, *(stored_aliases[alias] for alias in known_as if alias in stored_aliases)]
        there = next((candidate for candidate in candidates if candidate in stored), None)
        if there is None:
            match.missing.add(name)
            continue
        match.used.update(candidate for candidate in candidates if candidate in stored)
        entry = stored[there]
        saved, own = entry.properties.dtype, tensor.dtype
        if entry.size != tensor.shape:
            match.shapes.append(
                f"{name}: {tuple(entry.size)} in the checkpoint, {tuple(tensor.shape)} in the model"
            )
            continue
        if saved != own:
            if not (saved.is_floating_point and own.is_floating_point):
                match.shapes.append(f"{name}: {saved} in the checkpoint, {own} in the model")
                continue
            match.casts.append(f"{name} ({saved} to {own})")
        match.found[name] = there
    match.extras = {name for name in state.extras if name in stored_extras}
    match.used |= match.extras
    match.missing |= {name for name in state.extras if name not in stored_extras}
    return match


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What the ranks tell one another of their matches."""

    used: bytes
    """One bit for each of `Match.names`."""
    held: tuple[bytes, ...]
    """For each optimizer, one bit for each parameter that the file's holds."""
    num_found: int
    missing: set[str]
    shapes: list[str]
    casts: list[str]
    optimizer_missing: set[str]
    stateless: set[str]
    conflicts: list[str]


def compare(
    match: Match,
    restores: Sequence[OptimizerRestore],
    stored: Sequence[StoredOptimizer],
    folder: Place,
    ranks: Ranks,
    *,
    strict: bool,
) -> None:
    """Puts the ranks' matches together; collective.

    Raises:
        CheckpointError: on every rank: shapes or dtypes that cannot be, nothing in common, or, when strict, missing
            or unexpected entries.
    """
    file_parameters = [sorted(all_parameters(optimizer)) for optimizer in stored]
    part = _Part(
        used=_bits(match.names, match.used),
        held=tuple(_bits(file_parameters[i], restore.held) for i, restore in enumerate(restores)),
        num_found=len(match.found),
        missing=match.missing,
        shapes=match.shapes,
        casts=match.casts,
        optimizer_missing={name for restore in restores for name in restore.missing},
        stateless={name for restore in restores for name in restore.stateless},
        conflicts=[text for restore in restores for text in restore.conflicts],
    )
    parts = ranks.all_gather(part)
    differing = sorted({text for part in parts for text in part.shapes})
    if differing:
        raise CheckpointError(
            f"{folder} does not fit the model: {listed(differing)}. Build the model as it was when saved."
        )
    if match.names and not any(part.num_found for part in parts):
        raise CheckpointError(
            f"{folder} has nothing of this model: it holds {listed(match.names, 4)}, the model wants "
            f"{listed({name for part in parts for name in part.missing}, 4)}. Build the model as it was when saved."
        )
    problems = _problems(match, file_parameters, parts)
    if problems and strict:
        raise CheckpointError(
            f"{folder} does not match the model. {' '.join(problems)} Build the model and its optimizers as they were "
            "when saved, or pass strict=False (Lightning: strict_loading = False) to load what is there."
        )
    if ranks.is_first:
        _warn(folder, problems, parts)


def _problems(match: Match, file_parameters: Sequence[Sequence[str]], parts: Sequence[_Part]) -> list[str]:
    texts = (
        ("Missing in the checkpoint", {name for part in parts for name in part.missing}),
        ("Unexpected in the checkpoint", _unset(match.names, [part.used for part in parts])),
        (
            "Parameters that the checkpoint's optimizer does not hold",
            {name for part in parts for name in part.optimizer_missing},
        ),
        (
            "Parameters that only the checkpoint's optimizer holds",
            {
                name
                for i in range(len(parts[0].held))
                for name in _unset(file_parameters[i], [part.held[i] for part in parts])
            },
        ),
    )
    problems = [f"{text} ({len(names)}): {listed(names)}." for text, names in texts if names]
    conflicts = sorted({text for part in parts for text in part.conflicts})
    return problems + [f"Param groups differ: {listed(conflicts)}."] * bool(conflicts)


def _warn(folder: Place, problems: Sequence[str], parts: Sequence[_Part]) -> None:
    casts = {text for part in parts for text in part.casts}
    stateless = {name for part in parts for name in part.stateless}
    texts = [f"Loaded what {folder} has. {' '.join(problems)}"] * bool(problems)
    if casts:
        texts.append(
            f"{folder} has other dtypes than the model; {len(casts)} tensors are cast: {listed(casts)}."
        )
    if stateless:
        texts.append(
            f"{folder} has no optimizer state for {len(stateless)} parameters, which had no gradient when it was "
            f"saved: {listed(stateless)}. Their state starts anew."
        )
    for text in texts:
        warnings.warn(text, stacklevel=4)


def _bits(names: Sequence[str], marked: Iterable[str]) -> bytes:
    marked = set(marked)
    number = sum(1 << i for i, name in enumerate(names) if name in marked)
    return number.to_bytes((len(names) + 7) // 8, "little")


def _unset(names: Sequence[str], masks: Sequence[bytes]) -> set[str]:
    """Names whose bit no rank has set."""
    number = 0
    for mask in masks:
        number |= int.from_bytes(mask, "little")
    return {name for i, name in enumerate(names) if not number >> i & 1}
