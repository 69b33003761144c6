"""Sizes and switches of a GR00T N1.6 model; the defaults are those of the published 3B checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """SigLIP2 tower.

    Attributes:
        hidden_size: Width of a patch token.
        layers: Number of encoder blocks, all of which run.
        heads: Attention heads; ``hidden_size`` must divide by it.
        mlp_size: Inner width of the MLP.
        patch_size: Side of a square patch, pixels.
        position_grid: Side of the square table of learned positions, patches; resized to each image's grid.
        layer_norm_eps: Epsilon of every LayerNorm of the tower.
    """

    hidden_size: int = 1152
    layers: int = 27
    heads: int = 16
    mlp_size: int = 4304
    patch_size: int = 14
    position_grid: int = 16
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            msg = (
                f"vision hidden_size {self.hidden_size} does not divide by heads {self.heads}; "
                "choose a width that is a multiple of the number of heads"
            )
            raise ValueError(msg)


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Qwen3 decoder, cut at the layer whose output feeds the action head.

    Attributes:
        hidden_size: Width of a token.
        layers: Number of decoder layers that exist and run (``select_layer`` of the checkpoint's config).
        heads: Query heads.
        kv_heads: Key and value heads; must divide ``heads``.
        head_dim: Width of one head (not ``hidden_size / heads`` in general).
        mlp_size: Inner width of the gated MLP.
        vocab_size: Rows of the embedding table.
        rope_theta: Base of the rotary frequencies.
        rms_norm_eps: Epsilon of every RMSNorm.
        image_token_id: Token whose embedding is replaced by a connector row.
        pad_token_id: Token written at padded positions.
    """

    hidden_size: int = 2048
    layers: int = 16
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    mlp_size: int = 6144
    vocab_size: int = 151_680
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    image_token_id: int = 151_669
    pad_token_id: int = 151_643

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            msg = (
                f"language kv_heads {self.kv_heads} does not divide heads {self.heads}; "
                "every key head serves the same number of query heads"
            )
            raise ValueError(msg)


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Diffusion transformer of the action head.

    Attributes:
        layers: Number of blocks; even blocks attend to the backbone, odd ones to themselves.
        heads: Attention heads.
        head_dim: Width of one head; the token width is ``heads * head_dim``.
        output_size: Width of the rows handed to the action decoder.
        attend_text_every_n_blocks: Of the cross-attention blocks every n-th reads text, the others images.
        dropout: Probability of the four dropouts of a block, in training mode only.
    """

    layers: int = 32
    heads: int = 32
    head_dim: int = 48
    output_size: int = 1024
    attend_text_every_n_blocks: int = 2
    dropout: float = 0.2

    @property
    def width(self) -> int:
        """Return the width of a token of the transformer."""
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Action head around the DiT: encoders, decoder, flow matching.

    Attributes:
        max_state_dim: Width of the padded state vector.
        max_action_dim: Width of a padded action.
        action_horizon: Number of padded action steps.
        hidden_size: Inner width of the state encoder and of the action decoder.
        max_positions: Rows of the action position table.
        max_embodiments: Slots of the embodiment-specific layers.
        inference_steps: Euler steps of the denoising loop.
        timestep_buckets: Integer resolution of the flow time.
        beta_alpha: First parameter of the Beta distribution of the flow time.
        beta_beta: Second parameter of it.
        time_scale: Factor on ``1 - s``; keeps the time below 1.
        state_dropout: Probability of replacing the state token by the learned mask token.
        state_noise: Standard deviation of Gaussian noise added to the encoded state in training.
    """

    max_state_dim: int = 128
    max_action_dim: int = 128
    action_horizon: int = 50
    hidden_size: int = 1024
    max_positions: int = 1024
    max_embodiments: int = 32
    inference_steps: int = 4
    timestep_buckets: int = 1000
    beta_alpha: float = 1.5
    beta_beta: float = 1.0
    time_scale: float = 0.999
    state_dropout: float = 0.0
    state_noise: float = 0.0

    def __post_init__(self) -> None:
        if self.action_horizon > self.max_positions:
            msg = (
                f"action_horizon {self.action_horizon} exceeds the {self.max_positions} rows of the position "
                "table; raise max_positions (a published checkpoint fixes it) or shorten the horizon"
            )
            raise ValueError(msg)
        if not 0.0 <= self.state_dropout < 1.0:
            msg = f"state_dropout must lie in [0, 1), got {self.state_dropout}"
            raise ValueError(msg)


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Which parts train; the defaults are those of the public fine-tuning recipe.

    Attributes:
        top_language_layers: Number of decoder layers, counted from the top, that train.
        language: Train the whole decoder.
        visual: Train the vision tower and the connector.
        projector: Train state encoder, action encoder, action decoder and action positions.
        diffusion: Train the DiT.
        vlln: Train the LayerNorm between backbone and head.
    """

    top_language_layers: int = 4
    language: bool = False
    visual: bool = False
    projector: bool = True
    diffusion: bool = True
    vlln: bool = True


@dataclass(frozen=True, kw_only=True)
class WorkConfig:
    """Work that the original computes and throws away; each switch restores it when false.

    Attributes:
        skip_logits: Leave out the vocabulary logits, which no loss reads.
        frozen_without_autograd: Run everything below the first trainable layer under ``no_grad``.
        split_cross_attention: Cross-attention reads only the half (text or image) that its mask keeps.
        recompute: Recompute the activations of trainable blocks in backward instead of storing them.
        offload: Keep what backward needs in pinned host memory; not together with CUDA graphs.
        keep_unused: Hold the stored but never used tensors (pooling head, LM head) in memory.
    """

    skip_logits: bool = True
    frozen_without_autograd: bool = True
    split_cross_attention: bool = True
    recompute: bool = False
    offload: bool = False
    keep_unused: bool = True


@dataclass(frozen=True, kw_only=True)
class GrootConfig:
    """A whole model: its parts, what trains, and which wasted work is left out."""

    vision: VisionConfig = field(default_factory=VisionConfig)
    language: LanguageConfig = field(default_factory=LanguageConfig)
    dit: DiTConfig = field(default_factory=DiTConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    work: WorkConfig = field(default_factory=WorkConfig)

    def __post_init__(self) -> None:
        top = self.tune.top_language_layers
        if not 0 <= top <= self.language.layers:
            msg = (
                f"top_language_layers must lie in [0, {self.language.layers}] (the decoder has "
                f"{self.language.layers} layers), got {top}"
            )
            raise ValueError(msg)

    @property
    def first_trainable_layer(self) -> int:
        """Index of the lowest decoder layer that trains; ``language.layers`` when none does."""
        if self.tune.language or self.tune.visual:
            return 0
        return self.language.layers - self.tune.top_language_layers

    def image_tokens(self, height: int, width: int) -> int:
        """Number of decoder tokens of an image of ``height`` x ``width`` pixels (multiples of 28)."""
        cell = 2 * self.vision.patch_size
        if height % cell or width % cell or height <= 0 or width <= 0:
            msg = (
                f"image size {height}x{width} must be positive multiples of {cell} pixels; "
                "resize with processing.images.grid_size"
            )
            raise ValueError(msg)
        return (height // cell) * (width // cell)
