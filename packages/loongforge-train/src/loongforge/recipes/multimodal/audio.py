"""Sound: log-mel spectra and a Conformer encoder."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from loongforge.recipes.multimodal.config import AudioConfig

WINDOW_SECONDS = 0.025


def mel_filters(mels: int, bins: int, rate: int) -> Tensor:
    """Return triangular filters (mels, bins) on the mel scale 2595 log10(1 + f / 700)."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, mels + 2, dtype=torch.float64) / 2595) - 1)
    frequencies = torch.linspace(0, rate / 2, bins, dtype=torch.float64)
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0).float()


class LogMel(nn.Module):
    """Waveform to log-mel spectra; no parameters, computed in float32."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        self.size = round(config.rate * WINDOW_SECONDS)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return window and filters on ``device``."""
        known = self._tables.get(device)
        if known is None:
            filters = mel_filters(self.config.mels, self.size // 2 + 1, self.config.rate)
            known = (torch.hann_window(self.size, device=device), filters.to(device))
            self._tables[device] = known
        return known

    def forward(self, waveform: Tensor) -> Tensor:
        """Turn (B, S) into (B, S / hop + 1, mels)."""
        window, filters = self.tables(waveform.device)
        spectrum = torch.stft(
            waveform.float(), self.size, self.config.hop, window=window, center=True, return_complex=True
        )
        power = spectrum.real.square() + spectrum.imag.square()
        return torch.log((filters @ power).clamp(min=1e-6)).transpose(1, 2)


class ConvolutionModule(nn.Module):
    """Pointwise GLU, depthwise convolution, norm, SiLU, pointwise."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.norm = nn.LayerNorm(d)
        self.enter = nn.Linear(d, 2 * d)
        self.depthwise = nn.Conv1d(d, d, config.kernel, padding=config.kernel // 2, groups=d)
        self.middle_norm = nn.LayerNorm(d)
        self.leave = nn.Linear(d, d)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """Transform (B, T, D); frames outside ``valid`` (B, T) do not leak into their neighbours."""
        y = functional.glu(self.enter(self.norm(x)), dim=-1) * valid[..., None]
        y = self.depthwise(y.transpose(1, 2)).transpose(1, 2)
        return self.leave(functional.silu(self.middle_norm(y)))


class HalfFeedForward(nn.Module):
    """Feed-forward module, added with half weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.enter = nn.Linear(width, 4 * width)
        self.leave = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (..., D)."""
        return 0.5 * self.leave(functional.silu(self.enter(self.norm(x))))


class SelfAttention(nn.Module):
    """Pre-norm full self-attention over valid positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Attend over (B, T, D) with an additive key bias (B, 1, 1, T)."""
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = bias.to(q.dtype).expand(b, self.heads, t, -1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


class ConformerBlock(nn.Module):
    """Half feed-forward, attention, convolution, half feed-forward, norm."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.first = HalfFeedForward(d)
        self.attention = SelfAttention(d, config.heads)
        self.convolution = ConvolutionModule(config)
        self.second = HalfFeedForward(d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x: Tensor, valid: Tensor, bias: Tensor) -> Tensor:
        """Transform (B, T, D)."""
        x = x + self.first(x)
        x = x + self.attention(x, bias)
        x = x + self.convolution(x, valid)
        return self.norm(x + self.second(x))


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Return sinusoidal positions (length, width)."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=device) * (-math.log(10_000) / width)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * exponent.exp()
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[:, :width]


class AudioEncoder(nn.Module):
    """Waveform to sound tokens: log-mel, four spectra a token, Conformer blocks."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        self.spectra = LogMel(config)
        self.enter = nn.Linear(4 * config.mels, config.hidden_size)
        self.layers = nn.ModuleList(ConformerBlock(config) for _ in range(config.layers))

    def forward(self, waveform: Tensor, valid: Tensor) -> Tensor:
        """Encode (B, S) as (B, tokens, D); ``valid`` (B, tokens) marks tokens with recorded sound."""
        mel = self.spectra(waveform)
        count = valid.shape[1]
        joined = mel[:, : 4 * count].reshape(mel.shape[0], count, -1).to(self.enter.weight.dtype)
        x = self.enter(joined)
        x = x + sinusoids(count, x.shape[-1], x.device).to(x.dtype)
        # Nothing to attend to would be a division by zero: a silent window attends to all of itself.
        keep = valid | ~valid.any(dim=1, keepdim=True)
        bias = torch.zeros(keep.shape, dtype=x.dtype, device=x.device).masked_fill(~keep, float("-inf"))
        for layer in self.layers:
            x = layer(x, keep, bias[:, None, None, :])
        return x
