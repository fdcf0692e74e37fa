# SPDX-License-Identifier: Apache-2.0
"""What the model wants against what the file has: names, ties, dtypes, missing and unexpected entries, optimizers.

One thought in many cases over one set of models, hence longer than 400 lines.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_3d.checkpoint import load_checkpoint, load_full_state_dict, save_checkpoint
from lightning_3d.errors import CheckpointError
from tests.checkpoint.layouts import Layout, assert_same, build, train, whole_state
from tests.harness import run_ranks


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _net(**extra: nn.Module) -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), **extra})


def _stepped(model: nn.Module, optimizer: Optimizer, only: str = "") -> Optimizer:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name.startswith(only):
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# --- missing and unexpected


def test_strict_lists_both_sides(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", model=_net(old=nn.Linear(2, 2)), metadata={})
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path / "a.ckpt", model=_net(new=nn.Linear(2, 2)))
    assert "Missing in the checkpoint (2): new.bias, new.weight." in str(error.value)
    assert "Unexpected in the checkpoint (2): old.bias, old.weight." in str(error.value)
    assert "strict=False" in str(error.value)


def test_not_strict_loads_what_is_there(tmp_path: Path) -> None:
    saved, model = _net(old=nn.Linear(2, 2)), _net(new=nn.Linear(2, 2))
    save_checkpoint(
        tmp_path / "a.ckpt", model=saved, optimizers=[_stepped(saved, AdamW(saved.parameters()))], metadata={}
    )
    new = model["new"].weight.clone()
    optimizer = AdamW(model.parameters())
    with pytest.warns(UserWarning, match=r"Missing .*new.bias.*Unexpected .*old.bias"):
        load_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[optimizer], strict=False)
    assert torch.equal(model["a"].weight, saved["a"].weight)
    assert torch.equal(model["new"].weight, new)
    assert model["new"].weight not in optimizer.state
    assert optimizer.state[model["a"].weight]["step"] == 1


def test_nothing_in_common_is_never_fine(tmp_path: Path) -> None:
    """Wrong adapter names load nothing; `strict=False` must not hide it."""
    adapter = nn.ModuleDict({"base": nn.ModuleDict({"lora": nn.Linear(2, 2)})})
    save_checkpoint(tmp_path / "a.ckpt", model=adapter, metadata={})
    with pytest.raises(CheckpointError, match=r"nothing of this model: it holds base\.lora"):
        load_checkpoint(tmp_path / "a.ckpt", model=nn.ModuleDict({"lora": nn.Linear(2, 2)}), strict=False)


def test_only_the_entries_that_a_hook_left(tmp_path: Path) -> None:
    model = _net()
    save_checkpoint(tmp_path / "a.ckpt", model=model, metadata={}, model_keys=["a.weight", "a.bias"])
    assert set(load_full_state_dict(tmp_path / "a.ckpt")) == {"a.weight", "a.bias"}
    with pytest.warns(UserWarning, match=r"Missing in the checkpoint \(2\): b.bias, b.weight"):
        load_checkpoint(tmp_path / "a.ckpt", model=_net(), strict=False)


def _different_on_each_rank(path: Path) -> str:
    names = ("a", "b") if dist.get_rank() == 0 else ("c",)
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in (*names, f"new{dist.get_rank()}")})
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, model=model)
    return str(error.value)


def test_stages_are_compared_together(tmp_path: Path) -> None:
    """What one stage lacks another has; what nobody has is named by all."""
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("a", "b", "c", "gone")})
    save_checkpoint(tmp_path / "a.ckpt", model=model, metadata={})
    errors = run_ranks(2, _different_on_each_rank, tmp_path / "a.ckpt")
    assert len(set(errors)) == 1
    assert "Missing in the checkpoint (4): new0.bias, new0.weight, new1.bias, new1.weight." in errors[0]
    assert "Unexpected in the checkpoint (2): gone.bias, gone.weight." in errors[0]


def test_shapes_that_differ(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", model=nn.Linear(2, 3), metadata={})
    with pytest.raises(CheckpointError, match=r"weight: \(3, 2\) in the checkpoint, \(3, 4\) in the model"):
        load_checkpoint(tmp_path / "a.ckpt", model=nn.Linear(4, 3), strict=False)


# --- dtypes


def test_a_cast_is_reported(tmp_path: Path) -> None:
    saved, model = nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16)
    save_checkpoint(
        tmp_path / "a.ckpt", model=saved, optimizers=[_stepped(saved, AdamW(saved.parameters()))], metadata={}
    )
    optimizer = AdamW(model.parameters())
    with pytest.warns(UserWarning, match=r"2 tensors are cast: bias \(torch.float32 to torch.bfloat16\)"):
        load_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[optimizer])
    assert torch.equal(model.weight, saved.weight.to(torch.bfloat16))
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.bfloat16  # state follows its parameter
    assert optimizer.state[model.weight]["step"].dtype == torch.float32


def test_a_cast_between_kinds_is_refused(tmp_path: Path) -> None:
    def with_buffer(dtype: torch.dtype) -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("count", torch.ones(2, dtype=dtype))
        return model

    save_checkpoint(tmp_path / "a.ckpt", model=with_buffer(torch.int64), metadata={})
    with pytest.raises(
        CheckpointError, match=r"count: torch.int64 in the checkpoint, torch.float32 in the model"
    ):
        load_checkpoint(tmp_path / "a.ckpt", model=with_buffer(torch.float32))


# --- names


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda module: module,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "checkpointed": checkpoint_wrapper,
    "both": lambda module: torch.compile(checkpoint_wrapper(module), backend="eager"),
}


@pytest.mark.parametrize("saved_as", WRAPPED)
def test_wrappers_leave_no_trace(tmp_path: Path, saved_as: str) -> None:
    inner = {name: nn.Linear(3, 3) for name in ("a", "b")}
    model = nn.ModuleDict({name: WRAPPED[saved_as](module) for name, module in inner.items()})
    optimizer = _stepped(model, AdamW(model.parameters()))
    save_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[optimizer], metadata={})
    assert set(load_full_state_dict(tmp_path / "a.ckpt")) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    for wrap in WRAPPED.values():
        other = nn.ModuleDict({name: wrap(nn.Linear(3, 3)) for name in ("a", "b")})
        fresh = AdamW(other.parameters())
        load_checkpoint(tmp_path / "a.ckpt", model=other, optimizers=[fresh])
        assert _same(other, model)
        assert len(fresh.state) == 4
    whole = torch.compile(_net(), backend="eager")
    load_checkpoint(tmp_path / "a.ckpt", model=whole)
    assert _same(whole, model)


def _tied(path: Path) -> bool:
    """Saved tied and sharded, loaded tied."""
    model, optimizers = build(Layout("dp2", shard=2), tied=True)
    train(model, optimizers, [0])
    save_checkpoint(path, model=model, optimizers=optimizers, metadata={})
    other, fresh = build(Layout("dp2", shard=2), tied=True, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unused parameters
        load_checkpoint(path, model=other, optimizers=fresh)
    assert_same(whole_state(other, fresh), whole_state(model, optimizers))
    return other.head.weight is other.embed.weight


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    assert run_ranks(2, _tied, tmp_path / "tied.ckpt") == [True, True]
    assert b"head.weight" not in (tmp_path / "tied.ckpt" / ".metadata").read_bytes()
    whole = load_full_state_dict(tmp_path / "tied.ckpt")
    assert whole["head.weight"] is whole["embed.weight"]
    untied, _ = build(Layout("one"), seed=2)
    load_checkpoint(tmp_path / "tied.ckpt", model=untied)
    assert torch.equal(untied.head.weight, whole["embed.weight"])
    assert torch.equal(untied.embed.weight, whole["embed.weight"])
    save_checkpoint(tmp_path / "untied.ckpt", model=untied, metadata={})
    tied, _ = build(Layout("one"), tied=True, seed=3)
    load_checkpoint(tmp_path / "untied.ckpt", model=tied)
    assert torch.equal(tied.head.weight, whole["embed.weight"])


class _Stage(nn.Module):
    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        if first:
            self.embed = nn.Embedding(5, 4)
        if last:
            self.head = nn.Linear(4, 5, bias=False)


def _tied_over_stages(path: Path) -> bool:
    """The first stage has the embedding, the last the head; they are one tensor of the model."""
    rank = dist.get_rank()
    stage = _Stage(rank == 0, rank == 1)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.copy_(torch.arange(20.0).reshape(5, 4))
    aliases = {"head.weight": "embed.weight"}
    optimizer = _stepped(stage, AdamW(stage.parameters(), lr=0.1))
    save_checkpoint(path, model=stage, optimizers=[optimizer], metadata={}, aliases=aliases)
    other = _Stage(rank == 0, rank == 1)
    fresh = AdamW(other.parameters())
    load_checkpoint(path, model=other, optimizers=[fresh], aliases=aliases)
    (parameter,) = other.parameters()
    return _same(other, stage) and fresh.state[parameter]["step"] == 1 and fresh.param_groups[0]["lr"] == 0.1


def test_tied_over_stages(tmp_path: Path) -> None:
    assert run_ranks(2, _tied_over_stages, tmp_path / "a.ckpt") == [True, True]
    whole = _Stage(True, True)
    whole.head.weight = whole.embed.weight
    optimizer = AdamW(whole.parameters())
    load_checkpoint(tmp_path / "a.ckpt", model=whole, optimizers=[optimizer])
    assert optimizer.state[whole.embed.weight]["step"] == 1
    assert set(load_full_state_dict(tmp_path / "a.ckpt")) == {"embed.weight", "head.weight"}


# --- entries that are not the module's own tensors


class _WithExtras(nn.Linear):
    """An extra state, and an entry that a hook adds and another takes out."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.note: Any = None
        self.scale = 1.0
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _add(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}scale"] = torch.tensor(module.scale)

    @staticmethod
    def _take(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}scale" in state:
            module.scale = state.pop(f"{prefix}scale").item()

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def test_extra_state_and_hooks(tmp_path: Path) -> None:
    model = nn.ModuleDict({"x": _WithExtras()})
    model["x"].note, model["x"].scale = {"amax": torch.arange(3.0), "kind": "fp8"}, 2.5
    save_checkpoint(tmp_path / "a.ckpt", model=model, metadata={})
    other = nn.ModuleDict({"x": torch.compile(_WithExtras(), backend="eager")})
    load_checkpoint(tmp_path / "a.ckpt", model=other)
    assert other["x"].note["kind"] == "fp8"
    assert other["x"].note["amax"].tolist() == [0, 1, 2]
    assert other["x"].scale == 2.5
    assert _same(other, model)
    model["x"].note = len
    with pytest.raises(
        CheckpointError, match=r"without pickle: x._extra_state \(a builtins.builtin_function"
    ):
        save_checkpoint(tmp_path / "a.ckpt", model=model, metadata={})


