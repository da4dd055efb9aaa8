"""Prepared Jacobians in files: what was decided, as plain numbers and arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._version import __version__
from ..patterns import Pattern
from ..runtime import read_archive, write_archive
from ..tracing import name_of
from .arguments import Arguments
from .choice import evaluator_of
from .colorings import Coloring
from .compressed import Compressed
from .evaluator import Evaluator
from .options import Options
from .prepared_program import PreparedProgram
from .tracing_for_replays import TracedProgram

KIND = "prepared Jacobian"
#: The options that a file holds.
_SAVED = ("pruned", "create_graph", "value", "has_aux", "gradient")


def write_program(path: str | os.PathLike[str], options: Options, program: PreparedProgram) -> None:
    """Write what takes long to decide for a function."""
    evaluator, traced = program.evaluator, program.traced
    content: dict[str, Any] = {
        "version": __version__,
        "program": traced.digest,
        "argnums": list(traced.arguments.argnums),
        "static_argnums": list(traced.arguments.static),
        "batched": traced.arguments.batched,
        **{name: getattr(options, name) for name in _SAVED},
        "given": options.pattern is not None,
        "method": evaluator.name,
    }
    if isinstance(evaluator, Compressed):
        pattern = evaluator.pattern
        content |= {"shape": list(pattern.shape), "indptr": pattern.indptr, "indices": pattern.indices}
        content |= evaluator.coloring.describe()
    write_archive(path, KIND, content)


@dataclass(frozen=True)
class SavedProgram:
    """What a file holds; each method raises ValueError where it fits no such call."""

    path: str | os.PathLike[str]
    content: Mapping[str, Any]
    #: Of a compressed Jacobian.
    coloring: Coloring | None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SavedProgram:
        """The content of a file of this version; ValueError where it is damaged."""
        content = read_archive(path, KIND)
        if content.get("version") != __version__:
            raise ValueError(
                f"{path} is of version {content.get('version')!r} of jacsparse, and this is {__version__}; prepare the "
                "Jacobian and save it again"
            )
        lists = {name: content.get(name) for name in ("argnums", "static_argnums")}
        truths = {name: content.get(name) for name in ("batched", "given", *_SAVED)}
        is_whole = all(type(each) is list for each in lists.values())
        if not is_whole or any(type(truth) is not bool for truth in truths.values()):
            texts = ", ".join(f"{name} is {each!r}" for name, each in (lists | truths).items())
            raise ValueError(f"{path}: {texts}; the file is damaged")
        if content.get("method") == "products" and not content["given"]:
            return cls(path, content, None)
        try:
            if content["method"] != "compressed":
                raise ValueError(f"its method is {content['method']!r}")
            pattern = Pattern(content["shape"], content["indptr"], content["indices"])
            return cls(path, content, Coloring.restore(content, pattern))
        except (ValueError, TypeError, KeyError, MemoryError) as error:
            raise ValueError(f"{path}: no valid prepared Jacobian: {error}") from error

    def arguments(self, f: Callable[..., Any], args: Sequence[Any]) -> Arguments:
        """A call's arguments, by those that the Jacobian is by."""
        argnums, static = self.content["argnums"], tuple(self.content["static_argnums"])
        arguments = Arguments.of_call(f, args, argnums, self.content["batched"], static).with_tensors()
        return arguments.apart(with_gradients=self.content["create_graph"])

    def options(self, compile: bool) -> Options:
        """What it was prepared with."""
        pattern = self.coloring.pattern if self.coloring is not None and self.content["given"] else None
        return Options(compile=compile, pattern=pattern, **{name: self.content[name] for name in _SAVED})

    def evaluator(self, f: Callable[..., Any], traced: TracedProgram, compile: bool) -> Evaluator:
        """The way to the values of a traced function."""
        if self.content.get("program") != traced.digest:
            raise ValueError(
                f"{self.path} is not of this function at arguments of these shapes: {name_of(f)}, {traced.arguments}; "
                "prepare its Jacobian and save it again"
            )
        function, chain = traced.function, traced.function.chain
        if self.coloring is None:
            return evaluator_of(function, "products", compile=compile)
        expected = math.prod(chain.out_shape), math.prod(chain.in_shape)
        if (shape := self.coloring.pattern.shape) != expected:
            raise ValueError(f"{self.path}: no valid prepared Jacobian: its pattern is {shape}; expected {expected}")
        return Compressed(function, self.coloring, compile=compile)
