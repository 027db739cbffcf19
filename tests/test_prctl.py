from __future__ import annotations

import errno

import pytest

from oracle.prctl import prctl


def test_a_setting_that_the_kernel_does_not_know_is_an_error() -> None:
    with pytest.raises(OSError, match=r"prctl\(123456, 0\) failed") as caught:
        prctl(123456, 0)
    assert caught.value.errno == errno.EINVAL
