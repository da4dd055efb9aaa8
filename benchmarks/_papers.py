"""The papers, item by item: what each prints, and which row of which experiment stands beside it."""

from __future__ import annotations

from ._items import ON_A_CPU, Figure, Item

PAPERS = {
    "thesis": "Wang (2020): back-propagation by parallel scan (BPPSA), the thesis and its poster",
    "naumov": "Naumov (2017): parallel complexity of forward and backward propagation",
    "leapfrogging": "Saraiya (2018): leapfrogging for parallelism in deep neural networks",
    "ddg": "Huo et al. (2018): decoupled parallel backpropagation (delayed gradients, DDG)",
}

_DIGITS = "scikit-learn's digits for CIFAR-10"
_PER_SAMPLE = "each sample has reduced blocks of its own, where the paper counts one for all"

ITEMS: tuple[Item, ...] = (
    # The thesis and its poster.
    Item(
        "thesis", "sections 2.2 and 3.6", "GPipe: activations that a worker holds, over n/p + p",
        "Θ(L/K + K), Θ(n/p + p)",
        Figure("simulation", "Sections 2.2 and 3.6", "gpipe", "counted / (n/p + p)"), 1.0,
        why="the largest of 1 to 64 workers, with a micro-batch for each",
    ),
    Item(
        "thesis", "section 3.3", "VGG-11's first convolution, its Jacobian as a full matrix", "768 MB (MiB)",
        Figure("jacobian_generation", "convolution", "memory of the full matrix"), 768.0, "MiB",
    ),
    Item(
        "thesis", "section 3.3", "the same in CSR, values alone", "6.5 MB (MiB)",
        Figure("jacobian_generation", "convolution", "memory of the values"), 6.5, "MiB",
    ),
    *(
        Item(
            "thesis", f"Table 3.1, {name}", "sparsity of guaranteed zeros", f"{sparsity}",
            Figure("jacobian_generation", group, "sparsity"), sparsity,
        )
        for name, group, sparsity in (
            ("convolution", "convolution", 0.99157), ("ReLU", "ReLU", 0.99998), ("max-pooling", "max-pooling", 0.99994),
        )
    ),
    *(
        Item(
            "thesis", f"Table 3.1, {name}", "times as fast as autograd, column by column",
            f"{speed:,.0f}, Ryzen Threadripper 1950X",
            Figure("jacobian_generation", group, "values, kernel alone", "stacked / kernel"), speed, "", "in small",
            "another CPU; values alone, for the pattern is made once; autograd's time extrapolated from 200 columns",
        )
        for name, group, speed in (
            ("convolution", "convolution", 8.3e3), ("ReLU", "ReLU", 1.2e6), ("max-pooling", "max-pooling", 1.5e5),
        )
    ),
    Item(
        "thesis", "Table 3.1, max-pooling", "the same with all of autograd's columns, not stacked to a matrix",
        "150,000, Ryzen Threadripper 1950X",
        Figure("jacobian_generation", "max-pooling", "values, kernel alone", "all of grad() / kernel"), 1.5e5, "",
        "in small", "another CPU; values alone, for the pattern is made once",
    ),
    Item(
        "thesis", "Algorithms 2 to 4", "our Jacobian, pattern included: times as fast as the printed algorithms",
        "no value",
        Figure("jacobian_generation", "convolution", "pattern and values", "Algorithms 2 to 4 / from nothing"),
        why="the printed algorithms in NumPy, with their misprints mended",
    ),
    Item(
        "thesis", "Algorithm 1, Figure 3.4", "LeNet-5 by scan: largest difference of the losses, float64",
        "curves overlap",
        Figure("lenet_convergence", "float64", "largest difference of the losses, scan"), None, "", "in small",
        f"{_DIGITS}, 1,000 iterations for more than 8,000",
    ),
    Item(
        "thesis", "Figure 3.4", "the same in float32", "curves overlap",
        Figure("lenet_convergence", "float32", "largest difference of the losses, scan"), None, "", "in small",
        f"{_DIGITS}, 1,000 iterations for more than 8,000; another order of the samples alone moves losses as far, by "
        "rounding",
    ),
    Item(
        "thesis", "equation 3.3", "steps of a scan of 4,096 stages on as many workers, over log2 n", "Θ(log n)",
        Figure("simulation", "Section 3.6", "blelloch, n = 4,096", times=1 / 12),
    ),
    Item(
        "thesis", "equation 3.4", "steps of all workers, over n", "Θ(n)",
        Figure("simulation", "Section 3.6", "blelloch, n = 4,096", "all steps / n"),
    ),
    Item(
        "thesis", "section 3.6", "Jacobians that a worker of a scan holds, over max(n/p, 1)", "Θ(max(n/p, 1))",
        Figure("simulation", "Sections 2.2 and 3.6", "blelloch", "held / max(n/p, 1)"), 1.0,
        why="the largest of 1 to 4,096 workers",
    ),
    *(
        Item(
            "thesis", "Figure 5.1", f"RNN, T = 1,000, B = 16, by {name}: an iteration, times as fast as by torch.nn",
            "2.17, RTX 2070",
            Figure("recurrent_convergence", "RNN", "iteration by jacsparse", f"back-propagation / {layer}",
                   device="cuda"),
            2.17, "", "in small", "600 iterations for 100,000, with a learning rate of 3e-4 for 3e-5",
        )
        for name, layer in (("a scan over chunks", "jacsparse, scan chunked"),
                            ("a scan over steps", "jacsparse, scan blelloch"),
                            ("no scan, step after step", "jacsparse, sequential: step after step"))
    ),
    *(
        Item(
            "thesis", place, f"RNN: backward pass by {name}, loss on {loss}, times as fast as torch.nn's", published,
            Figure("rnn_sensitivity", group, label, f"torch.nn / {layer}", device=device), value, "", "in small",
            ON_A_CPU if device == "cpu" else "",
        )
        for place, group, published, value, losses in (
            ("section 5.1", "RNN, T = 1,000, B = 16", "4.53, RTX 2070", 4.53, ("the last state",)),
            ("Figure 5.2", "RNN", "at most 8.8, RTX 2080 Ti", 8.8, ("the last state", "every step")),
        )
        for loss, label in (("the last state", "backward pass, loss on the last state"),
                            ("every step", "backward pass, loss on every step")) if loss in losses
        for name, layer, device in (("a scan over chunks", "jacsparse chunked", "cuda"),
                                    ("a scan over steps", "jacsparse blelloch", "cpu"), ("auto", "jacsparse", "cuda"))
    ),
    Item(
        "thesis", "Figure 5.2", "RNN: training step, times as fast as torch.nn's", "at most 2.75, RTX 2080 Ti",
        Figure("rnn_sensitivity", "RNN", "training step", "torch.nn / jacsparse", device="cuda"), 2.75, "", "in small",
    ),
    *(
        Item(
            "thesis", "Figure 5.3", f"GRU on instruments, {name}: largest difference of the losses",
            "curves of one shape",
            Figure("recurrent_convergence", "GRU", f"largest difference of the losses, {layer}"), None, "", "in small",
            "made-up tones for IRMAS, 300 iterations with a learning rate of 3e-3 for 3e-5",
        )
        for name, layer in (("a scan over chunks", "jacsparse, scan chunked"),
                            ("a scan over steps", "jacsparse, scan blelloch"))
    ),
    *(
        Item(
            "thesis", "Figure 5.4", f"GRU: backward pass by {name}, times as fast as torch.nn's",
            "at most 13.45, a GPU, without the overhead FO",
            Figure("gru_breakdown", "set", "backward", f"torch.nn / {layer}", device="cuda"), 13.45, "", "in small",
        )
        for name, layer in (("a scan over chunks", "jacsparse chunked"), ("a scan over steps", "jacsparse blelloch"),
                            ("auto", "jacsparse"))
    ),
    Item(
        "thesis", "Figure 5.4", "GRU: training step, times as fast as torch.nn's",
        "at most 2.11, a GPU, without the overhead FO",
        Figure("gru_breakdown", "set", "step", "torch.nn / jacsparse", device="cuda"), 2.11, "", "in small",
        "with all overhead",
    ),
    *(
        Item(
            "thesis", "section 5.3, Figure 5.5",
            f"pruned VGG-11: critical path of the scan over back-propagation through the {network}, FLOP", published,
            Figure("flop_analysis", "What was counted", "blelloch:2, observed",
                   f"critical path / {structure} back-propagation"),
            None, "", "in small", f"{_DIGITS} as training data",
        )
        for network, structure, published in (
            ("unpruned network", "dense", "similar, by eye, step by step"),
            ("pruned network", "observed", "no value: the figure's baseline is the unpruned network's"),
        )
    ),
    *(
        Item(
            "thesis", "section 4.3", f"VGG-11, {network}: test accuracy", f"{accuracy} %, of validation samples",
            Figure("flop_analysis", "The network", f"test samples right, {phase}", times=100), accuracy, "%",
            "in small", f"{_DIGITS}, fewer epochs",
        )
        for network, phase, accuracy in (
            ("unpruned", "trained", 90.1), ("97 % pruned, after retraining", "retrained", 88.9),
        )
    ),
    Item(
        "thesis", "poster", "RNN of 16 units: n from which a scan on n workers is faster",
        "C_BPPSA / C_Baseline < Θ(n / log n)",
        Figure("simulation", "Poster", "16 hidden units"),
    ),
    # Naumov, who has no measurements.
    Item(
        "naumov", "equations 13 and 18", "approximate forward pass after a step of SGD: largest error, 3 iterations",
        "no measurement",
        Figure("triangular_solvers", "Approximate forward pass (equation 13)", "3 iterations"),
        why="16 layers of 64 units",
    ),
    Item(
        "naumov", "equations 23 and 25", "the same for a recurrent network: largest error, 3 iterations",
        "no measurement",
        Figure("triangular_solvers", "Approximate forward pass (equations 23 and 25)", "3 iterations"),
        why="2 layers of 16 units, 16 steps",
    ),
    *(
        Item(
            "naumov", place, f"64 layers of 16 units: substitution's time over that by {name}", "no measurement",
            Figure("triangular_solvers", "64 layers of 16 units, dense, batch 16", label, f"substitution / {label}"),
            why="on two cores, where substitution is the fastest; the others are for more workers than stages",
        )
        for place, name, label in (
            ("equation 14", "a scan", "scan"),
            ("section 3.1, equations 30 and 31", "cyclic reduction", "cyclic_reduction"),
        )
    ),
    *(
        Item(
            "naumov", place, f"RNN of 4 layers, 64 steps, by {name}: products in turn", published,
            Figure("triangular_solvers", "Equation 24: RNN of 4 layers of 16 units, 64 steps", label, entry="products"),
            why="substitution makes 67",
        )
        for place, name, label, published in (
            ("section 3.1, equation 24", "nested cyclic reduction", "cyclic_reduction, nested",
             "O(log k log τ), with log2 4 · log2 64 = 12"),
            ("section 3.4, equation 24", "the hybrid method", "hybrid", "no measurement"),
        )
    ),
    *(
        Item(
            "naumov", f"section 3.2, {place}", f"{name}: systems on which each block row settles, of 28",
            "no measurement", Figure("triangular_solvers", "Settled block by block", label),
            why="4 to 256 layers of 4 to 256 units, dense and 97 % pruned",
        )
        for place, name, label in (
            ("equations 36 and 37", "Jacobi", "jacobi"), ("fixed-point schemes", "Richardson", "richardson"),
            ("equations 38 to 41", "BiCGStab", "bicgstab"), ("Krylov methods", "GMRES", "gmres"),
        )
    ),
    Item(
        "naumov", "section 3.3", "BiCGStab for a mini-batch of 16: times as fast as a solve for each sample",
        "no measurement",
        Figure("triangular_solvers", "BiCGStab for a mini-batch", "all samples", "apart / together"),
    ),
    Item(
        "naumov", "section 4.1, equation 45", "levels of cyclic reduction of 1,024 stages on as many workers",
        "log l, with log2 l = 10",
        Figure("simulation", "Section 3.6", "cyclic_reduction, n = 1,024"), 10.0,
    ),
    *(
        Item(
            "naumov", f"section 4, equation {number}", f"{what}, n = 16, r = {samples}: counted over the paper's",
            printed,
            Figure("triangular_costs", "l = 15 layers of n = 16 units", f"equation {number}", "counted / paper",
                   data={"samples": samples}),
            1.0, "", "whole" if samples == 1 or number in (42, 46, 47) else "otherwise",
            "the paper's orders" if samples == 1 or number in (42, 46, 47) else _PER_SAMPLE,
        )
        for number, what, printed in (
            (42, "work of substitution", "l n² r"), (43, "work of one level of reduction", "l n³ + l n² r"),
            (44, "its time on l workers", "n³ + n² r / 2"),
            (45, "time of full reduction on l workers", "n³ log l + n² r"),
            (46, "work of 4 iterations of Jacobi", "l n² r η"), (47, "their time on l workers", "n² r η"),
        )
        for samples in (1, 16)
    ),
    *(
        Item(
            "naumov", "section 4.1", f"entries that full reduction adds, n = 16, r = {samples}: over the system's",
            "at most 1: no more than double",
            Figure("triangular_costs", "l = 15 layers of n = 16 units", "section 4.1", "counted / paper",
                   data={"samples": samples}),
            1.0, "", "whole" if samples == 1 else "otherwise", why,
        )
        for samples, why in ((1, ""), (16, _PER_SAMPLE))
    ),
    Item(
        "naumov", "section 4.1", "l = 63, n = r = 16: substitution's time on one worker over full reduction's on l",
        "above 1, as r ≥ n",
        Figure("triangular_costs", "l = 63 layers of n = 16 units", "time of substitution on one worker",
               data={"samples": 16}),
        None, "", "otherwise", f"{_PER_SAMPLE}; of the criteria, l / log l ≥ n is left",
    ),
    Item(
        "naumov", "section 4.2", "Jacobi's iterations, 256 layers of 16 units, over l", "pays where η < l",
        Figure("triangular_solvers", "256 layers of 16 units, dense", "jacobi", entry="iterations", times=1 / 256),
    ),
    # Leapfrogging, which has no measurements; its equations take the times of the passes from ours.
    *(
        Item(
            "leapfrogging", place, f"64 layers of 1,024 units, {threads} threads: share of a pass that is saved",
            "(1 - 1/k) f3 / f",
            Figure("leapfrog", "64 layers of 1024 units", f"{label}, k = {threads}", entry="saving"),
            None, "", "whole" if place == "equation 10" else "otherwise", why,
        )
        for threads in (2, 64)
        for place, label, why in (
            ("equation 10", "equation 10", "the equation as printed, with measured f3 / f"),
            ("Algorithm 1", "critical path of Algorithm 1",
             "the first thread's k - 1 layers, which equation 10 neglects, count: k = ⌈1/ε⌉ saves less and less"),
        )
    ),
    Item(
        "leapfrogging", "Algorithm 1", "64 layers of 1,024 units, 2 threads: times as fast as on one thread, measured",
        "no measurement",
        Figure("leapfrog", "64 layers of 1024 units", "leapfrog, k = 2", "back-propagation, one thread / leapfrog"),
        why="threads of one process share caches and memory",
    ),
    # Delayed gradients.
    *(
        Item(
            "ddg", f"Table 1, Figure 6, K = {modules}",
            f"{network}: iteration, {what}, times as fast as back-propagation",
            f"{1 / share:.3g} = 1 / (0.32 + 0.68 / {modules}), ResNet-110, Titan X",
            Figure("ddg_scaling", f"K = {modules}: {network}", label, "back-propagation / delayed gradients"),
            1 / share, "", "in small", why,
        )
        for network, modules, share in (("resnet110", 2, 0.32 + 0.68 / 2), ("resnet56", 2, 0.32 + 0.68 / 2),
                                        ("resnet56", 3, 0.32 + 0.68 / 3), ("resnet56", 4, 0.32 + 0.68 / 4))
        for what, label, why in (
            ("measured", "measured", ON_A_CPU) if modules == 2 else (
                "forward passes overlapping", "simulated", "simulated from measured modules: two cores run two"),
            ("T_F + largest T_B", "predicted", "Table 1 with measured modules, which wait for all forward passes"),
        )
    ),
    Item(
        "ddg", "Table 1", "128 layers on 256 workers, forward passes overlapping: simulated over the table's time",
        "T_F + T_B / K",
        Figure("simulation", "The papers' formulas without constants, on the most workers: 128 layers", "ddg",
               "simulated / paper"),
        1.0, "", "otherwise", "modules do not wait for all forward passes, so that T_F is divided too",
    ),
    *(
        Item(
            "ddg", f"Figure {number}", f"ResNet-8, K = {modules}: best accuracy by DDG over back-propagation's",
            "about 1, by eye",
            Figure("ddg_convergence", f"ResNet-8, K = {modules}", "delayed gradients", "accuracy / back-propagation's",
                   smallest=True), 1.0, "", "in small", f"{_DIGITS}, 12 epochs for 300",
        )
        for number, modules in ((3, 2), (4, 3), (4, 4), (4, 5))
    ),
    Item(
        "ddg", "Figures 5 and 7", "ResNet-56, K = 2: an epoch, times as fast as by back-propagation", "curves alone",
        Figure("ddg_convergence", "resnet56, K = 2", "epoch by delayed gradients", "back-propagation / DDG"), None, "",
        "in small", f"{_DIGITS}, 15 epochs for 300; ResNet-56 alone",
    ),
    Item(
        "ddg", "Table 3", "ResNet-56, K = 2: best accuracy by DDG over back-propagation's", "93.11 / 93.12 %, CIFAR-10",
        Figure("ddg_convergence", "resnet56, K = 2", "delayed gradients", "accuracy / back-propagation's"),
        93.11 / 93.12, "", "in small", f"{_DIGITS}, 15 epochs for 300",
    ),
    *(
        Item(
            "ddg", "Lemma 1", f"least squares, K = {modules}: share of iterations at which its inequality holds", "all",
            Figure("ddg_theory", f"K = {modules}", "Lemma 1", "holds / iterations", smallest=True), 1.0,
            why="means over 400 runs for expectations",
        )
        for modules in (1, 4)
    ),
    *(
        Item(
            "ddg", f"Theorem {number}", f"least squares, K = {modules}: bound over what it bounds", "at least 1",
            Figure("ddg_theory", f"K = {modules}", f"Theorem {number}: bound", "bound / measured"),
            why=f"loose by M, which is a largest value where means count, and by {delays}, as if all delays added up",
        )
        for number, delays in ((1, "K⁴ M"), (2, "K⁵ M"))
        for modules in (1, 4)
    ),
    Item(
        "ddg", "Corollary 1", "Σ γ_t² of decreasing steps, T = 10,000, over its limit π² γ_0² / 6", "finite",
        Figure("ddg_theory", "Corollaries", "Σ γ_t² / γ_0², T = 10,000", "sum / (π² / 6)"),
    ),
    Item(
        "ddg", "Corollary 2", "mean of squared gradients at an iteration drawn by γ_t, T = 10,000", "0 in the limit",
        Figure("ddg_theory", "Corollaries", "mean of squared gradients at an iteration drawn by γ_t, T = 10,000"),
    ),
)  # fmt: skip


def experiments_of(paper: str) -> list[str]:
    """The experiments that make a paper's figures; ``all`` is every paper.

    Raises
    ------
    ValueError
        Where no paper has that name.
    """
    if paper != "all" and paper not in PAPERS:
        raise ValueError(f"no paper is named {paper!r}; known are {', '.join((*PAPERS, 'all'))}")
    return list(dict.fromkeys(item.figure.experiment for item in ITEMS if paper in ("all", item.paper)))
