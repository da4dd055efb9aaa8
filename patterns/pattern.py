"""`Pattern`: the structural nonzeros of a matrix, the positions that are not guaranteed zeros."""

from __future__ import annotations

import functools
import os
from typing import Any, Self

import numpy as np
import scipy.sparse

from ..runtime import a_type, frozen, index_dtype, read_archive, write_archive
from .drawing import as_html, braille, picture, plot_pattern
from .structure import Arrays, Csr, Full, Structure


class Pattern:
    """The sparsity pattern of a matrix: its positions that are not guaranteed zeros.

    A pattern is immutable. Two patterns are equal where they have the same positions, whatever their structures.

    Parameters
    ----------
    shape : pair of int
        Rows and columns.
    indptr : array of int, shape (rows + 1,)
        First entry of each row in `indices`, as in CSR.
    indices : array of int, shape (nnz,)
        Column of each entry, sorted and distinct in each row. Both arrays are copied.

    Raises
    ------
    TypeError
        Where an array does not hold integers.
    ValueError
        Where the arrays are no CSR pattern of that shape; the message names the place.

    Examples
    --------
    >>> pattern = Pattern((2, 3), [0, 2, 3], [0, 2, 1])
    >>> pattern.nnz, pattern.sparsity
    (3, 0.5)
    >>> pattern.T.indices
    array([0, 1, 0], dtype=int32)
    """

    def __init__(self, shape: tuple[int, int], indptr: Any, indices: Any) -> None:
        self._structure: Structure = Csr.checked(shape, indptr, indices)

    @classmethod
    def of(cls, structure: Structure) -> Self:
        """The pattern of a structure, which is not checked."""
        pattern = cls.__new__(cls)
        pattern._structure = structure
        return pattern

    @property
    def structure(self) -> Structure:
        """The description of the pattern, from which its indices are made."""
        return self._structure

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.structure.shape

    @functools.cached_property
    def nnz(self) -> int:
        """Number of positions."""
        return self.structure.nnz

    @property
    def sparsity(self) -> float:
        """Share of the matrix that is guaranteed to be zero (thesis, section 3.3); 0 where it has no element."""
        rows, columns = self.shape
        return 1.0 - self.nnz / (rows * columns) if rows and columns else 0.0

    @functools.cached_property
    def _csr(self) -> Arrays:
        indptr, indices = self.structure.csr()
        return frozen(indptr), frozen(indices)

    @property
    def has_indices(self) -> bool:
        """Whether `indptr` and `indices` have been made."""
        return "_csr" in self.__dict__

    @property
    def indptr(self) -> np.ndarray:
        """First entry of each row in `indices`; read-only, shape ``(rows + 1,)``, int32 or int64."""
        return self._csr[0]

    @property
    def indices(self) -> np.ndarray:
        """Column of each entry; read-only, shape ``(nnz,)``, int32 or int64."""
        return self._csr[1]

    @functools.cached_property
    def _launches(self) -> dict[Any, Any]:
        """Launches on devices that read its arrays, by what decides them; `jacsparse.spgemm` makes them."""
        return {}

    @functools.cached_property
    def _constants(self) -> dict[Any, np.ndarray]:
        """Read-only numbers of its entries that arguments of calls decide alone, by these; rules make them."""
        return {}

    @functools.cached_property
    def T(self) -> Pattern:
        """The pattern of the transpose."""
        transpose = Pattern.of(self.structure.T)
        transpose.__dict__["T"] = self
        return transpose

    def scaled(self) -> Pattern:
        """The pattern after its entries were multiplied by numbers: the same positions, without claims about values."""
        structure = self.structure.scaled()
        return self if structure is self.structure else Pattern.of(structure)

    @functools.cached_property
    def transposition(self) -> np.ndarray:
        """The place of each entry of `T` among this pattern's entries; read-only, shape ``(nnz,)``.

        ``values[pattern.transposition]`` are the transpose's values.
        """
        place = np.arange(self.nnz, dtype=index_dtype(self.nnz, 0, 0))
        return frozen(scipy.sparse.csr_array((place, self.indices, self.indptr), shape=self.shape).tocsc().data)

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """Row of each entry; read-only, shape ``(nnz,)``, of the indices' type."""
        dtype = index_dtype(self.nnz, *self.shape)
        return frozen(np.repeat(np.arange(self.shape[0], dtype=dtype), self.structure.row_counts()))

    @functools.cached_property
    def _on_diagonal(self) -> np.ndarray:
        """Whether each entry is on the main diagonal; read-only, bool, shape ``(nnz,)``."""
        return frozen(self.rows == self.indices)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Place of each entry among all the matrix' elements in C order; read-only, int64, shape ``(nnz,)``."""
        return frozen(self.rows * np.int64(self.shape[1]) + self.indices)

    @property
    def digest(self) -> str:
        """A digest of the structure. Patterns with the same digest are equal, not the other way round."""
        return self.structure.digest

    @property
    def index_nbytes(self) -> int:
        """Bytes of `indptr` and `indices`, whether they exist yet or not."""
        rows, columns = self.shape
        return (rows + 1 + self.nnz) * np.dtype(index_dtype(self.nnz, rows, columns)).itemsize

    def to_scipy(self, values: Any = None) -> scipy.sparse.csr_array:
        """A copy of the pattern as a SciPy matrix.

        Parameters
        ----------
        values : array, shape (nnz,), optional
            Values of the entries; True by default.
        """
        values = np.ones(self.nnz, dtype=np.bool_) if values is None else np.array(values)
        if values.shape != (self.nnz,):
            raise ValueError(
                f"values has shape {values.shape}; this pattern has {self.nnz} entries: expected ({self.nnz},)"
            )
        # SciPy sorts, sums and drops entries in place.
        return scipy.sparse.csr_array((values, self.indices.copy(), self.indptr.copy()), shape=self.shape)

    @classmethod
    def from_scipy(cls, matrix: Any) -> Self:
        """The stored positions of a SciPy matrix, explicit zeros included.

        Examples
        --------
        >>> import scipy.sparse
        >>> Pattern.from_scipy(scipy.sparse.eye(3)) == Pattern((3, 3), [0, 1, 2, 3], [0, 1, 2])
        True
        """
        if not scipy.sparse.issparse(matrix) or matrix.ndim != 2:
            raise TypeError(f"matrix is {a_type(matrix)}; expected a two-dimensional SciPy sparse matrix or array")
        matrix = scipy.sparse.csr_array(matrix, copy=True)
        matrix.sum_duplicates()
        return cls(matrix.shape, matrix.indptr, matrix.indices)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the description of the pattern's structure to an ``.npz`` file, without pickle."""
        write_archive(path, "pattern", self._content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a pattern that `save` wrote, checking all of it.

        Raises
        ------
        FileNotFoundError
            Where there is no such file.
        ValueError
            Where the file is damaged, or is no pattern.
        """
        return cls._from_content(read_archive(path, "pattern"), str(path))

    @property
    def _content(self) -> dict[str, Any]:
        return {"structure": type(self.structure).__name__, **self.structure.describe()}

    @classmethod
    def _from_content(cls, content: dict[str, Any], source: str) -> Self:
        kind = Structure.by_name.get(str(content.get("structure")))
        if kind is None:
            raise ValueError(
                f"{source}: unknown structure {content.get('structure')!r}; known are {', '.join(Structure.by_name)}"
            )
        try:
            return cls.of(kind.restore(content))
        except (TypeError, ValueError, OverflowError, MemoryError) as error:
            raise ValueError(f"{source}: no valid pattern: {error}") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pattern):
            return NotImplemented
        if self is other:
            return True
        if self.shape != other.shape or self.nnz != other.nnz:
            return False
        if not isinstance(self.structure, Csr) and self.structure == other.structure:
            return True
        full = self.nnz == self.shape[0] * self.shape[1]
        return full or (np.array_equal(self.indptr, other.indptr) and np.array_equal(self.indices, other.indices))

    def __hash__(self) -> int:
        # Equal patterns may have different structures, but never a different size.
        return hash((self.shape, self.nnz))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickled, (self._content,))

    def summary(self) -> str:
        """One line: shape, nnz, sparsity and structure."""
        rows, columns = self.shape
        return f"{rows} × {columns}, nnz {self.nnz:,}, sparsity {self.sparsity:.5f}, {self.structure.name}"

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        ax: Any = None,
        title: str = "",
        axes: tuple[str, str] = ("input", "output"),
    ) -> Any:
        """Draw the pattern, with a dark cell where any of its positions has an entry.

        Parameters
        ----------
        path : str or PathLike, optional
            The file, such as ``pattern.png``.
        ax : matplotlib.axes.Axes, optional
            What to draw on; left out, a figure of its own, which ``matplotlib.pyplot`` shows where there is no `path`.
        title : str
            What is said before the shape and the number of entries.
        axes : (str, str)
            What the columns and what the rows are.

        Returns
        -------
        matplotlib.axes.Axes
            What it is drawn on.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If the file's suffix is no format of a figure.
        """
        return plot_pattern(self, path, ax, title, axes)

    def __repr__(self) -> str:
        return f"<Pattern {self.summary()}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the line of ``repr``, and a picture."""
        return as_html(repr(self), self)

    def __str__(self) -> str:
        limit = (64, 64 if isinstance(self.structure, Full) else 80)
        return f"{self.summary()}\n{'(empty)' if 0 in self.shape else braille(picture(self, limit))}"


def _unpickled(content: dict[str, Any]) -> Pattern:
    return Pattern._from_content(content, "pickle")