# --- optimizers


def test_parameters_without_a_gradient(tmp_path: Path) -> None:
    """One never had a gradient, one is frozen after a step, one is unfrozen later: moments are kept, none demanded."""
    model = _net(c=nn.Linear(3, 3))
    model["c"].requires_grad_(False)
    optimizer = AdamW(model.parameters())
    _stepped(model, optimizer, only="a")
    model["a"].requires_grad_(False)
    save_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[optimizer], metadata={})
    other = _net(c=nn.Linear(3, 3))
    other["a"].requires_grad_(False)
    fresh = AdamW(other.parameters())
    with pytest.warns(
        UserWarning, match=r"no optimizer state for 4 parameters.*: b.bias, b.weight, c.bias, c.weight"
    ):
        load_checkpoint(tmp_path / "a.ckpt", model=other, optimizers=[fresh])
    assert {id(p) for p in fresh.state} == {id(p) for p in other["a"].parameters()}
    assert torch.equal(
        fresh.state[other["a"].weight]["exp_avg"], optimizer.state[model["a"].weight]["exp_avg"]
    )
    other["c"].requires_grad_(True)
    _stepped(other, fresh)


def test_state_that_the_file_does_not_have_is_dropped(tmp_path: Path) -> None:
    model = _net()
    optimizer = AdamW(model.parameters())
    save_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[optimizer], metadata={})
    _stepped(model, optimizer)
    load_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[optimizer])
    assert len(optimizer.state) == 0


