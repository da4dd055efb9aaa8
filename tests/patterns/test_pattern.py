"""`Pattern`: construction, comparison, conversion and files."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from jacsparse.patterns import Adaptive, Blocks, Convolution, Csr, Diagonal, Full, Identity, Pooling, Sliding, Structure
from jacsparse.patterns.strided import Steps, Strided
from jacsparse.spgemm import meeting
from torch import nn

import jacsparse
from jacsparse import Pattern
from tests.helpers import reference_rows

STRUCTURES = [
    Diagonal(5),
    Identity(4),
    Full(3, 4),
    Full(0, 3),
    Blocks(2, 3, 4, 5),
    Blocks(2, 3, 0, 4),
    Convolution(4, 2, 2, (Sliding(5, 3, 2, 1, 0, 1), Sliding(4, 2)), np.packbits(np.arange(24) % 3 > 0).tobytes()),
    Convolution(3, 2, 1, ()).T,
    Pooling(2, (Sliding(5, 2, 2, 1, 1, 1, True), Sliding(4, 3)), selects=True),
    Pooling(3, (Adaptive(5, 3), Adaptive(2, 4))).T,
    Strided(12, 1, (Steps(3, 0, 3, 4), Steps(4, 1, 3, 1))),
    Strided(6, 5, (Steps(2, 0, 2, -3), Steps(3, 0, 3, -1), Steps(2, 0, 2, 0))).T,
]


@st.composite
def matrices(draw: st.DrawFn) -> scipy.sparse.csr_array:
    shape = draw(st.integers(0, 8)), draw(st.integers(0, 8))
    seed, density = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.0, 0.1, 0.4, 1.0]))
    return scipy.sparse.csr_array(np.random.default_rng(seed).random(shape) < density)


@given(matrices())
def test_round_trips(matrix: scipy.sparse.csr_array) -> None:
    pattern = Pattern.from_scipy(matrix)
    assert pattern.shape == matrix.shape and pattern.nnz == matrix.nnz
    assert (pattern.to_scipy() != matrix).nnz == 0
    assert pattern.T.T is pattern and (pattern.T.to_scipy() != matrix.T).nnz == 0
    assert pickle.loads(pickle.dumps(pattern)) == pattern and hash(pattern) == hash(Pattern.from_scipy(matrix))
    values = np.arange(pattern.nnz, dtype=float)
    expected = pattern.to_scipy(values).T.tocsr()
    expected.sort_indices()
    assert np.array_equal(values[pattern.transposition], expected.data)


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_files_keep_pattern_and_structure(structure: object, tmp_path: Path) -> None:
    pattern = Pattern.of(structure)  # type: ignore[arg-type]
    pattern.save(tmp_path / "p.npz")
    loaded = Pattern.load(tmp_path / "p.npz")
    assert loaded == pattern and type(loaded.structure) is type(structure) and loaded.digest == pattern.digest
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    plain = Pattern(pattern.shape, pattern.indptr, pattern.indices)
    assert plain == pattern and hash(plain) == hash(pattern) and plain.digest != pattern.digest
    assert [path.name for path in tmp_path.iterdir()] == ["p.npz"]


def _another(part: Any) -> Any:
    """Another value of a part of a structure's description."""
    if isinstance(part, bool):
        return not part
    return part + 1 if isinstance(part, int) else part and part[::-1]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_each_part_of_a_description_is_in_the_digest(structure: Any) -> None:
    parts = {field.name: getattr(structure, field.name) for field in fields(structure)}
    changed = [replace(structure, **{name: _another(part)}) for name, part in parts.items() if _another(part) != part]
    digests = {each.digest for each in (structure, *changed)}
    assert len(digests) == 1 + len(changed) > 1


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_a_scaled_pattern_has_the_same_entries_of_any_values(structure: Structure) -> None:
    pattern = Pattern.of(structure)
    for scaled in (pattern.scaled(), pattern.T.scaled().T):
        assert scaled == pattern
        assert not isinstance(scaled.structure, Identity) and not getattr(scaled.structure, "selects", False)


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_what_meets_a_vector_is_counted_without_indices(structure: Structure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an attention of 197 tokens would take gigabytes."""
    for each in (structure, structure.T):
        matrix = Pattern.of(each).to_scipy().astype(np.int64)
        with monkeypatch.context() as patch:
            patch.setattr(type(each), "csr", lambda _: pytest.fail("indices were made"))
            for density in (0.0, 0.2, 0.7, 1.0):
                occupied = np.random.default_rng(3).random(each.shape[1]) < density
                pairs = meeting(Pattern.of(each), occupied)
                assert pairs.dtype == np.int64
                assert pairs.tolist() == (matrix @ occupied.astype(np.int64)).tolist()


def test_published_sparsities() -> None:
    operators = {
        "convolution": (nn.Conv2d(3, 64, 3, padding=1), (3, 32, 32)),
        "relu": (nn.ReLU(), (64, 32, 32)),
        "max_pool": (nn.MaxPool2d(2), (64, 32, 32)),
    }
    for row in reference_rows("table_3_1.csv"):
        pattern = jacsparse.jacobian_pattern(*operators[row["operator"]])
        assert f"{pattern.sparsity:.5f}" == row["sparsity"]
        assert pattern.T.sparsity == pattern.sparsity


def test_published_memory() -> None:
    pattern = jacsparse.jacobian_pattern(nn.Conv2d(3, 64, 3, padding=1), (3, 32, 32))
    sizes = {"full": pattern.shape[0] * pattern.shape[1] * 4, "csr_values": pattern.nnz * 4}
    for row in reference_rows("section_3_3.csv"):
        assert round(sizes[row["form"]] / 2**20, int(row["decimals"])) == float(row["mebibytes"])
    # The transposed Jacobian with its int32 indices, which the thesis leaves out.
    assert round((sizes["csr_values"] + pattern.T.index_nbytes) / 2**20, 2) == 12.96


def test_arrays_are_read_only_copies() -> None:
    indptr, indices = np.array([0, 1, 2]), np.array([1, 0])
    pattern = Pattern((2, 2), indptr, indices)
    indices[0] = 7
    assert pattern.indices.tolist() == [1, 0] and pattern.indices.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        pattern.indices[0] = 1


def test_strided_and_narrow_arrays_are_taken() -> None:
    assert Pattern((2, 3), np.array([2, 1, 0])[::-1], np.array([2, 9, 0], dtype=np.uint8)[::2]).indices.tolist() == [
        2,
        0,
    ]
    assert Pattern((2, 2), [0, 0, 0], []).nnz == 0
    assert Pattern((0, 0), [0], []).sparsity == 0.0


def test_print_shows_counts_and_a_picture() -> None:
    text = str(Pattern.of(Diagonal(1000)))
    head, *picture = text.splitlines()
    assert head == "1000 × 1000, nnz 1,000, sparsity 0.99900, Diagonal"
    assert len(picture) == 16 and picture[0].startswith("⠑⢄")
    assert "Full" in str(Pattern.of(Full(10**7, 10**7))) and str(Pattern((0, 3), [0], [])).endswith("(empty)")


BAD = {
    "shape negative": (((-1, 2), [0], []), ValueError, r"shape is \(-1, 2\)"),
    "shape not a pair": ((3, [0], []), ValueError, "shape is 3"),
    "shape fractional": (((1.5, 2), [0, 0], []), ValueError, "shape is"),
    "indptr short": (((2, 2), [0, 1], [0]), ValueError, "indptr has 2 elements; a matrix of 2 rows needs 3"),
    "indptr start": (((1, 2), [1, 1], [0]), ValueError, "indptr starts at 1"),
    "indptr falls": (((2, 2), [0, 2, 1], [0]), ValueError, "indptr falls from 2 to 1 at row 1"),
    "indptr end": (((1, 2), [0, 2], [0]), ValueError, "indptr ends at 2, but indices has 1"),
    "indptr overflow": (((1, 2), [0, 2**63 - 1], [0]), ValueError, "indptr ends at"),
    "index beyond": (((1, 2), [0, 1], [2]), ValueError, r"indices\[0\] is 2; columns run from 0 to 1"),
    "index negative": (((1, 2), [0, 1], [-1]), ValueError, r"indices\[0\] is -1"),
    "index huge": (((1, 2), [0, 1], np.array([2**63], dtype=np.uint64)), ValueError, "no index reaches"),
    "unsorted": (((1, 3), [0, 2], [2, 1]), ValueError, r"indices\[1\] is 1 after 2 in the same row"),
    "duplicate": (((2, 3), [0, 1, 3], [2, 1, 1]), ValueError, r"indices\[2\] is 1 after 1"),
    "floats": (((1, 2), [0.0, 1.0], [0]), TypeError, "indptr has dtype float64; expected integers"),
    "two dimensions": (((1, 2), [[0, 1]], [0]), ValueError, "expected one dimension"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays(case: str) -> None:
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message):
        Pattern(*arguments)


def test_bad_conversions() -> None:
    with pytest.raises(TypeError, match="matrix is an ndarray; expected a two-dimensional SciPy"):
        Pattern.from_scipy(np.eye(2))
    with pytest.raises(ValueError, match=r"values has shape \(3,\); this pattern has 2 entries"):
        Pattern.of(Diagonal(2)).to_scipy(np.zeros(3))


def saved(tmp_path: Path, **content: object) -> Path:
    """A file with this content under a pattern's header."""
    path = tmp_path / "edited.npz"
    header = content.pop("header", None)
    arrays = {"header": np.frombuffer(header, dtype=np.uint8)} if isinstance(header, bytes) else {}
    np.savez(path, **arrays, **content)
    return path


CONVOLUTION = b'{"jacsparse": "pattern", "structure": "Convolution", '
STEPS = b'{"jacsparse": "pattern", "structure": "Strided", '
PLAIN = b'"out_channels": 1, "in_channels": 1, "groups": 1, "pruned": false, "transposed": false}'
HOSTILE = {
    "no header": {"indptr": np.zeros(1)},
    "header no JSON": {"header": b"{"},
    "header no object": {"header": b"[]"},
    "another kind": {"header": b'{"jacsparse": "cake"}'},
    "unknown structure": {"header": b'{"jacsparse": "pattern", "structure": "Cake"}'},
    "missing arrays": {"header": b'{"jacsparse": "pattern", "structure": "Csr", "rows": 1, "columns": 1}'},
    "negative size": {"header": b'{"jacsparse": "pattern", "structure": "Diagonal", "n": -1}'},
    "size no number": {"header": b'{"jacsparse": "pattern", "structure": "Diagonal", "n": "1"}'},
    "size true": {"header": b'{"jacsparse": "pattern", "structure": "Diagonal", "n": true}'},
    "index out of range": {
        "header": b'{"jacsparse": "pattern", "structure": "Csr", "rows": 1, "columns": 1}',
        "indptr": np.array([0, 1]),
        "indices": np.array([9]),
    },
    "groups do not divide": {
        "header": CONVOLUTION + b'"out_channels": 3, "in_channels": 3, "groups": 2}',
        "axes": np.zeros((0, 7), np.int64),
        "mask_bits": np.zeros(0, np.uint8),
    },
    "stride zero": {
        "header": CONVOLUTION + b'"out_channels": 1, "in_channels": 1, "groups": 1}',
        "axes": np.array([[4, 2, 0, 0, 0, 1, 0]]),
        "mask_bits": np.zeros(0, np.uint8),
    },
    "more columns than 64 bits count": {
        "header": CONVOLUTION + PLAIN,
        "axes": np.array([[65536, 2, 1, 0, 0, 65535, 0]] * 4),
        "mask_bits": np.zeros(0, np.uint8),
    },
    "more channels than 64 bits count": {
        "header": CONVOLUTION + PLAIN.replace(b"1", b"4294967296", 2),
        "axes": np.array([[4, 2, 1, 0, 0, 1, 0]]),
        "mask_bits": np.zeros(0, np.uint8),
    },
    "an axis that fills all memory": {
        "header": CONVOLUTION + PLAIN,
        "axes": np.array([[2**31 - 1, 2**30, 1, 0, 0, 1, 0]]),
        "mask_bits": np.zeros(0, np.uint8),
    },
    "a flag in words": {
        "header": CONVOLUTION + PLAIN.replace(b"false", b'"false"'),
        "axes": np.array([[4, 2, 1, 0, 0, 1, 0]]),
        "mask_bits": np.zeros(0, np.uint8),
    },
    "full beyond 64 bits": {
        "header": b'{"jacsparse": "pattern", "structure": "Full", "m": 4294967296, "n": 4294967296}'
    },
    "mask too short": {
        "header": CONVOLUTION + b'"out_channels": 9, "in_channels": 9, "groups": 1, "pruned": true}',
        "axes": np.zeros((0, 7), np.int64),
        "mask_bits": np.zeros(1, np.uint8),
    },
    "steps beyond the columns": {
        "header": STEPS + b'"columns": 4, "offset": 0, "transposed": false}',
        "axes": np.array([[3, 0, 3, 2]]),
    },
    "steps before the first column": {
        "header": STEPS + b'"columns": 9, "offset": 1, "transposed": true}',
        "axes": np.array([[3, 0, 3, -1]]),
    },
    "steps outside of their axis": {
        "header": STEPS + b'"columns": 9, "offset": 0, "transposed": false}',
        "axes": np.array([[3, 0, 4, 1]]),
    },
    "an offset beyond 64 bits": {
        "header": STEPS + b'"columns": 9, "offset": 18446744073709551616, "transposed": false}',
        "axes": np.array([[3, 0, 3, 1]]),
    },
    "pooling axes missing": {"header": b'{"jacsparse": "pattern", "structure": "Pooling", "channels": 1}'},
    "adaptive axes negative": {
        "header": b'{"jacsparse": "pattern", "structure": "Pooling", "channels": 1, "adaptive": true}',
        "axes": np.array([[-1, 2]]),
    },
}


def moved(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The array after one of the ways in which operators move elements; -1 where there is none."""
    axis = int(rng.integers(array.ndim))
    return (
        lambda: array.transpose(rng.permutation(array.ndim)),
        lambda: array[tuple(slice(rng.integers(size), None, rng.integers(1, 3)) for size in array.shape)],
        lambda: np.flip(array, axis),
        lambda: np.pad(array, rng.integers(0, 3, (array.ndim, 2)), constant_values=-1),
        lambda: np.broadcast_to(array, (rng.integers(1, 3), *array.shape)),
        lambda: np.roll(array, 1, axis),
    )[rng.integers(6)]()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 2**31))
def test_moves_in_steps(shape: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = math.prod(shape)
    sources = np.arange(columns).reshape(shape)
    for _ in range(rng.integers(1, 4)):
        sources = moved(sources, rng)
    structure = Strided.from_sources(sources, columns)
    if structure is None:
        return
    plain = Pattern.of(Csr.from_sources(np.ascontiguousarray(sources).reshape(-1), columns))
    pattern = Pattern.of(structure)
    assert (
        np.array_equal(structure.sources(), sources.reshape(-1)) and Strided.restore(structure.describe()) == structure
    )
    for each, expected in ((pattern, plain), (pattern.T, plain.T)):
        assert each == expected and np.array_equal(each.structure.row_counts(), expected.structure.row_counts())
    values = torch.from_numpy(rng.normal(size=(structure.nnz, 1)))
    for each in (structure, structure.T):
        # Those of the entries in the order of the rows before the transpose.
        dense = Pattern.of(structure).to_scipy(values[:, 0].numpy()).toarray()
        dense = dense.T if each.transposed else dense
        vectors = torch.from_numpy(rng.normal(size=(4, len(dense))))[1:]
        product = each.adjoint_product(values, vectors)
        if product is not None:
            np.testing.assert_allclose(product.numpy(), vectors.numpy() @ dense, atol=1e-12)


def test_a_move_of_one_element() -> None:
    structure = Strided.from_sources(np.array(2), 4)
    values, vectors = torch.tensor([[3.0]]), torch.tensor([[1.0, 5.0, 7.0, 9.0], [0.0, 1.0, 2.0, 4.0]])
    assert structure is not None and structure.axes == ()
    assert structure.adjoint_product(values, vectors[:, :1]).tolist() == [[0, 0, 3, 0], [0, 0, 0, 0]]
    assert structure.T.adjoint_product(values, vectors).tolist() == [[21], [6]]


def test_common_moves_are_in_steps() -> None:
    x = np.arange(24).reshape(2, 3, 4)
    beside = np.full((2, 5, 4), -1)
    beside[:, 1:4] = x
    for sources in (x.transpose(2, 0, 1), x[:, 1:, ::2], x[:, ::-1], beside, np.broadcast_to(x[:, :1], x.shape)):
        assert Strided.from_sources(sources, 24) is not None
    assert Strided.from_sources(beside, 24).axes == (Steps(2, 0, 2, 12), Steps(20, 4, 16, 1))
    assert Strided.from_sources(np.roll(x, 1, 2), 24) is None and Strided.from_sources(np.full(3, -1), 24) is None


def test_a_convolution_is_described_without_arrays_of_its_weight() -> None:
    """Those of Wide ResNet-50 would take 2.5 GB."""
    structure = Convolution(512, 512, 1, (Sliding(7, 3, 1, 1, 1), Sliding(7, 3, 1, 1, 1)))
    for each in (structure, structure.T):
        assert each.nnz == 512 * 512 * 19**2 and each.row_counts().sum() == each.nnz
        arrays = [value for value in vars(each).values() if isinstance(value, np.ndarray)]
        assert sum(array.nbytes for array in arrays) < 2**20


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(case: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"edited\.npz"):
        Pattern.load(saved(tmp_path, **HOSTILE[case]))


def test_the_error_names_the_axis_that_is_wrong(tmp_path: Path) -> None:
    axes = np.array([[4, 1, 1, 0, 0, 1, 0], [2**31, 1, 1, 0, 0, 1, 0]])
    path = saved(tmp_path, header=CONVOLUTION + PLAIN, axes=axes, mask_bits=np.zeros(0, np.uint8))
    with pytest.raises(ValueError, match=r"axes holds \[2147483648, 1"):
        Pattern.load(path)


def test_indices_are_wide_where_a_dimension_is() -> None:
    axis = Sliding(65536, 2, dilation=65535)
    pattern = Pattern.of(Convolution(1, 1, 1, (axis, axis)))
    assert pattern.shape == (1, 2**32) and pattern.indices.dtype == np.int64
    assert pattern.indices.tolist() == [0, 65535, 65535 * 65536, 2**32 - 1]
    pooling = Pattern.of(Pooling(1, (Sliding(65536, 1, 32768),) * 2))
    assert pooling.indices.tolist() == [0, 32768, 32768 * 65536, 32768 * 65537]


@pytest.mark.parametrize("channels", [(0, 3), (3, 0), (0, 0)])
def test_no_channels(channels: tuple[int, int]) -> None:
    pattern = Pattern.of(Convolution(*channels, 1, (Sliding(4, 3),)))
    assert pattern.nnz == len(pattern.indices) == len(pattern.T.indices) == 0


def test_a_ceiled_convolution_keeps_its_windows(tmp_path: Path) -> None:
    plain, ceiled = (Pattern.of(Convolution(1, 1, 1, (Sliding(5, 2, 2, ceil_mode=mode),))) for mode in (False, True))
    assert plain.digest != ceiled.digest
    ceiled.save(tmp_path / "p.npz")
    assert Pattern.load(tmp_path / "p.npz") == ceiled


def test_a_pattern_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Pattern.of(Diagonal(2)).structure = Diagonal(3)  # type: ignore[misc]


def test_scipy_matrices_are_copies() -> None:
    pattern, values = Pattern.of(Diagonal(3)), np.array([1.0, 0.0, 1.0])
    pattern.to_scipy(values).eliminate_zeros()
    assert values.tolist() == [1, 0, 1]


def test_pickled_objects_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "edited.npz"
    np.savez(path, header=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="cannot be read as a pattern"):
        Pattern.load(path)


@given(data=st.data())
def test_damaged_files_never_crash(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "p.npz"
    original = Pattern.of(data.draw(st.sampled_from(STRUCTURES)))
    original = data.draw(st.sampled_from([original, Pattern(original.shape, original.indptr, original.indices)]))
    original.save(path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        loaded = Pattern.load(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        # What passes is a valid pattern: perhaps the damage was where nothing is read.
        assert Pattern(loaded.shape, loaded.indptr, loaded.indices) == loaded


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*p\.npz"):
        Pattern.load(tmp_path / "p.npz")
    (tmp_path / "text.npz").write_text("not an archive", encoding="utf-8")
    with pytest.raises(ValueError, match=r"text\.npz cannot be read as a pattern"):
        Pattern.load(tmp_path / "text.npz")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("header.npy", b"\x93NUMPY\x01\x00" + b"\xff" * 40)
    (tmp_path / "zip.npz").write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match=r"zip\.npz"):
        Pattern.load(tmp_path / "zip.npz")


def test_compressed_files(tmp_path: Path) -> None:
    Pattern.of(Diagonal(2)).save(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as archive:
        np.savez_compressed(tmp_path / "small.npz", **archive, more=np.zeros(10**7))
    with pytest.raises(ValueError, match=r"small\.npz cannot be read as a pattern \(its members are compressed"):
        Pattern.load(tmp_path / "small.npz")


def test_a_link_stays_one_and_files_are_as_readable_as_any(tmp_path: Path) -> None:
    (tmp_path / "link.npz").symlink_to(tmp_path / "p.npz")
    Pattern.of(Diagonal(2)).save(tmp_path / "link.npz")
    (tmp_path / "other").touch()
    assert (tmp_path / "link.npz").is_symlink() and Pattern.load(tmp_path / "p.npz").nnz == 2
    assert (tmp_path / "p.npz").stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(FileNotFoundError, match="no file"):
        Pattern.load(tmp_path)


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        Pattern.of(Diagonal(2)).save(tmp_path / "no" / "p.npz")
    target = tmp_path / "p.npz"
    Pattern.of(Diagonal(2)).save(target)
    before = target.read_bytes()
    with pytest.raises(TypeError):
        from jacsparse.runtime import write_archive

        write_archive(target, "pattern", {"unwritable": object()})
    assert target.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["p.npz"]
