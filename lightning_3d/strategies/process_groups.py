# SPDX-License-Identifier: Apache-2.0
"""The part of a strategy that launches ranks and talks between them; knows nothing of models."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_3d.compat_lightning import (
    init_process_group,
    make_script_launcher,
    on_loop_decisions,
    set_logged_rank,
)
from lightning_3d.errors import CheckpointError, StepError
from lightning_3d.mesh import ParallelMesh
from lightning_3d.parallel.trail import Trail
from lightning_3d.plan import ParallelPlan
from lightning_3d.strategies.even_batches import EvenBatches
from lightning_3d.strategies.monitored import MonitoredLog
from lightning_3d.strategies.failure import FailureWatch, end_process
from lightning_3d.strategies.launching import check_launch, check_same_plan, ending_with_parent
from lightning_3d.strategies.same_run import check_same_run
from lightning_3d.strategies.shared_randomness import seed_workers
from lightning_3d.strategies.signals import stop_together

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")

_FAILING_WAIT_S = 5.0
"""How long a rank that fails waits for the others before a checkpoint that it wants to save on the way out."""


class MeshedStrategy(ParallelStrategy):
    """Launches one rank a device, resolves the plan before that, and reduces over data-parallel replicas."""

    is_distributed = True

    def __init__(
        self,
        plan: ParallelPlan,
        *,
        strict_topology: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        cluster_environment: ClusterEnvironment | None = None,
        parallel_devices: list[torch.device] | None = None,
    ) -> None:
        super().__init__(cluster_environment=cluster_environment, parallel_devices=parallel_devices)
        self.plan = self._asked = plan
        self.num_nodes = 1
        self._strict_topology = strict_topology
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._mesh: ParallelMesh | None = None
        self._watch: FailureWatch | None = None
        self.even_batches: EvenBatches | None = None
        self.monitored: MonitoredLog | None = None

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh; exists once the processes have met.

        Raises:
            RuntimeError: it is asked for before.
        """
        if self._mesh is None:
            raise RuntimeError(
                "The mesh exists once the Trainer has started its processes: use it in setup() or later."
            )
        return self._mesh

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks of this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a model replica read the same samples."""
        return {"num_replicas": self.mesh.dp_size, "rank": self.mesh.dp_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_launch(self.cluster_environment, self.num_processes, self.num_nodes)
        alone = self.num_nodes * self.num_processes == 1
        if not self.cluster_environment.creates_processes_externally and not alone:
            self._launcher = make_script_launcher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        # The world is known here, and nothing runs yet: a plan that does not fit ends now.
        world_size = self.num_nodes * self.num_processes
        self._asked = self.fill_axis(self._asked, world_size, self.num_processes)
        self.plan = self._asked.resolve(world_size, self.num_processes)
        self.topology_warnings = self.plan.check_cluster(self.num_processes, strict=self._strict_topology)

    def fill_axis(self, plan: ParallelPlan, world_size: int, ranks_per_node: int) -> ParallelPlan:
        """Hook for strategies whose own axis takes the world when it is `auto`."""
        return plan

    def set_world_ranks(self) -> None:
        """Tells the cluster environment which rank this is."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        set_logged_rank(self.global_rank)

    def setup_environment(self) -> None:
        """Meets the other ranks, builds the mesh, and compares what ranks are told to do."""
        ParallelStrategy.setup_environment(self)  # not that of a subclass's other base, which meets ranks its own way
        if self._mesh is None:  # else a second fit or validate in the same processes
            with self._ending_with_launcher():
                self._meet_ranks()
        if self._watch is None and dist.get_world_size() > 1:
            assert self.cluster_environment is not None
            self._watch = FailureWatch(
                self.cluster_environment.main_address, self.mesh.describe_rank(), self.root_device
            )
        if self.lightning_module is not None:
            check_same_run(self.lightning_module.trainer)

    def _ending_with_launcher(self) -> AbstractContextManager[None]:
        """Rank 0 of a script starts the others, which wait for it."""
        if not isinstance(self.cluster_environment, LightningEnvironment) or self.local_rank == 0:
            return nullcontext()
        text = f"local rank {self.local_rank} ends because the process that started it is gone: rank 0 was killed."
        return ending_with_parent(lambda: end_process(text))

    def _meet_ranks(self) -> None:
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        device = self.root_device
        backend = self._process_group_backend or ("nccl" if device.type == "cuda" else "gloo")
        device_id = device if device.type == "cuda" else None
        init_process_group(self.cluster_environment, backend, timeout=self._timeout, device_id=device_id)
        check_same_plan(self.plan)
        self._mesh = ParallelMesh.create(self.plan, device.type)

    def stop_with_all_ranks(self, trainer: "pl.Trainer") -> None:
        """Makes signals, `trainer.should_stop` and clocks do the same on all ranks, or end them with an error."""
        if self._watch is not None:
            stop_together(trainer, self._watch, dist.broadcast)
            on_loop_decisions(
                trainer,
                stops=self._check_all_stop,
                validates=lambda due: self.reduce_boolean_decision(due, all=False),
            )

    def _check_all_stop(self) -> None:
        try:
            self.all_ranks_call("the stop that trainer.should_stop asks for")
        except CheckpointError as error:
            raise StepError(
                f"{self.mesh.describe_rank()} stops because trainer.should_stop is set, and another rank trains on. Set"
                " it on all ranks at the same time: trainer.should_stop ="
                " trainer.strategy.reduce_boolean_decision(stop, all=False)."
            ) from error

    def process_dataloader(self, dataloader: object) -> object:
        """Seeds workers by replica, and keeps replicas with fewer batches from stopping the others."""
        seed_workers(dataloader, self.mesh.dp_rank)
        return dataloader if self.even_batches is None else self.even_batches.adopt(dataloader)

    def begins(self, name: str) -> None:
        """Notes where this rank is, for those that wait for it."""
        if self._watch is not None:
            self._watch.enter(name)

    def follow_trail(self, trail: Trail | None) -> None:
        """Compares where the ranks of a data-parallel group are when one stands still. See [Note: ranks that part]."""
        if self._watch is not None and trail is not None:
            self._watch.follow(trail, sorted(dist.get_process_group_ranks(self.mesh.dp_group)))

    def all_ranks_call(self, name: str, failing: BaseException | None = None) -> bool:
        """Waits until every rank is about to make the same call; not long for a rank that is failing.

        Args:
            name: of the call.
            failing: the exception that ends the run here, if any.

        Returns:
            Whether all ranks came.

        Raises:
            CheckpointError: another rank went on without it.
        """
        if self._watch is None:
            return True
        alone = failing is not None and not isinstance(failing, SIGTERMException)
        return self._watch.meet(name, _FAILING_WAIT_S if alone else float("inf"))

    def end_alone(self, failing: BaseException) -> NoReturn:
        """Ends a failing rank before Lightning does, which would wait for the other ranks behind a checkpoint."""
        MeshedStrategy.on_exception(self, failing)
        MeshedStrategy.teardown(self)
        raise failing

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks, which would wait for this one. See [Note: how a failure travels]."""
        # All ranks end together after a SIGTERM.
        if self._watch is not None and not isinstance(exception, SIGTERMException):
            self._watch.report(exception)

    def teardown(self) -> None:
        """Waits for the ranks to finish; the processes stay for another run."""
        if self._watch is not None:
            self._watch.leave()
            self._watch = None
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """`empty_init` makes modules on the meta device: their values come when they are sharded, part by part."""
        with (
            torch.device("meta") if empty_init else nullcontext(),
            self.precision_plugin.tensor_init_context(),
        ):
            yield

    def model_to_device(self) -> None:
        """Moves what is not there yet to this rank's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Waits for every rank."""
        self.begins(f"barrier {name or ''}")
        if dist.is_initialized():
            device = self.root_device
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Sends an object of one rank to all."""
        if not dist.is_initialized():
            return obj
        self.begins("broadcast")
        payload = [obj]
        dist.broadcast_object_list(payload, src=src, device=self.root_device)
        return payload[0]

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduces a value over data-parallel replicas (ranks of one replica hold the same), or over `group`."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        self.begins("reduce")
        group = self.mesh.dp_group if group is None else group
        size = dist.get_world_size(group)
        mean = reduce_op is None or str(reduce_op).lower() in ("mean", "avg", "redoptype.avg")
        result = tensor.clone()
        if mean and not result.is_floating_point():
            result = result.float()
        dist.all_reduce(result, op=ReduceOp.SUM if mean else _operation(reduce_op), group=group)
        return result / size if mean else result

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks of the world (or any of them) decided so."""
        self.begins("a decision of all ranks")
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == dist.get_world_size() if all else int(votes) > 0

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers a tensor from every data-parallel replica, or from `group`: [*] -> [replicas, *]."""
        return super().all_gather(
            tensor, group=self.mesh.dp_group if group is None else group, sync_grads=sync_grads
        )


def _operation(reduce_op: ReduceOp | str | None) -> Any:
    return getattr(ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
