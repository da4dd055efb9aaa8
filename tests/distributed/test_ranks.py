"""The headers of messages between ranks."""

from __future__ import annotations

import pytest
import torch

from jacsparse.distributed.ranks import described


def test_headers_have_one_length_for_tensors_of_any_axes() -> None:
    headers = [described([torch.zeros(shape)]) for shape in ((), (3,), (2, 0, 4), (1,) * 8)]
    assert [header[1] for header in headers] == [0, 1, 3, 8]
    assert len({len(header) for header in headers}) == 1
    assert headers[2][2:5] == [2, 0, 4]
    assert described([torch.zeros(3), torch.zeros(2, 0, 4)]) == headers[1] + headers[2]


@pytest.mark.parametrize(("axes", "dtype"), [(9, torch.float32), (1, torch.complex64)])
def test_what_no_header_describes(axes: int, dtype: torch.dtype) -> None:
    message = f"{dtype} with {axes} axes cannot be sent; expected real numbers, and 8 axes at most"
    with pytest.raises(TypeError, match=message):
        described([torch.zeros((1,) * axes, dtype=dtype)])
