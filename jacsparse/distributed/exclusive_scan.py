"""Exclusive scans across ranks: `torch.distributed` has none, and its messages are no part of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..affine import AffineMaps
from ..patterns import requiring_gradient
from ..schedule import Message, check_exchange, exchanges, taken_in
from .elements import ElementMessages, kind_of, tensors_of, with_tensors
from .ranks import Ranks, described, ranks_of

Combine = Callable[[Any, Any], Any]


def exclusive_scan(
    transfer: Any,
    combine: Combine,
    group: dist.ProcessGroup | None = None,
    *,
    initial: Any = None,
    reverse: bool = False,
    exchange: str = "auto",
) -> Any:
    """Combine the elements of all ranks before this one, differentiably.

    Parameters
    ----------
    transfer : Tensor, tuple or list of Tensor, or AffineMaps
        This rank's element, of at most 8 tensors. All ranks have the same kind of element; shapes and sparse patterns
        may differ, as far as `combine` takes them. Affine maps are those of `jacsparse.affine`: `DenseMaps`,
        `DiagonalMaps`, `SparseMaps`.
    combine : callable
        ``combine(earlier, later)``, associative and differentiable; `jacsparse.affine.compose` for affine maps. Where
        it reads weights that require a gradient, elements have to require one; each rank gets its share of it.
    group : ProcessGroup, optional
        The ranks; all of them call this function. By default all processes.
    initial : as `transfer`, optional
        What comes before the first rank; only the first one's values are read. By default nothing does: the first
        rank's result is the identity for affine maps, and zeros for tensors.
    reverse : bool
        Whether the last rank is the first one of the scan.
    exchange : {"auto", "scan", "gather", "linear"}
        The messages, as `jacsparse.schedule.exchanges` has them: ``scan`` takes ⌈log2 p⌉ rounds for p ranks, ``gather``
        one round, in which the last rank gets p - 1. ``auto`` is ``scan``: no other has fewer messages in a row.

    Returns
    -------
    as `transfer`
        ``initial ∘ x_0 ∘ … ∘ x_{r-1}`` on rank r.

    Raises
    ------
    TypeError, ValueError
        Where an argument is none of these.
    RankError
        Where ranks have different kinds of elements, or one fails or does not answer in the group's time.

    Notes
    -----
    A backward pass takes the same messages in reverse. Where one rank's element or the first one's `initial` requires a
    gradient, so does each rank's result, and each rank's backward pass has to reach it, also the first one's: add
    ``0 * result.sum()`` to a loss that does not use it. The gradients are those of the sum of all ranks' losses.
    Gradients of gradients raise an error.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> exclusive_scan(torch.tensor([2.0]), torch.add, initial=torch.tensor([5.0]))
    tensor([5.])
    >>> dist.destroy_process_group()
    """
    check_exchange(exchange)
    tensors, ranks, kind = tensors_of(transfer), ranks_of(group), kind_of(transfer)
    described(tensors)
    if initial is not None and kind_of(initial) != kind:
        raise TypeError(f"initial is a {kind_of(initial)}; expected what the element is: {kind}")
    is_first = ranks.rank == (ranks.size - 1 if reverse else 0)
    inputs = tensors if initial is None or not is_first else [*tensors, *tensors_of(initial)]
    facts = {"element": kind, "gradients": torch.is_grad_enabled(), "reverse": reverse}
    requires_grad = ranks.check(
        "start of the exclusive scan", {**facts, "exchange": exchange}, any(tensor.requires_grad for tensor in inputs)
    )
    if any(differentiated for (differentiated,) in requires_grad):
        # Every rank takes part in the backward pass, also where nothing of its own has a gradient.
        transfer = with_tensors(
            transfer, [requiring_gradient(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]
        )
    way = "scan" if exchange == "auto" else exchange
    scan = RankScan(ranks, combine, way, "exclusive scan", reverse=reverse)
    if not is_first:
        return scan(transfer)
    if initial is not None:
        return scan(scan.combined(initial, transfer), initial)
    first = transfer.identity() if isinstance(transfer, AffineMaps) else _zeros(transfer)
    return scan(transfer, first)


class RankScan:
    """An exclusive scan across ranks, as one of them takes part in it.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    combine : callable
        ``combine(earlier, later)`` of two elements.
    way : {"scan", "gather", "linear"}
        As `jacsparse.schedule.exchanges` takes it.
    phase : str
        What this is, as messages name it.
    reverse : bool
        Whether the last rank is the first one of the scan.
    """

    def __init__(self, ranks: Ranks, combine: Combine, way: str, phase: str, *, reverse: bool = False) -> None:
        self._ranks, self._combine, self._phase, self._reverse = ranks, combine, phase, reverse
        self._place = self._mirrored(ranks.rank)
        self._rounds = exchanges(ranks.size, way)
        self._number = ranks.next_number()

    @property
    def is_first(self) -> bool:
        """Whether nothing comes before this rank."""
        return self._place == 0

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after this rank, so that its element is not used."""
        return self._place == self._ranks.size - 1

    def _mirrored(self, rank: int) -> int:
        """The place of a rank in the scan, or the rank at a place."""
        return self._ranks.size - 1 - rank if self._reverse else rank

    def combined(self, earlier: Any, later: Any) -> Any:
        """Two elements combined; the other ranks are told where that fails."""
        with self._ranks.during(self._phase):
            result = self._combine(earlier, later)
            _check_combined(result, earlier, later)
        return result

    def __call__(self, element: Any, first: Any = None) -> Any:
        """What comes before this rank: the combination of all lower ranks' elements, or `first` on the first one."""
        before, block = None, element
        for number, messages in enumerate(self._rounds):
            received = [message for message in messages if message.target == self._place]
            others, block = self._exchanged(number, messages, [source for source, *_ in received], block)
            before, block = taken_in(received, others, before, block, self.combined)
        self._ranks.flush()
        return _tied(first if before is None else before, block)

    def _exchanged(
        self, number: int, messages: Sequence[Message], sources: Sequence[int], block: Any
    ) -> tuple[list[Any], Any]:
        """What this rank receives in a round, and its own block, through which gradients come back."""
        targets = [self._mirrored(target) for source, target, _ in messages if source == self._place]
        if not targets and not sources:
            return [], block
        phase = f"{self._phase}, round {number + 1}"
        pairs = _Partners(ElementMessages(self._ranks), targets, [*map(self._mirrored, sources)], phase, self._number)
        shapes: list[Any] = []
        tensors = list(_Exchange.apply(pairs, shapes, block, *tensors_of(block)))
        others = [with_tensors(shape, [tensors.pop(0) for _ in tensors_of(shape)]) for shape in shapes]
        return others, with_tensors(block, tensors)


