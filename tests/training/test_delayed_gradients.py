"""Delayed gradients against the algorithms written down plainly, and both engines against each other."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from jacsparse.training import DelayedGradients, partition

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)
ADAM = functools.partial(torch.optim.Adam, lr=1e-2)


def model_of(layers=6, dtype=torch.float64):
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(5, 5), nn.Tanh())]
    return nn.Sequential(nn.Linear(3, 5), *parts, nn.Linear(5, 4)).to(dtype)


def batches(count, samples=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(samples, 3, generator=generator, dtype=dtype), torch.randint(4, (samples,), generator=generator))
        for _ in range(count)
    ]


def reference(model, modules, data, optimizer):
    """Algorithms 1 and 2 as printed: the gradient of the whole network at earlier weights, for each module."""
    parts = [[f"{id(p)}" for p in part.parameters()] for part in partition(model, modules)]
    names = {f"{id(p)}": name for name, p in model.named_parameters()}
    groups, count = [[names[key] for key in part] for part in parts], len(parts)
    w = {name: p.detach().clone() for name, p in model.named_parameters()}
    m, v, history = ({name: torch.zeros_like(p) for name, p in w.items()} for _ in range(3))
    history = []
    for t in range(len(data)):
        history.append({name: p.clone() for name, p in w.items()})
        for k, group in enumerate(groups, 1):
            s = t - count + k
            g = {name: torch.zeros_like(w[name]) for name in group}
            if s >= 0:
                at = {name: p.clone().requires_grad_() for name, p in history[s].items()}
                loss = functional.cross_entropy(functional_call(model, at, (data[s][0].clone(),)), data[s][1])
                g = dict(zip(group, torch.autograd.grad(loss, [at[name] for name in group]), strict=True))
            for name in group:
                if optimizer is ADAM:
                    m[name] = 0.9 * m[name] + 0.1 * g[name]
                    v[name] = 0.999 * v[name] + 0.001 * g[name] ** 2
                    first, second = m[name] / (1 - 0.9 ** (t + 1)), v[name] / (1 - 0.999 ** (t + 1))
                    w[name] = w[name] - 1e-2 * first / (second.sqrt() + 1e-8)
                elif s >= 0:
                    m[name] = 0.9 * m[name] + g[name] + 5e-4 * w[name]
                    w[name] = w[name] - 0.1 * m[name]
    return w


def assert_equal_states(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            assert_equal_states(actual[key], expected[key])
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal_states(one, other)
    elif isinstance(actual, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert actual == expected


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("modules", [1, 2, 3, 4, 5])
def test_equals_the_algorithms(modules, recompute, optimizer):
    model, data = model_of(), batches(20)
    expected = reference(copy.deepcopy(model), modules, data, optimizer)
    ddg = DelayedGradients(model, modules=modules, optimizer=optimizer, recompute=recompute)
    for x, y in data:
        ddg.step(x, y)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-12, atol=1e-12)


def images(count, samples=6):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(samples, 2, 8, 8, generator=generator), torch.randint(3, (samples,), generator=generator))
        for _ in range(count)
    ]


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3)),
        nn.Flatten(),
        nn.Linear(256, 3),
    )


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
def test_one_module_is_plain_training_bit_for_bit(optimizer):
    plain, trained = convolutional(), convolutional()
    first, ddg = optimizer(plain.parameters()), DelayedGradients(trained, modules=1, optimizer=optimizer)
    for number, (x, y) in enumerate(images(6)):
        torch.manual_seed(number)
        first.zero_grad()
        loss = functional.cross_entropy(plain(x), y)
        loss.backward()
        first.step()
        torch.manual_seed(number)
        assert ddg.step(x, y) == loss.detach()
    assert_equal_states(dict(trained.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize(("before", "recompute"), [(1, False), (5, False), (5, True)])
def test_resumed_training_goes_on_bit_for_bit(before, recompute, optimizer, tmp_path):
    data = images(9)

    def trainer(seed=0):
        torch.manual_seed(seed)
        return DelayedGradients(convolutional(), modules=3, optimizer=optimizer, recompute=recompute)

    whole, first, second = trainer(), trainer(), trainer(seed=5)
    for x, y in data[:before]:
        first.step(x, y)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    losses = [whole.step(x, y) for x, y in data]
    assert [second.step(x, y) for x, y in data[before:]] == losses[before:]
    assert_equal_states(second.state_dict(), whole.state_dict())


def test_recomputation_updates_running_statistics_once():
    stored, again = convolutional(), convolutional()
    for model, recompute in ((stored, False), (again, True)):
        torch.manual_seed(0)
        ddg = DelayedGradients(model, modules=3, optimizer=SGD, recompute=recompute)
        for x, y in images(6):
            ddg.step(x, y)
    assert_equal_states(dict(again.state_dict()), dict(stored.state_dict()))
    assert again[0][1].num_batches_tracked == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
def test_states_on_another_device(tmp_path):
    first, second = (DelayedGradients(model_of().cuda(), modules=[1, 2], optimizer=SGD) for _ in range(2))
    data = [(x.cuda(), y.cuda()) for x, y in batches(8)]
    for x, y in data[:4]:
        first.step(x, y)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu"))
    assert [second.step(x, y) for x, y in data[4:]] == [first.step(x, y) for x, y in data[4:]]


def test_passes_are_computed_again_in_their_modes():
    """Modes change between batches, while passes wait; with a loaded state all of them are computed again."""
    states = []
    for recompute, resumed in ((False, False), (True, False), (False, True)):
        torch.manual_seed(0)
        model = convolutional()
        ddg = DelayedGradients(model, modules=3, optimizer=SGD, recompute=recompute)
        for number, (x, y) in enumerate(images(9)):
            if resumed:
                ddg.load_state_dict(ddg.state_dict())
            model[0].train(number % 3 > 0)
            model[1][3].train(number % 2 > 0)
            ddg.step(x, y)
            assert model[0].training == (number % 3 > 0)
        states.append(ddg.state_dict())
    assert_equal_states(states[1], states[0])
    assert_equal_states(states[2], states[0])


@pytest.mark.parametrize(("delay", "share"), [(1, 0.74), (2, 0.64), (3, 0.58)])
def test_the_first_step_of_adam_counts_iterations_without_gradient(delay, share):
    model = model_of()
    ddg = DelayedGradients(model, modules=delay + 1, optimizer=ADAM)
    before = ddg.partition[0][0].weight.detach().clone()
    for x, y in batches(delay):
        ddg.step(x, y)
        assert torch.equal(ddg.partition[0][0].weight, before)
    ddg.step(*batches(1)[0])
    steps = (ddg.partition[0][0].weight.detach() - before).abs() / 1e-2
    # Where gradients are large beside ε, each element moves by the same.
    assert float(steps.median()) == pytest.approx(share, abs=0.005)


def test_weight_decay_rests_until_there_is_a_gradient():
    model = model_of()
    ddg = DelayedGradients(model, modules=4, optimizer=functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5))
    before = [p.detach().clone() for p in ddg.partition[0].parameters()]
    for x, y in batches(3):
        ddg.step(x, y)
    assert all(torch.equal(p, q) for p, q in zip(ddg.partition[0].parameters(), before, strict=True))
    assert [group["weight_decay"] for each in ddg.optimizers for group in each.param_groups] == [0.5] * 4


def test_schedulers_of_learning_rates_take_the_optimizers():
    ddg = DelayedGradients(model_of(), modules=3, optimizer=SGD)
    schedulers = [torch.optim.lr_scheduler.MultiStepLR(each, [2], 0.1) for each in ddg.optimizers]
    for x, y in batches(3):
        ddg.step(x, y)
        for scheduler in schedulers:
            scheduler.step()
    assert [each.param_groups[0]["lr"] for each in ddg.optimizers] == pytest.approx([0.01] * 3)


def test_frozen_parts_and_parts_without_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    ddg = DelayedGradients(model, modules=[1, 2, 3], optimizer=SGD)
    for x, y in batches(6, dtype=torch.float32):
        ddg.step(x, y)
    after = model.state_dict()
    assert [name for name in after if torch.equal(after[name], before[name])] == ["0.weight", "0.bias"]


def test_batches_of_other_sizes():
    model, data = model_of(), [(x[: 1 + n % 3], y[: 1 + n % 3]) for n, (x, y) in enumerate(batches(8))]
    expected = reference(copy.deepcopy(model), 3, data, SGD)
    ddg = DelayedGradients(model, modules=3, optimizer=SGD)
    for x, y in data:
        ddg.step(x, y)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-12, atol=1e-12)


class Counter(nn.Module):
    """Divides by a buffer that it has written to before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones((), dtype=torch.float64), persistent=False)

    def forward(self, x):
        self.count.add_(1)
        return x * self.count.sqrt()


