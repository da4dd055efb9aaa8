"""Drop-in recurrent layers: `torch.nn`'s RNN, GRU and LSTM, computed by fused kernels and scans."""

from __future__ import annotations

from torch import nn

from .cells import CELLS
from .recurrent import Recurrent


class RNN(Recurrent, nn.RNN):
    """`torch.nn.RNN`, ``h_t = tanh(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)`` or ReLU, by fused kernels and scans.

    Takes `torch.nn.RNN`'s arguments, and its state_dict, either way. In float32 and float64, on the CPU and on CUDA
    devices, there with at most 128 elements of a state.

    Parameters
    ----------
    *args, **options
        As `torch.nn.RNN` takes them.
    schedule : Schedule or str
        How the gradients of the hidden states are found. ``sequential``, or ``linear`` as of a chain: step after step.
        ``chunked`` or ``chunked:STEPS``: in chunks, composed one after the other. ``blelloch`` or ``blelloch:LEVELS``:
        by products of single steps, which are full matrices; ``planned``: by products as sparse as the recurrent
        weights are pruned. ``relaxed`` or ``relaxed:STEPS``: in chunks from guessed gradients at their boundaries,
        again from the neighbours' results until they agree. A `jacsparse.schedule.Schedule` of one stage more than
        there are steps is solved as its name says, or by its products of single steps. ``auto`` chooses, and says in
        `reports` what and why; on the CPU it leaves few steps, large states or batches, and most LSTMs in float32 to
        PyTorch's own kernels, forward too.
    forward : {"auto", "sequential", "parallel", "relaxed", "newton"}
        How the hidden states are found: step after step, or in chunks from guessed states, whose steps may follow the
        name as in `schedule`. ``parallel`` begins relaxed and, on the CPU, changes to Newton's method (multiple
        shooting) when that does not converge; what still does not is finished step after step. Where chunks meet,
        states fit to within 8 units in the last place of the largest one there, or of their own; where a network
        forgets nothing, these add up, as its roundings do. ``auto`` is step after step on the CPU; on a GPU it chooses,
        and says in `reports` what and why.
    chunk : int
        Steps of a chunk, forward and, where `schedule` does not say, backward.
    process_group : ProcessGroup, optional
        Ranks that have consecutive parts of the sequences: each passes its steps, perhaps none, and gets theirs back,
        and the whole sequences' last states. The first states are read where the sequences begin. Where one rank goes
        backward, all have to: gradients are those of the sum of all ranks' losses, so that a loss of the last state,
        which each rank computes alike, counts once for each rank. Those of weights, and of first states, are each
        rank's share. DistributedDataParallel over all ranks averages them: gradients are those of the mean of all
        ranks' losses. Without it `jacsparse.distributed.sum_gradients` makes weights' gradients whole.
    exchange : {"auto", "linear", "gather", "scan"}
        How gradients get across ranks. ``linear``: from rank to rank, each of which waits for the one behind it.
        ``gather``, ``scan``: each rank first reduces its steps to one affine map of gradients, and the maps are
        exchanged in one round, or in ⌈log2 p⌉ rounds for p ranks. ``auto`` is the one that is predicted to take the
        least time.

    Attributes
    ----------
    reports : list of Report
        How the recurrences of the last pass were solved: the methods, the sweeps and what was left at the boundaries.
        On a CUDA device, asking for them waits for it.
    boundaries : list of Tensor
        After a parallel forward pass the states at the chunks' boundaries, by layer and direction: passed as ``warm``
        to a pass over the same samples, they are where guessing begins.

    Raises
    ------
    TypeError, ValueError
        Where an argument is unknown, or asks for projections.

    Notes
    -----
    Which schedule is for what: ``sequential`` is the fastest on a CPU wherever there are as many samples as cores. On
    two cores of an Intel Xeon (16 samples, 20 elements, a loss of every step), ``chunked`` takes 4 times as long for
    1,000 and for 10,000 steps, ``blelloch`` 57 and 94 times: they multiply matrices where ``sequential`` multiplies
    vectors. ``relaxed`` pays for long sequences of fewer samples than there are cores, and on a GPU, as ``chunked``
    does there for few, small states that are not forgotten. ``blelloch`` and ``planned`` are the thesis's scans, to be
    studied.

    Thesis, equation 4.2; Naumov, sections 3.3 and 3.4, for the chunks. Gradients of gradients go step after
    step on the CPU; on a CUDA device and across ranks they raise an error, but where ``auto`` leaves an RNN or a GRU to
    PyTorch.

    What takes the place of a weight, as by spectral or weight normalisation, pruning or any parametrisation, is made as
    often in each pass as `torch.nn`'s layer makes it. That is several times for most parametrisations, and a spectral
    norm takes a step of its power iteration each time. By ``auto`` such weights stay with this library's kernels.

    A CUDA device is never waited for, so what settles is decided there: after four sweeps, or eight of Newton's
    iterations, samples whose chunks do not fit are finished step after step.

    Examples
    --------
    >>> import torch
    >>> rnn = RNN(3, 20)
    >>> output, last = rnn(torch.randn(1000, 16, 3))
    >>> output.shape, last.shape
    (torch.Size([1000, 16, 20]), torch.Size([1, 16, 20]))
    >>> output.sum().backward()
    >>> [report.methods for report in rnn.reports]
    [['sequential'], ['sequential']]

    Across ranks, of which ``torchrun`` starts several, the loss says how gradients are made whole:

    >>> import tempfile
    >>> import torch.distributed as dist
    >>> from jacsparse.distributed import sum_gradients
    >>> store = "file://" + tempfile.mkdtemp() + "/store"
    >>> dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    >>> rnn = RNN(3, 20, process_group=dist.group.WORLD)
    >>> output, last = rnn(torch.randn(7, 16, 3))                # of this rank's steps
    >>> output.square().mean().backward()                        # a loss of its own: the sum of all counts
    >>> sum_gradients(rnn, dist.group.WORLD, loss="each")
    >>> rnn.zero_grad()
    >>> output, last = rnn(torch.randn(7, 16, 3))
    >>> last.square().mean().backward()                          # the same loss on each rank: it counts once
    >>> sum_gradients(rnn, dist.group.WORLD, loss="same")
    >>> averaged = nn.parallel.DistributedDataParallel(rnn)      # the mean of all losses, without another call
    >>> averaged(torch.randn(7, 16, 3))[1].square().mean().backward()
    >>> dist.destroy_process_group()
    """


