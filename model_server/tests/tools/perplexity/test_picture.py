"""The picture: XML with every value in it, inside its frame, whatever the models."""

from xml.etree import ElementTree

import pytest

from funitel.model_server.tools.perplexity.picture import Panel, Point, picture_of
from funitel.model_server.tools.perplexity.report import QualityReport, Row
from funitel.model_server.tools.perplexity.scores import Distance, Likelihood

SVG = "{http://www.w3.org/2000/svg}"


def row(name: str, perplexity: float, kl: float | None = None, error: float = 0.5) -> Row:
    distance = None
    if kl is not None:
        distance = Distance(
            perplexity_ratio=1.0,
            perplexity_ratio_error=0.0,
            kl_mean=kl,
            kl_p99=kl,
            kl_max=kl,
            same_top_token=1.0,
        )
    likelihood = Likelihood(perplexity=perplexity, perplexity_error=error, bits_per_byte=1.0)
    return Row(
        name=name,
        model="m",
        precision="float32",
        kv_precision="float32",
        weight_bytes=1,
        tokens_per_second=1.0,
        likelihood=likelihood,
        distance=distance,
    )


def report(*rows: Row) -> QualityReport:
    is_compared = any(each.distance is not None for each in rows)
    return QualityReport(
        text="<a & b>.txt",
        num_tokens=10,
        num_bytes=40,
        window=512,
        stride=512,
        reference=rows[0].name if is_compared else None,
        rows=rows,
    )


def texts(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_it_has_the_values_the_names_and_labels_of_both_axes() -> None:
    found = texts(picture_of(report(row("float32", 12.3456), row("int8", 12.5, 0.0123), row("a/<b>", 13.25, 0.4))))
    for said in ("12.346", "12.500", "13.250", "0.012", "0.4", "reference", "perplexity", "precision or model"):
        assert said in found, said
    assert "KL divergence from float32, nats" in found
    assert any("<a & b>.txt: 10 tokens" in each for each in found)
    assert any(each.endswith("<b>") for each in found)


def test_without_a_reference_there_is_one_panel() -> None:
    found = texts(picture_of(report(row("model", 7.0))))
    assert "7.000" in found
    assert not any("KL" in each for each in found)


def test_a_model_that_does_not_differ_has_no_place_on_a_logarithmic_axis() -> None:
    found = texts(picture_of(report(row("float32", 7.0), row("float16", 7.0, 0.0), row("int8", 7.1, 1e-3))))
    assert "0" in found
    assert "0.001" in found
    assert not any("KL" in each for each in texts(picture_of(report(row("a", 7.0), row("b", 7.0, 0.0)))))


@pytest.mark.parametrize(
    ("values", "is_log"), [([7.0], False), ([1e6, 2.0], False), ([1e-9, 0.3], True), ([1.0], True)]
)
def test_marks_are_inside_the_panel(values: list[float], is_log: bool) -> None:
    panel = Panel("x", is_log, [Point(str(value), value, 0.0, str(value)) for value in values])
    assert 2 <= len(panel.ticks) <= 10
    for value in values:
        assert 0 <= panel.y(value) <= panel.y(panel.ticks[0])
    assert panel.y(panel.ticks[-1]) == 0


def test_colours_follow_the_scheme_of_the_reader() -> None:
    svg = picture_of(report(row("m", 7.0)))
    assert "prefers-color-scheme: dark" in svg
    root = ElementTree.fromstring(svg)
    assert root.get("viewBox", "").split()[2:] == [root.get("width"), root.get("height")]