def test_weights_only(tmp_path: Path) -> None:
    model = _net()
    save_checkpoint(tmp_path / "a.ckpt", model=model, metadata={})
    load_checkpoint(tmp_path / "a.ckpt", model=_net())
    with pytest.raises(CheckpointError, match="it holds weights only"):
        load_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[SGD(model.parameters(), lr=1)])


def test_model_of_a_full_checkpoint_without_its_optimizer(tmp_path: Path) -> None:
    model = _net()
    optimizer = _stepped(model, AdamW(model.parameters()))
    save_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[optimizer], metadata={})
    other = _net()
    load_checkpoint(tmp_path / "a.ckpt", model=other)
    assert _same(other, model)


def test_parameters_that_moved_between_optimizers(tmp_path: Path) -> None:
    model = _net()
    saved = AdamW(model["a"].parameters())
    save_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[_stepped(model, saved)], metadata={})
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[AdamW(model["b"].parameters())])
    assert "Parameters that the checkpoint's optimizer does not hold (2): b.bias, b.weight." in str(
        error.value
    )
    assert "Parameters that only the checkpoint's optimizer holds (2): a.bias, a.weight." in str(error.value)


def test_groups_that_were_joined(tmp_path: Path) -> None:
    model = _net()
    groups = [{"params": model["a"].parameters(), "lr": 0.1}, {"params": model["b"].parameters(), "lr": 0.2}]
    save_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[SGD(groups)], metadata={})
    with pytest.raises(
        CheckpointError, match="parameters of several groups of the checkpoint, whose lr differ"
    ):
        load_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[SGD(model.parameters(), lr=0)])


