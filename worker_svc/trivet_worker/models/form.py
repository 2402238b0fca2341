"""How a model's steps run, as the settings name it."""

from typing import Literal

ModelForm = Literal["auto", "native", "layers"]
"""native: a whole step in native code; layers: layer by layer over a backend's operators; auto: native where it can."""
