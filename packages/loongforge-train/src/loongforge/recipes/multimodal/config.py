"""Sizes of the multimodal model."""

from __future__ import annotations

from dataclasses import dataclass, field

from loongforge.recipes.gr00t_n1_6.config import LanguageConfig, VisionConfig


@dataclass(frozen=True, kw_only=True)
class AudioConfig:
    """Conformer encoder of sound.

    Attributes:
        rate: Samples per second of the waveform.
        seconds: Length of the window before each frame, seconds.
        mels: Mel bands of the spectrogram.
        hidden_size: Width of a sound token.
        layers: Number of Conformer blocks.
        heads: Attention heads.
        kernel: Width of the depthwise convolution, frames (odd).
    """

    rate: int = 16_000
    seconds: float = 2.0
    mels: int = 80
    hidden_size: int = 512
    layers: int = 12
    heads: int = 8
    kernel: int = 31

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads or self.kernel % 2 == 0:
            msg = (
                f"audio hidden_size {self.hidden_size} must divide by heads {self.heads} and kernel "
                f"{self.kernel} must be odd"
            )
            raise ValueError(msg)

    @property
    def samples(self) -> int:
        """Samples of a window."""
        return round(self.rate * self.seconds)

    @property
    def hop(self) -> int:
        """Samples between two spectra: 10 ms."""
        return self.rate // 100

    @property
    def tokens(self) -> int:
        """Sound tokens of a window: four spectra each."""
        return (self.samples // self.hop + 1) // 4


@dataclass(frozen=True, kw_only=True)
class SeriesConfig:
    """Encoder of inertial and other time series.

    Attributes:
        channels: Numbers per row at most; narrower series are filled with zeros.
        rows: Rows of a window.
        patch: Rows joined into one token.
        hidden_size: Width of a series token.
        layers: Number of transformer layers.
        heads: Attention heads.
    """

    channels: int = 64
    rows: int = 64
    patch: int = 8
    hidden_size: int = 256
    layers: int = 4
    heads: int = 4

    def __post_init__(self) -> None:
        if self.rows % self.patch or self.hidden_size % self.heads:
            msg = (
                f"series rows {self.rows} must divide by patch {self.patch}, and hidden_size "
                f"{self.hidden_size} by heads {self.heads}"
            )
            raise ValueError(msg)

    @property
    def tokens(self) -> int:
        """Tokens of a window."""
        return self.rows // self.patch


@dataclass(frozen=True, kw_only=True)
class MultimodalConfig:
    """A whole model.

    Attributes:
        vision: Vision transformer.
        audio: Sound encoder.
        series: Encoder of inertial series.
        language: Long-context decoder; its vocabulary ends with the action tokens.
        action_bins: Values of one action token; they take the last ids of the vocabulary.
        action_steps: Predicted steps; each has one token per action dimension.
        recompute: Recompute decoder layers in backward.
    """

    vision: VisionConfig = field(default_factory=VisionConfig)
    audio: AudioConfig = field(default_factory=AudioConfig)
    series: SeriesConfig = field(default_factory=SeriesConfig)
    language: LanguageConfig = field(default_factory=LanguageConfig)
    action_bins: int = 256
    action_steps: int = 8
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.action_bins < 2 or self.action_bins + 512 > self.language.vocab_size:
            msg = (
                f"action_bins must lie in [2, vocab_size - 512 = {self.language.vocab_size - 512}], got "
                f"{self.action_bins}"
            )
            raise ValueError(msg)

    @property
    def first_action_id(self) -> int:
        """Id of the token of action bin 0."""
        return self.language.vocab_size - self.action_bins
