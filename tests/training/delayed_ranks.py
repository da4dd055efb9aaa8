"""What ranks run in the tests of delayed gradients."""

import functools
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from jacsparse.__main__ import main
from jacsparse.distributed import RankError
from jacsparse.training import DelayedGradients
from tests.distributed.launch import impatient_group

from .test_delayed_gradients import ADAM, SGD, assert_equal_states, batches, convolutional, images, model_of

#: Arguments of ``jacsparse train``.
LENET = "lenet5 --backward ddg --modules 2 --epochs 2 --prune 0.5 --retrain-epochs 2 --batch 256 --seed 1"


def trainer(modules, optimizer, build, group=None, recompute=False):
    torch.manual_seed(3)
    return DelayedGradients(build(), modules=modules, optimizer=optimizer, process_group=group, recompute=recompute)


def equal():
    """For each number of modules, a group of ranks against all modules in this process; and resumed half-way."""
    for modules in range(1, dist.get_world_size() + 1):
        group = dist.new_group(list(range(modules)))
        if dist.get_rank() >= modules:
            continue
        # Of the first, half are more than are under way at once: 2 · modules - 2.
        for build, data in ((model_of, batches(4 * modules)), (convolutional, images(max(4, 2 * modules)))):
            for optimizer in (SGD, ADAM):
                compare(modules, optimizer, build, data, group)
    dist.barrier()


def compare(modules, optimizer, build, data, group):
    here, ranks = trainer(modules, optimizer, build), trainer(modules, optimizer, build, group)
    half = len(data) // 2
    for number, (x, y) in enumerate(data):
        if number == half // 2:
            ranks.synchronize()
        if number == half:
            state = here.state_dict()
            assert_equal_states(ranks.state_dict(), state)
            ranks = trainer(modules, optimizer, build, group, recompute=True)
            ranks.load_state_dict(state)
        torch.manual_seed(number)
        expected = here.step(x, y)
        torch.manual_seed(number)
        loss = ranks.step(x, y)
        last = dist.get_rank() == modules - 1
        assert torch.equal(loss, expected) if last else loss is None
    assert_equal_states(ranks.state_dict(), here.state_dict())
    receiver = modules // 2
    assert_equal_states(ranks.state_dict(to=receiver), here.state_dict() if dist.get_rank() == receiver else {})
    ranks.synchronize()
    assert_equal_states(dict(ranks.model.state_dict()), dict(here.model.state_dict()))


def fault(kind, rank):
    """Training in which one rank fails at iteration 4."""
    group = impatient_group(kind)
    ddg = trainer(dist.get_world_size(), SGD, model_of, group)
    for number, (x, y) in enumerate(batches(1000)):
        if dist.get_rank() == rank and number == 4:
            if kind == "exception":
                ddg.partition[rank][0].register_forward_hook(_fail)
            elif kind == "batch":
                x, y = batches(6)[5]
            elif kind == "more":
                ddg.synchronize()
            else:
                os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        ddg.step(x, y)


def _fail(*_):
    raise ArithmeticError("made to fail")


def measured():
    """Costs that each rank measures differently; the first one's cut is that of all."""
    ddg = DelayedGradients(
        model_of(), modules=2, optimizer=SGD, process_group=dist.group.WORLD, example=batches(1)[0][0]
    )
    for x, y in batches(3):
        ddg.step(x, y)


def differ():
    """Three ways in which rank 1 does not start like the others; all ranks print the errors."""
    other = dist.get_rank() == 1
    for build, modules in (
        (functools.partial(model_of, layers=5 if other else 6), 3),
        (functools.partial(model_of, dtype=torch.float32 if other else torch.float64), 3),
        (model_of, [4, 9] if other else 3),
    ):
        try:
            trainer(modules, SGD, build, dist.group.WORLD)
        except RankError as error:
            print(f"RankError: {error}")
    dist.barrier()


def alone():
    """Fewer ranks than modules."""
    trainer(3, SGD, model_of, dist.group.WORLD)


def train_lenet(path, *options):
    """A training from the command line, in this process."""
    sys.argv[1:] = ["train", *LENET.split(), "--out", path, *options]
    main()


def store_of_the_first():
    """The rank that has the store, as where there is no launcher, is killed."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ports = [store.port]
    dist.broadcast_object_list(ports)
    os.environ["MASTER_PORT"] = str(ports[0])
    fault("kill", 0)


def absent(rank):
    """A rank that does not begin the training."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    if dist.get_rank() != rank:
        trainer(dist.get_world_size(), SGD, model_of, group)