def odd_models():
    """Models on which a pass that waits could go wrong."""
    shared, tied = nn.Linear(5, 5), nn.Linear(5, 5)
    twin = nn.Linear(5, 5)
    twin.weight = tied.weight
    pruned = nn.Linear(5, 5)
    prune.random_unstructured(pruned, "weight", 0.5)
    normed = weight_norm(nn.Linear(5, 5))
    tail = (nn.Tanh(), nn.Linear(5, 4))
    return {
        "a layer twice": nn.Sequential(nn.Linear(3, 5), shared, nn.Tanh(), shared, *tail),
        "tied weights": nn.Sequential(nn.Linear(3, 5), tied, nn.Tanh(), twin, *tail),
        "pruned": nn.Sequential(nn.Linear(3, 5), pruned, nn.Tanh(), pruned, *tail),
        "parametrised": nn.Sequential(nn.Linear(3, 5), normed, *tail),
        "in place first": nn.Sequential(nn.LeakyReLU(0.5, inplace=True), nn.Linear(3, 5), *tail),
        "in place at a cut": nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Linear(5, 4)),
    }


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", list(odd_models()))
def test_odd_models(name, recompute):
    torch.manual_seed(0)
    model = odd_models()[name].double()
    torch.manual_seed(0)
    twin = odd_models()[name].double()
    cut = [len(model) - 1] if name != "in place at a cut" else [2]
    data = batches(7)
    expected = reference(twin, cut, data, SGD)
    ddg = DelayedGradients(model, modules=cut, optimizer=SGD, recompute=recompute)
    x = torch.empty_like(data[0][0])
    for values, y in data:
        # The caller's buffer, which the next batch overwrites.
        ddg.step(x.copy_(values), y)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-12, atol=1e-12)


