"""Whose code makes the calls of a run, the module and the line, for messages; and the elements that it may not read."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from ..patterns import UnsupportedOperatorError, holds_numbers, remedy_for
from .modules import name_of
from .operators import operator_name, tensors_in

if TYPE_CHECKING:
    from .capture import Recorder

_CALL = nn.Module._call_impl.__code__
_PACK = torch.ops.aten._pack_padded_sequence.default
_LIBRARY = sys.modules[__name__.partition(".")[0]]
#: The folders of PyTorch and of this library, some of whose packages lie beside the others in a checkout; and the file
#: of contexts that decorate its functions.
_FOREIGN = (
    Path(contextlib.__file__),
    Path(torch.__file__).parent,
    Path(__file__).parent.parent,
    *(Path(folder, name) for folder in _LIBRARY.__path__ for name in ("patterns", "spgemm", "models")),
)


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file's code is the user's, neither PyTorch's nor this library's."""
    return not any(Path(filename).is_relative_to(folder) for folder in _FOREIGN)


#: The file and the line of a call.
Place = tuple[str, int]


def place() -> Place | None:
    """The line of the user's code that runs, within the module that does: for messages alone."""
    frame = inspect.currentframe().f_back.f_back.f_back  # type: ignore[union-attr]
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            break
        if is_users(code.co_filename):
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def source_of(place: Place | str | None) -> str:
    """A line as messages have it, as in `` at net.py, line 7``; a text is one already."""
    return place if isinstance(place, str) else "" if place is None else f" at {place[0]}, line {place[1]}"


#: How many hooks this file has registered.
_OURS = [0]


def hooks_so_far() -> int:
    """How many hooks of any kind have been registered, but for those here."""
    return RemovableHandle.next_id - _OURS[0]


#: Its `depth` is the number of nested runs that are observed in a thread.
_STATE = threading.local()


def is_recording() -> bool:
    """Whether this thread observes the calls of a function: what replaces these steps aside."""
    return getattr(_STATE, "depth", 0) > 0


class Callers:
    """The modules whose forward passes run in this thread, while it is active.

    Attributes
    ----------
    path : str
        The path of the innermost one in the function, if that is a module; the name of any other one, or of a function.
    failed : tuple of str, Module and tuple, or None
        The innermost module whose forward pass raised: its path, itself and its arguments.
    spans : list of tuple of int
        Of each module that has returned, how many calls there had been before it, and after its own.
    call : tuple of OpOverload and tuple, or None
        The last call of an operator, and its positional arguments.
    """

    def __init__(self, function: Callable[..., Any], path: str = "") -> None:
        self.function = function
        self.path = path or name_of(function)
        self.failed: tuple[str, nn.Module, tuple[Any, ...]] | None = None
        self.call: tuple[Any, Any] | None = None
        self.spans: list[tuple[int, int]] = []
        #: The calls of operators so far.
        self.calls: Sequence[Any] = ()
        self._outer: list[tuple[str, int]] = []
        self._thread = threading.get_ident()
        #: By a module's id. No cached property, which slows down all attributes of an object.
        self._paths: dict[int, str] | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> Callers:
        _STATE.depth = getattr(_STATE, "depth", 0) + 1
        # The hooks are the process's.
        _OURS[0] += 2
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        _STATE.depth -= 1
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            if self._paths is None:
                root = self.function
                named = root.named_modules() if isinstance(root, nn.Module) else ()
                self._paths = {id(part): name for name, part in named}
            self._outer.append((self.path, len(self.calls)))
            self.path, self.failed = self._paths.get(id(module)) or name_of(module), None

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        if threading.get_ident() == self._thread and self._outer:
            if result is None and self.failed is None:
                self.failed = self.path, module, args
            self.path, begin = self._outer.pop()
            self.spans.append((begin, len(self.calls)))

    def unsupported(self, what: str, remedy: str) -> UnsupportedOperatorError:
        """An error that names the module or function that runs, and the line of its code."""
        return UnsupportedOperatorError(f"{self.path}: {what}{source_of(place())}; {remedy}")

    def read_error(self, overload: Any = None, *, as_text: bool = False) -> UnsupportedOperatorError:
        """The error where elements are read that may not be, by a call of an operator or, as for a text, without."""
        if as_text:
            what, remedy = "its code makes a text of a tensor, as to print it", "call jacsparse.jacobian, which runs it"
            return self.unsupported(what, f"leave that out, for no replay repeats it, or {remedy}")
        if overload is not None and torch.Tag.dynamic_output_shape in overload.tags:
            remedy = "take elements by their numbers, or keep the shape, with torch.where"
            return self.unsupported("a size depends on what a tensor holds", remedy)
        if any(call[0] is _PACK for call in self.calls):
            remedy = remedy_for(operator_name(_PACK))
            return self.unsupported("it reads the lengths of packed sequences, which may differ", remedy)
        remedy = (
            "no pattern holds for all inputs: use PyTorch's functions, as torch.sin for math.sin or NumPy's, and "
            "torch.where for a branch; or call jacsparse.jacobian, which runs the function each time"
        )
        return self.unsupported("its code asks what a tensor holds", remedy)

    def in_users_words(self, x: torch.Tensor, error: Exception) -> Exception:
        """An error that names the innermost module and the operator at which a run of a module ended, and their input.

        Where a parameter or a buffer is on another device than the input, or of another dtype, it names that.
        """
        module = self.function
        assert isinstance(module, nn.Module)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            where = name if "." in name else f"{name_of(module)}.{name}"
            if tensor.device.type not in ("cpu", "cuda"):
                return ValueError(f"{where} is on {tensor.device}; this runs on CPUs and CUDA: move it with .cpu()")
            if tensor.device != x.device:
                return ValueError(f"{where} is on {tensor.device}, its input on {x.device}; move one of them")
            if holds_numbers(tensor) and tensor.real.dtype != x.dtype:
                return TypeError(f"{where} is {tensor.dtype}, its input {x.dtype}; convert one of them")
        arguments = getattr(module, "arguments", None)
        call = f"an input of shape {tuple(x.shape[1:])}" if arguments is None else f"a call with {arguments}"
        where, part = name_of(module), module
        if self.failed is not None:
            where, part, args = self.failed
            if args and isinstance(args[0], torch.Tensor):
                call = f"an input of shape {tuple(args[0].shape[1:])}"
        operator, args = self.call or (None, ())
        source = _source_of(error)
        if str(error).startswith("derivative for aten::"):
            # Within the run, as for a Hessian.
            missing = str(error).removesuffix(" is not implemented")
            return UnsupportedOperatorError(f"{where}: PyTorch has no {missing}{source}")
        if "no rule registered for" in str(error):
            return UnsupportedOperatorError(
                f"{where}: a function of functions, as torch.cond, is no operator{source}; write it with Python's if "
                "and loops, or torch.where"
            )
        dtypes = list(dict.fromkeys(str(tensor.dtype) for tensor in tensors_in(args) if tensor.is_floating_point()))
        if len(dtypes) > 1 and "type" in str(error):
            return TypeError(
                f"{where}: {operator_name(operator)} gets tensors of {' and '.join(dtypes)}{source}; convert them to "
                f"one dtype, as by .to({dtypes[0]}): {error}"
            )
        what = name_of(part) if part._modules or "__qualname__" in vars(part) else str(part)
        return ValueError(f"{where}: {call} does not fit {what}{source}: {error}")