def _check_combined(result: Any, *elements: Any) -> None:
    """TypeError or ValueError where a combination is of another kind than its elements, or a gradient would be lost."""
    kind = kind_of(elements[0])
    if kind_of(result) != kind:
        raise TypeError(f"combine returned a {kind_of(result)}; expected what the elements are: {kind}")
    before, after = (
        any(tensor.requires_grad for each in group for tensor in tensors_of(each)) for group in (elements, [result])
    )
    if after and not before:
        raise ValueError(
            "combine reads a tensor that requires a gradient, and no element requires one; call requires_grad_() on "
            "the elements, so that gradients go from rank to rank"
        )


class _Partners(NamedTuple):
    """With whom a rank exchanges elements in a round."""

    messages: ElementMessages
    targets: list[int]
    sources: list[int]
    phase: str
    number: int


def in_turns(
    rank: int,
    targets: Sequence[int],
    sources: Sequence[int],
    send: Callable[[int], None],
    receive: Callable[[int], Any],
) -> list[Any]:
    """What a rank receives from others, to some of which it sends.

    Of two ranks that send to each other the lower sends first: with NCCL both sends could wait for each other.
    """
    last = [target for target in targets if target in sources and target < rank]
    for target in targets:
        if target not in last:
            send(target)
    received = [receive(source) for source in sources]
    for target in last:
        send(target)
    return received


class _Exchange(torch.autograd.Function):
    """Send a block to some ranks and receive those of others; back, send gradients to those, and add up the block's."""

    @staticmethod
    def forward(ctx: Any, partners: _Partners, shapes: list[Any], block: Any, *tensors: torch.Tensor) -> Any:
        messages, targets, sources, phase, number = partners
        # The list is filled for the caller, since a Function returns tensors alone.
        shapes += in_turns(
            messages.ranks.rank,
            targets,
            sources,
            lambda target: messages.send(block, target, phase, number),
            lambda source: messages.receive(block, source, phase, number),
        )
        ctx.partners, ctx.counts = partners, [len(tensors_of(shape)) for shape in shapes]
        return (*(tensor for shape in shapes for tensor in tensors_of(shape)), *tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        messages, targets, sources, phase, number = ctx.partners
        ranks, rest, phase = messages.ranks, list(gradients), f"backward pass of the {phase}"
        of_others = {
            source: [rest.pop(0) for _ in range(count)] for source, count in zip(sources, ctx.counts, strict=True)
        }
        for received in in_turns(
            ranks.rank,
            sources,
            targets,
            lambda source: ranks.send(of_others[source], source, phase, number),
            lambda target: ranks.expect(target, phase).message(number)[0],
        ):
            rest = [gradient + other.to(gradient.device) for gradient, other in zip(rest, received, strict=True)]
        ranks.flush()
        return (None, None, None, *rest)


class _Tie(torch.autograd.Function):
    """Some tensors as they are, for whose gradients autograd goes through others as well."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> Any:
        ctx.others = len(tensors) - count
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, *gradients, *[None] * ctx.others)


def _tied(element: Any, block: Any) -> Any:
    """An element whose backward pass goes through all rounds in which this rank has sent something."""
    if element is None:
        return None
    tensors = tensors_of(element)
    return with_tensors(element, _Tie.apply(len(tensors), *tensors, *tensors_of(block)))


def _zeros(element: Any) -> Any:
    return with_tensors(element, [torch.zeros_like(tensor) for tensor in tensors_of(element)])
