"""Shapes of the models behind the synthetic traces; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """A plain transformer.

    Attributes:
        layers: number of blocks.
        width: model width.
        heads: attention heads.
        mlp: inner width of the MLP.
        gated: SwiGLU instead of GELU.
        vocabulary: size of the output; 0 ends in a mean instead of logits.
        causal: causal attention.
        recompute: recompute every block in backward.
    """

    layers: int
    width: int
    heads: int
    mlp: int
    gated: bool = False
    vocabulary: int = 0
    causal: bool = False
    recompute: bool = False