class GRU(Recurrent, nn.GRU):
    """`torch.nn.GRU` (thesis, equations 4.3 and 4.4), with the arguments and attributes that `RNN` adds.

    ``schedule``, ``forward``, ``chunk``, ``process_group``, ``exchange``, `reports` and `boundaries` are as of `RNN`.

    Examples
    --------
    >>> import torch
    >>> gru = GRU(3, 20, forward="parallel")
    >>> output, last = gru(torch.randn(1000, 2, 3))
    >>> gru.reports[0].methods, gru.reports[0].sweeps
    (['relaxed'], 2)
    """

    cell = CELLS["GRU"]


class LSTM(Recurrent, nn.LSTM):
    """`torch.nn.LSTM` without projections, with the arguments and attributes that `RNN` adds.

    ``schedule``, ``forward``, ``chunk``, ``process_group``, ``exchange``, `reports` and `boundaries` are as of `RNN`.

    Examples
    --------
    >>> import torch
    >>> lstm = LSTM(3, 20, num_layers=2, bidirectional=True)
    >>> output, (h, c) = lstm(torch.randn(7, 2, 3))
    >>> output.shape, c.shape
    (torch.Size([7, 2, 40]), torch.Size([4, 2, 20]))
    """

    cell = CELLS["LSTM"]
