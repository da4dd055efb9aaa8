"""Vertex elimination: products along the paths of a graph, and sums where paths meet."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

#: A matrix by its number in an `Accumulation`, or in another representation.
Matrix = TypeVar("Matrix")


class Arithmetic(Protocol[Matrix]):
    """Products and sums of matrices in some representation, their numbers of entries, and of pairs that meet."""

    def products(self, lefts: Sequence[Matrix], rights: Sequence[Matrix], /) -> list[list[Matrix]]: ...

    def add(self, terms: Sequence[Matrix], /) -> Matrix: ...

    def nnz_of(self, matrix: Matrix, /) -> int: ...

    def product_work(self, left: Matrix, right: Matrix, /) -> int: ...


def eliminate(
    arithmetic: Arithmetic[Matrix],
    edges: Iterable[tuple[Hashable, Hashable, Matrix]],
    start: Hashable,
    stop: Hashable,
    *,
    in_turn: bool = False,
) -> Matrix | None:
    """Eliminate all vertices of a graph but two; return the matrix between those, or None where no path joins them.

    An edge is (source, target, matrix), such that ``edge(u, v) · edge(v, w)`` is the product along a path. The vertex
    goes first whose products take the fewest operations, less the entries of its own edges, which go; on request, the
    vertices go in turn, as they are targets of the edges.
    """
    after: dict[Hashable, dict[Hashable, list[Matrix]]] = {}
    before: dict[Hashable, set[Hashable]] = {}
    for source, target, matrix in edges:
        after.setdefault(source, {}).setdefault(target, []).append(matrix)
        before.setdefault(target, set()).add(source)

    def merged(source: Hashable, target: Hashable) -> Matrix:
        terms = after[source][target]
        if len(terms) > 1:
            after[source][target] = terms = [arithmetic.add(terms)]
        return terms[0]

    #: By vertex, the multiply-adds of an edge into it and one out of it, beside the matrices that they hold for.
    costs: dict[Hashable, dict[Hashable, tuple[Matrix, Matrix, int]]] = defaultdict(dict)

    def cost(vertex: Hashable) -> int:
        sources, targets, known = before.get(vertex, set()), after.get(vertex, {}), costs[vertex]
        lefts = {source: merged(source, vertex) for source in sources}
        rights = {target: merged(vertex, target) for target in targets}
        # An entry of an edge that goes is one term less of sums, or of products to come.
        total = -sum(map(arithmetic.nnz_of, (*lefts.values(), *rights.values())))
        for path in itertools.product(sources, targets):
            left, right = lefts[path[0]], rights[path[1]]
            if path not in known or known[path][0] is not left or known[path][1] is not right:
                known[path] = left, right, arithmetic.product_work(left, right)
            total += 2 * known[path][2]
        return total

    def remove(vertex: Hashable) -> None:
        costs.pop(vertex, None)
        sources, targets = before.pop(vertex, set()), after.get(vertex, {})
        lefts = [merged(source, vertex) for source in sources]
        rights = [merged(vertex, target) for target in targets] if sources else []
        for source, of_source in zip(sources, arithmetic.products(lefts, rights), strict=True):
            del after[source][vertex]
            for target, product in zip(targets, of_source, strict=True):
                if arithmetic.nnz_of(product):
                    after[source].setdefault(target, []).append(product)
                    before.setdefault(target, set()).add(source)
        for target in after.pop(vertex, {}):
            before[target].discard(vertex)

    inner = [vertex for vertex in dict.fromkeys([*before, *after]) if vertex not in (start, stop)]
    if in_turn:
        for vertex in inner:
            remove(vertex)
    # The cheapest one first, of equal ones that which comes first; a vertex may have an entry for a cost of before.
    places = {} if in_turn else {vertex: place for place, vertex in enumerate(inner)}
    queue, current, changed = list[tuple[int, int]](), dict[Hashable, int](), list(places)
    while places:
        for vertex in changed:
            current[vertex] = cost(vertex)
            heapq.heappush(queue, (current[vertex], places[vertex]))
        vertex = next(
            inner[place]
            for least, place in iter(partial(heapq.heappop, queue), None)
            if inner[place] in places and current[inner[place]] == least
        )
        del places[vertex]
        changed = sorted({*before.get(vertex, ()), *after.get(vertex, {})} & places.keys(), key=places.__getitem__)
        remove(vertex)
    return merged(start, stop) if stop in after.get(start, {}) else None
