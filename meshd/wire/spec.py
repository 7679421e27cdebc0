"""What a codec's name says: `NAME` or `NAME:key=value,...` (DESIGN section 3).

A codec of the masked family is four choices, predictor x basis x mask x values, and their numbers. A name is a preset
of them; keys change single choices: `spectral:bits=1.5`, `topk:keep=0.05,values=bf16`. Frames carry the same text, so
that a receiver decodes what it was sent, whatever its own run spec says.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from meshd.errors import ConfigError
from meshd.naming import Number, number, split

Predictor = Literal["none", "mean", "token"]
Basis = Literal["identity", "spectral"]
Mask = Literal["none", "random", "topk", "leading", "waterfill"]
Values = Literal["bf16", "int8", "packed", "entropy"]
Rescale = Literal["none", "sqrt", "rms", "unbiased"]


@dataclass(frozen=True)
class MaskedSpec:
    """One member of the masked family.

    predictor: what is subtracted first, forward only: nothing, the prior's mean, or what it predicts from the token.
    basis: the coordinates that are masked and quantized. mask: which of them cross: all, `keep` of them at random
    (shared seed, no bytes), the `keep` largest per token (positions cross), the `keep` leading ones of the spectral
    basis, or as many as the bits allow (waterfill). values: how they cross; `packed` is Lloyd-Max with whole bits.
    keep: share of hidden. bits: per kept value (packed), or per value of the whole tensor (waterfill, entropy: then
    everything is in it, gains and outlier marks too). rescale: what survivors of a random mask are multiplied by: 1,
    1/sqrt(keep), what keeps the token's rms, or 1/keep (unbiased, unstable; DESIGN section 3).
    """

    predictor: Predictor = "none"
    basis: Basis = "identity"
    mask: Mask = "none"
    values: Values = "bf16"
    keep: float = 1.0
    bits: float = 8.0
    rescale: Rescale = "none"

    @property
    def needs_prior(self) -> bool:
        """Whether it can do nothing before a boundary prior is there."""
        return self.predictor != "none" or self.basis == "spectral"


PRESETS = {
    "random": MaskedSpec(mask="random", keep=0.1),
    "topk": MaskedSpec(mask="topk", values="int8", keep=0.1),
    "leading": MaskedSpec("token", "spectral", "leading", "packed", keep=0.25, bits=4),
    "lloyd": MaskedSpec("token", "spectral", "waterfill", "packed", bits=1.0),
    "spectral": MaskedSpec("token", "spectral", "waterfill", "entropy", bits=1.0),
}

_CHOICES = {
    "predictor": get_args(Predictor),
    "basis": get_args(Basis),
    "mask": get_args(Mask),
    "values": get_args(Values),
    "rescale": get_args(Rescale),
}
_NUMBERS = {"keep": Number(0.0, 1.0, over=True), "bits": Number(0.0, 16.0, over=True)}


def parse(text: str, field: str) -> MaskedSpec:
    """The member of the masked family that a codec's name means.

    Raises ConfigError with `field`, for a name, key or value that is not one, and for choices that do not go together.
    """
    name, options = split(text, field, PRESETS, "codec")
    changes = {key: _value(key, value, text, field) for key, value in options.items()}
    spec = replace(PRESETS[name], **changes)  # type: ignore[arg-type]  # checked by _value
    _check(spec, text, field)
    return spec


def _value(key: str, value: str, text: str, field: str) -> str | float:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise ConfigError(field, text, f"{key}={value}", f"{key} is one of {', '.join(_CHOICES[key])}")
        return value
    if key not in _NUMBERS:
        keys = ", ".join(item.name for item in fields(MaskedSpec))
        raise ConfigError(field, text, f"no key {key!r}", f"one of {keys}")
    return number(key, value, _NUMBERS[key], text, field)


def _check(spec: MaskedSpec, text: str, field: str) -> None:
    """Choices that mean nothing together. Raises ConfigError."""

    def wrong(problem: str, fix: str) -> ConfigError:
        return ConfigError(field, text, problem, fix)

    if spec.mask in ("leading", "waterfill") and spec.basis != "spectral":
        raise wrong(f"mask={spec.mask} needs coordinates in order of energy", "basis=spectral")
    if spec.mask == "waterfill" and spec.values not in ("packed", "entropy"):
        raise wrong(f"waterfill allots bits, values={spec.values} has no choice", "values=packed or entropy")
    if spec.values == "entropy" and spec.mask != "waterfill":
        raise wrong("an entropy coder drops coordinates by itself", "mask=waterfill")
    if spec.values == "packed" and spec.mask != "waterfill" and spec.bits not in range(1, 11):
        raise wrong(f"packed values take whole bits, bits={spec.bits:g}", "bits=1 to 10")
    if spec.rescale != "none" and spec.mask != "random":
        raise wrong("rescale is for a random mask", "mask=random, or leave rescale out")
    if spec.keep != 1.0 and spec.mask in ("none", "waterfill"):
        raise wrong(f"mask={spec.mask} does not look at keep", "leave keep out, or another mask")
