"""A model of any forward pass as stretches between the places where one tensor carries everything."""

from __future__ import annotations

import itertools
import operator

from torch import fx, nn

from ..runtime import a_type
from ..tracing import passed_by_all_paths
from .modes import in_modes, modes_of


def stretches_of(model: nn.Module) -> dict[str, nn.Module]:
    """The stretches of a model's forward pass, by the names of the submodules that they call.

    They hold the model's own layers and parameters. ``torch.fx`` traces the forward pass: the layers of ``torch.nn``
    are called, other modules are gone through.

    Raises
    ------
    TypeError
        Where the forward pass is no graph of one input and one output, as with a branch on what a tensor holds, depends
        on the mode elsewhere than in layers, or calls a module whose hooks its stretches would not call.
    """
    graph = _graph_of(model)
    if _text(graph) != _text(_graph_of(model, training=not model.training)):
        raise TypeError(
            f"the forward pass of {a_type(model)} depends on self.training elsewhere than in a layer of torch.nn; use "
            "a layer there, as nn.Dropout in the place of F.dropout"
        )
    (start, *others), output = graph.find_nodes(op="placeholder"), graph.output_node()
    if any(node.users for node in others) or not isinstance(output.args[0], fx.Node):
        raise TypeError(f"the forward pass of {a_type(model)} takes or returns more than one tensor")
    for node in graph.nodes:
        # A recurrent layer's states may be left unread.
        if not node.users and node.op not in ("placeholder", "output") and node.target is not operator.getitem:
            raise TypeError(
                f"the forward pass of {a_type(model)} does not use what {node.name} returns, and may rely on its "
                "writing to an argument; use what it returns"
            )
    stops = list[fx.Node]()
    for begin, stop in itertools.pairwise([start, *_passed(start, output.args[0])]):
        # What calls no layer belongs to the stretch before.
        alone = not any(node.op in ("call_module", "get_attr") for node in _between(begin, stop))
        stops[len(stops) - (alone and bool(stops)) :] = [stop]
    stretches: dict[str, nn.Module] = {}
    for begin, stop in itertools.pairwise([start, *stops]):
        stretch, name = _stretch(model, begin, stop)
        stretches[_unused(name, stretches)] = stretch
    return stretches


def _graph_of(model: nn.Module, training: bool | None = None) -> fx.Graph:
    modes = modes_of(model) if training is None else [training] * len(modes_of(model))
    with in_modes(model, modes):
        try:
            graph = fx.Tracer().trace(model)
        except Exception as error:
            # What torch.fx, or the forward pass on its proxies, raises is of any kind.
            reason = str(error).partition("\n")[0]
            raise TypeError(
                f"the forward pass of {a_type(model)} cannot be cut into parts, as torch.fx cannot trace it: {reason}; "
                "write it without branches on tensors, or as an nn.Sequential of its parts"
            ) from error
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    for path, part in model.named_modules():
        inner = any(path == name or path.startswith(f"{name}.") for name in called)
        if not inner:
            refuse_hooks(part, path)
    return graph


def refuse_hooks(container: nn.Module, path: str) -> None:
    """Raise TypeError where a module that its parts take the place of has hooks."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(container, name) for name in hooks):
        where = f"{path!r}" if path else "the model"
        raise TypeError(f"{where} has hooks, which its parts would not call; put them on layers")


def _text(graph: fx.Graph) -> str:
    return "\n".join(node.format_node() or "" for node in graph.nodes)


def _passed(start: fx.Node, stop: fx.Node) -> list[fx.Node]:
    """The nodes from the input on that all paths to the output pass, the output among them."""
    places, made = {start: 0}, list[tuple[int, list[int]]]()
    for node in _between(start, stop):
        operands = [places[each] for each in node.all_input_nodes if each in places]
        if operands:
            places[node] = len(places)
            made.append((places[node], operands))
    nodes = list(places)
    return [*(nodes[place] for place in passed_by_all_paths(made)), stop] if made else []


def _between(start: fx.Node, stop: fx.Node) -> list[fx.Node]:
    """The nodes that compute one node from another one, in order."""
    needed, waiting = {start}, [stop]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return [node for node in start.graph.nodes if node in needed and node is not start]


def _stretch(model: nn.Module, start: fx.Node, stop: fx.Node) -> tuple[fx.GraphModule, str]:
    """What computes one node from another one, and its name: the common path of the modules that it calls."""
    graph, copies, calls = fx.Graph(), dict[fx.Node, fx.Node](), _between(start, stop)
    copies[start] = graph.placeholder("x")
    for node in calls:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[stop])
    paths = [str(node.target).split(".") for node in calls if node.op == "call_module"]
    common = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))]
    name = ".".join(common) or (".".join(paths[0]) if paths else stop.name)
    return fx.GraphModule(model, graph, name), name


def _unused(name: str, taken: dict[str, nn.Module]) -> str:
    """A name that no stretch has yet."""
    names = (name, *(f"{name}:{number}" for number in range(2, len(taken) + 3)))
    return next(each for each in names if each not in taken)
