"""Options decide fingerprints of studies: their texts stay as they are."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hwnas.accuracy.proxy import ProxyOptions
from hwnas.cli.options import read_options
from hwnas.target import Target

PROXY_TEXT = ("ProxyOptions(train_images=5120, validation_images=2048, image_size=0)")


@pytest.mark.parametrize(("cls", "given", "text"), [
    (ProxyOptions, {}, PROXY_TEXT),
    (Target, {"name": "x", "runtime": "openvino", "precision": "int8", "price_per_hour": 2},
     "Target(name='x', runtime='openvino', precision='int8', threads=1, batch=1, vendor='', device='cpu', "
     "price_per_hour=2.0)"),
])
def test_the_text_of_options_stays(cls, given, text):
    assert str(read_options(cls, given)) == text
