"""What a report may hold survives the way to the journal and back."""

from __future__ import annotations

import math

import numpy
import pytest

from holdfast.errors import MetricsError
from holdfast.wire.metrics import decode_metrics, encode_metrics


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"loss": 0.5, "step": 3, "name": "x", "ok": True, "none": None},
        {"eval": {"acc": 0.5, "per_class": [1, 2.5, [3]]}},
        {"text": 'a "quoted" null\nline', "umlaut": "ä"},
        {"big": 2**62, "negative": -1},
    ],
)
def test_plain_metrics_come_back_as_they_were(metrics: dict[str, object]) -> None:
    assert decode_metrics(encode_metrics(metrics)) == metrics


def test_nan_and_infinity_come_back() -> None:
    back = decode_metrics(encode_metrics({"loss": math.nan, "nested": {"top": math.inf, "low": [-math.inf]}}))
    assert math.isnan(back["loss"])
    assert back["nested"] == {"top": math.inf, "low": [-math.inf]}


def test_numpy_scalars_become_numbers() -> None:
    metrics = {"a": numpy.float32(0.5), "b": numpy.int64(3), "c": numpy.bool_(True), "d": numpy.array(2.5)}
    assert decode_metrics(encode_metrics(metrics)) == {"a": 0.5, "b": 3, "c": True, "d": 2.5}


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (numpy.zeros(3), r"\.tolist\(\)"),
        ({1, 2}, r"sorted\(\)"),
        (object(), r"str\(value\)"),
        (b"bytes", r"str\(value\)"),
        (1j, r"str\(value\)"),
    ],
)
def test_what_json_cannot_hold_is_named_with_the_way_out(value: object, advice: str) -> None:
    with pytest.raises(MetricsError, match=advice) as caught:
        encode_metrics({"eval": {"bad": value}})
    assert "'eval/bad'" in str(caught.value)


def test_a_tensor_is_told_to_call_item() -> None:
    tensor = type("Tensor", (), {"__module__": "torch"})()
    with pytest.raises(MetricsError, match=r"'loss' is a torch\.Tensor.*\.item\(\)"):
        encode_metrics({"loss": tensor})


def test_metrics_must_be_a_dict_with_text_keys() -> None:
    with pytest.raises(MetricsError, match="a dict of metrics"):
        encode_metrics([1, 2])  # type: ignore[arg-type]
    with pytest.raises(MetricsError, match="keys must be text"):
        encode_metrics({(1, 2): 3})  # type: ignore[dict-item]