def test_buffers_that_forward_writes():
    states = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), Counter(), nn.Tanh(), nn.Linear(5, 4)).double()
        ddg = DelayedGradients(model, modules=[3], optimizer=SGD, recompute=recompute)
        for x, y in batches(6):
            ddg.step(x, y)
        assert model[1].count == 7
        states.append(ddg.state_dict())
    assert_equal_states(*states)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda ddg: pickle.loads(pickle.dumps(ddg))])
def test_copies_go_on_alike(duplicate):
    first = DelayedGradients(model_of(), modules=3, optimizer=SGD)
    for x, y in batches(5):
        first.step(x, y)
    second = duplicate(first)
    for x, y in batches(5):
        assert first.step(x, y) == second.step(x, y)
    assert_equal_states(first.state_dict(), second.state_dict())


def test_layers_that_are_frozen_stay_as_they_are():
    model = model_of()
    ddg = DelayedGradients(model, modules=4, optimizer=SGD)
    for number, (x, y) in enumerate(batches(12)):
        if number == 6:
            model[0].requires_grad_(False)
            before = model[0].weight.clone()
        ddg.step(x, y)
    assert torch.equal(model[0].weight, before)


class TestPartition:
    def test_by_path_place_and_number(self):
        model = convolutional()
        assert [len(part) for part in partition(model, ["1", "1.3"])] == [3, 3, 3]
        assert [len(part) for part in partition(model, [3, 6])] == [3, 3, 3]
        assert [len(part) for part in partition(model, 3)] == [3, 5, 1]
        assert [layer for part in partition(model, 9) for layer in part] == [*model[0], *model[1], *model[2:]]

    def test_by_measured_cost(self):
        model = nn.Sequential(nn.Linear(4, 600), nn.Linear(600, 600), nn.Linear(600, 4), nn.Linear(4, 4))
        before = copy.deepcopy(model.state_dict())
        sizes = [len(part) for part in partition(model, 2, example=torch.randn(64, 4))]
        assert sizes in ([1, 3], [2, 2])
        assert_equal_states(dict(model.state_dict()), dict(before))

    def test_the_output_is_the_models(self):
        model, (x, _) = model_of(), batches(1)[0]
        y = x
        for part in partition(model, 4):
            y = part(y)
        assert torch.equal(y, model(x))

    @pytest.mark.parametrize(
        ("modules", "error", "message"),
        [
            (0, ValueError, "modules is 0; expected 1 to 9"),
            (10, ValueError, "modules is 10; expected 1 to 9"),
            (True, ValueError, "modules is True"),
            (2.5, TypeError, "modules is 2.5"),
            ("1", TypeError, "modules is '1'"),
            ([], TypeError, r"modules is \[\]"),
            (["0.1.weight"], ValueError, "inside '0.1', where"),
            (["7"], ValueError, "no layer '7'; the layers are 0.0, 0.1"),
            ([0], ValueError, "a split is 0; expected 1 to 8"),
            ([3, 3], ValueError, "different layers in the order"),
            ([4, 2], ValueError, "different layers in the order"),
            ([None], TypeError, "a split is None"),
        ],
    )
    def test_wrong_splits(self, modules, error, message):
        with pytest.raises(error, match=message):
            partition(convolutional(), modules)

    def test_a_split_inside_a_residual_block(self):
        from jacsparse.models import ResNet8

        with pytest.raises(ValueError, match=r"'group2.0.body.1' is inside 'group2.0', where"):
            partition(ResNet8(), ["group2.0.body.1"])
        assert [len(part) for part in partition(ResNet8(), 2)] == [4, 5]

    def test_models_that_cannot_be_cut(self):
        model = model_of()
        model.register_forward_hook(lambda *_: None)
        with pytest.raises(TypeError, match="the model has hooks"):
            partition(model, 2)
        shared = nn.Linear(3, 3)
        with pytest.raises(ValueError, match=r"parts 0 and 1 share a tensor \(0.weight and 0.weight there\)"):
            partition(nn.Sequential(shared, nn.Tanh(), shared), [2])