def _source_of(error: BaseException) -> str:
    """The last line of the user's code that an error passed, as in `` at net.py, line 7``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename) and Path(frame.filename).is_file():
            return f" at {frame.filename}, line {frame.lineno} ({(frame.line or '').strip()})"
    return ""


class Unreadable(TorchFunctionMode):
    """Raises where Python reads elements, without a call of an operator, that may be others in another call.

    These are all but those that the run computes of constants alone. ``.data`` calls no operator either: its result is
    taken for one that depends on the input.
    """

    READS = frozenset(
        (
            torch.Tensor.tolist,
            torch.Tensor.numpy,
            torch.Tensor.__array__,
            torch.Tensor.__dlpack__,
            torch.Tensor.data_ptr,
        )
    )
    #: What tells how many elements a mask has selected.
    SIZES = frozenset(
        (
            torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
            *(torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__, torch.numel),
        )
    )
    TEXTS = frozenset((torch.Tensor.__repr__, torch.Tensor.__format__))
    #: What makes a tensor of the elements of others, in lists or tuples.
    MAKES = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, torch.sparse_coo_tensor))
    DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]

    def __init__(self, recorder: Recorder, hidden: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.recorder, self.hidden = recorder, hidden

    def _may_not_be_read(self, tensor: torch.Tensor) -> bool:
        return self.recorder.may_vary(tensor) or any(tensor is each for each in self.hidden)

    def _is_sized(self, tensor: torch.Tensor) -> bool:
        """Whether the shape of a tensor tells how many elements a mask selects."""
        recorder = self.recorder
        return not recorder.in_parts and recorder.numbers.get(id(tensor)) in recorder.masks.selected

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read: Sequence[Any] = ()
        is_text = function in self.TEXTS
        if is_text or function in self.READS:
            read = args[:1]
        elif function in self.SIZES and self._is_sized(args[0]):
            raise self.recorder.callers.read_error(torch.ops.aten.nonzero.default)
        elif function in self.MAKES:
            lists = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, (list, tuple))]
            read = [each for each in _pytree.tree_leaves(lists) if isinstance(each, torch.Tensor)]
        if any(map(self._may_not_be_read, read)):
            raise self.recorder.callers.read_error(as_text=is_text)
        if function in self.MAKES and args and "dtype" not in (kwargs or {}):
            number = next((each for each in self.hidden if each is args[0]), None)
            if number is not None and number.dtype != torch.get_default_dtype():
                what = f"torch.tensor makes a number {torch.get_default_dtype()}, coarser than {number.dtype}"
                raise self.recorder.callers.unsupported(what, "pass a dtype, as that of the other tensors")
        result = function(*args, **(kwargs or {}))
        if function is self.DATA and self.recorder.depends_on_input(args[0]):
            self.recorder.alias(result, args[0])
        return result