def test_foreign_parameters(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds 2 parameters that the model does not have"):
        save_checkpoint(
            tmp_path / "a.ckpt",
            model=_net(),
            optimizers=[SGD(nn.Linear(2, 2).parameters(), lr=1)],
            metadata={},
        )


def test_order_and_names_of_groups_do_not_matter(tmp_path: Path) -> None:
    model = _net()
    named = AdamW(
        [
            {"params": list(model["a"].named_parameters("a")), "lr": 0.1},
            {"params": list(model["b"].named_parameters("b"))},
        ]
    )
    save_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[_stepped(model, named)], metadata={})
    fresh = AdamW([{"params": model["b"].parameters(), "lr": 1.0}, {"params": model["a"].parameters()}])
    load_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[fresh])
    assert [group["lr"] for group in fresh.param_groups] == [0.001, 0.1]


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(tmp_path: Path) -> None:
    model = _net()
    rate = torch.tensor(0.125)
    optimizer = Adam(model.parameters(), lr=rate, capturable=False, foreach=False)
    save_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[_stepped(model, optimizer)], metadata={})
    rate.fill_(9)
    load_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[optimizer])
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.125
    plain = Adam(model.parameters(), lr=1.0)
    load_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[plain])
    assert plain.param_groups[0]["lr"] == 0.125


class _Nested(SGD):
    """State in a dict of a dict, an int, and None, as Shampoo and others have."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                value = {"blocks": {0: {"l": torch.eye(2), "r": torch.ones(3)}}, "count": 3, "none": None}
                self.state[parameter] = value


def test_other_state(tmp_path: Path) -> None:
    for kind in (_Nested, Adagrad, torch.optim.Adafactor, torch.optim.RAdam, torch.optim.RMSprop):
        model = _net()
        optimizer = _stepped(model, kind(model.parameters(), lr=0.1))
        save_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[optimizer], metadata={})
        fresh = kind(model.parameters(), lr=0.1)
        load_checkpoint(tmp_path / "a.ckpt", model=model, optimizers=[fresh])
        torch.testing.assert_close(fresh.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


# --- more than one rank


def _buffers_and_plain_parameters(path: Path) -> bool:
    """FSDP leaves what it is told to ignore alone; both kinds are one copy in the file."""
    model = _net()
    model.register_buffer("count", torch.ones(()))
    fully_shard(model["a"], mesh=init_device_mesh("cpu", (2,)))
    optimizer = _stepped(model, AdamW(model.parameters(), foreach=False))
    save_checkpoint(path, model=model, optimizers=[optimizer], metadata={"rank": dist.get_rank()})
    return load_checkpoint(path, model=model, optimizers=[optimizer]) == {"rank": 0}


def test_the_first_ranks_metadata_is_everybodys(tmp_path: Path) -> None:
    assert run_ranks(2, _buffers_and_plain_parameters, tmp_path / "a.ckpt") == [True, True]
    sizes = [file.stat().st_size for file in (tmp_path / "a.ckpt").glob("*.distcp")]
    assert len(sizes) == 2
    assert max(sizes) < 3 * min(sizes)  # what both ranks hold is shared out