def test_a_step_without_grad_is_one_with_it():
    plain, within = (DelayedGradients(model_of(), modules=3, optimizer=SGD, recompute=True) for _ in range(2))
    for x, y in batches(5):
        with torch.no_grad():
            loss = within.step(x, y)
        assert loss == plain.step(x, y)


class TestErrors:
    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (functools.partial(functional.cross_entropy, reduction="none"), r"the loss is of shape \(7,\); expected a"),
            (lambda output, _: output.mean().item(), "the loss is a float; expected a scalar tensor"),
        ],
    )
    def test_losses_that_are_no_scalar(self, loss, message):
        ddg = DelayedGradients(model_of(), modules=2, optimizer=SGD, loss=loss)
        with pytest.raises(TypeError, match=message):
            ddg.step(*batches(1)[0])

    def test_inputs_that_are_no_tensors(self):
        with pytest.raises(TypeError, match=r"x is an ndarray; expected a torch.Tensor"):
            DelayedGradients(model_of(), modules=2, optimizer=SGD).step(batches(1)[0][0].numpy(), batches(1)[0][1])

    def test_empty_batches(self):
        ddg = DelayedGradients(model_of(), modules=2, optimizer=SGD)
        with pytest.raises(ValueError, match="x has no samples"):
            ddg.step(torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))

    def test_modules_that_pass_on_several_tensors(self):
        ddg = DelayedGradients(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 2)), modules=2, optimizer=SGD)
        with pytest.raises(TypeError, match="part 0 returns a tuple; parts pass on one tensor"):
            ddg.step(torch.randn(2, 5, 3), torch.zeros(2, dtype=torch.int64))

    def test_a_step_that_failed_is_forgotten(self):
        (model, data), failing = (model_of(), batches(8)), model_of()
        expected = reference(model, 3, data, SGD)
        ddg = DelayedGradients(failing, modules=3, optimizer=SGD)
        for x, y in data:
            with pytest.raises(ValueError, match="batch_size"):
                ddg.step(x, y[:2])
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                ddg.step(x[:, :2], y)
            ddg.step(x, y)
        for name, parameter in failing.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-12, atol=1e-12)

    def test_a_failed_update_is_final_until_a_state_is_loaded(self):
        ddg, data = DelayedGradients(model_of(), modules=3, optimizer=SGD), batches(6)
        for x, y in data[:4]:
            ddg.step(x, y)
        state = copy.deepcopy(ddg.state_dict())
        hook = ddg.optimizers[1].register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ddg.step(*data[4])
        hook.remove()
        with pytest.raises(RuntimeError, match="a step has failed after some modules were updated; load a state"):
            ddg.step(*data[4])
        ddg.load_state_dict(state)
        ddg.step(*data[4])

    @pytest.mark.parametrize("optimizer", ["sgd", torch.optim.SGD([torch.zeros(1)], lr=0.1)])
    def test_optimisers_that_are_no_factories(self, optimizer):
        with pytest.raises(TypeError, match=r"pass what makes one of a list of parameters, as functools.partial"):
            DelayedGradients(model_of(), modules=2, optimizer=optimizer)

    def test_factories_that_make_no_optimiser(self):
        with pytest.raises(TypeError, match=r"optimizer returned a NoneType; expected a torch.optim.Optimizer"):
            DelayedGradients(model_of(), modules=2, optimizer=lambda _: None)

    @pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
    def test_hooks_of_parameters(self, kind):
        model = model_of()
        getattr(model[0].weight, kind)(lambda _: None)
        with pytest.raises(ValueError, match=r"parameter 0.weight of part 0 has hooks, .*register_step_pre_hook"):
            DelayedGradients(model, modules=2, optimizer=SGD)

    def test_optimisers_with_closures(self):
        with pytest.raises(ValueError, match="the optimiser is LBFGS"):
            DelayedGradients(model_of(), modules=2, optimizer=torch.optim.LBFGS)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state.pop("seed"), "the state has no seed"),
            (lambda state: state["parts"][0]["passes"].pop(), r"part 0 has passes of iterations \[3\] after 5"),
            (lambda state: state["parts"][1]["tensors"].pop("0.bias"), "0.bias of part 1 is missing in the state"),
            (
                lambda state: state["parts"][0]["passes"][0]["parameters"].update({"0.bias": torch.zeros(9)}),
                r"0.bias of part 0 is \(9,\) torch.float32 in the state, and \(5,\) torch.float64 in the model",
            ),
            (
                lambda state: state["parts"][0]["passes"][0]["modes"].pop(),
                "part 0 is 3 modules in the state, and 4 in the model",
            ),
        ],
    )
    def test_damaged_states_change_nothing(self, change, message):
        first, second = (DelayedGradients(model_of(), modules=3, optimizer=SGD) for _ in range(2))
        for x, y in batches(5):
            first.step(x, y)
        state, before = first.state_dict(), copy.deepcopy(second.state_dict())
        change(state)
        with pytest.raises(ValueError, match=message):
            second.load_state_dict(state)
        assert_equal_states(second.state_dict() | {"seed": 0}, before | {"seed": 0})

    @pytest.mark.parametrize(
        ("optimizer", "dtype", "message"),
        [
            (ADAM, torch.float64, "part 0 was optimised by SGD of 4 parameters, and has Adam of 4 parameters here"),
            (
                lambda values: torch.optim.SGD([{"params": [value]} for value in values], lr=0.1),
                torch.float64,
                "part 0 was optimised by SGD of 4 parameters, and has SGD of 1, 1, 1, 1 parameters here",
            ),
            (SGD, torch.float32, r"0.weight of part 0 is \(5, 3\) torch.float64 in the state, .* torch.float32 in"),
        ],
    )
    def test_states_of_other_optimisers_and_dtypes(self, optimizer, dtype, message):
        first = DelayedGradients(model_of(), modules=3, optimizer=SGD)
        second = DelayedGradients(model_of(dtype=dtype), modules=3, optimizer=optimizer)
        first.step(*batches(1)[0])
        before = copy.deepcopy(second.state_dict())
        with pytest.raises(ValueError, match=message):
            second.load_state_dict(first.state_dict())
        assert_equal_states(second.state_dict(), before)

    def test_states_of_other_splits(self):
        state = DelayedGradients(model_of(), modules=2, optimizer=SGD).state_dict()
        with pytest.raises(ValueError, match="the state is of 2 modules, and there are 3 here"):
            DelayedGradients(model_of(), modules=3, optimizer=SGD).load_state_dict(state)
