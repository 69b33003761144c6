"""The published ``config.json``: read into a configuration, written back for the original inference code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from loongforge.errors import ConfigError
from loongforge.recipes.gr00t_n1_6.config import (
    DiTConfig,
    GrootConfig,
    HeadConfig,
    LanguageConfig,
    TuneConfig,
    VisionConfig,
)
from loongforge.recipes.settings import updated

Json = Mapping[str, object]

_HEAD_FIELDS = {
    "max_state_dim": "max_state_dim",
    "max_action_dim": "max_action_dim",
    "action_horizon": "action_horizon",
    "hidden_size": "hidden_size",
    "max_seq_len": "max_positions",
    "max_num_embodiments": "max_embodiments",
    "num_inference_timesteps": "inference_steps",
    "num_timestep_buckets": "timestep_buckets",
    "noise_beta_alpha": "beta_alpha",
    "noise_beta_beta": "beta_beta",
    "noise_s": "time_scale",
    "state_dropout_prob": "state_dropout",
    "state_additive_noise_scale": "state_noise",
}
_DIT_FIELDS = {
    "num_layers": "layers",
    "num_attention_heads": "heads",
    "attention_head_dim": "head_dim",
    "output_dim": "output_size",
    "dropout": "dropout",
}
_TUNE_FIELDS = {
    "tune_top_llm_layers": "top_language_layers",
    "tune_llm": "language",
    "tune_visual": "visual",
    "tune_projector": "projector",
    "tune_diffusion_model": "diffusion",
    "tune_vlln": "vlln",
}
_LANGUAGE_FIELDS = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_size",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
}
_VISION_FIELDS = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp_size",
    "patch_size": "patch_size",
    "layer_norm_eps": "layer_norm_eps",
}
# What the published code can switch on and this implementation has no counterpart for.
_FIXED: Mapping[str, object] = {
    "add_pos_embed": True,
    "use_vlln": True,
    "use_alternate_vl_dit": True,
}


def read_config(groot: Json, eagle: Json | None = None, *, base: GrootConfig | None = None) -> GrootConfig:
    """Read a published configuration.

    Args:
        groot: ``config.json`` of the checkpoint.
        eagle: ``config.json`` of the vision-language model, where given; its sizes are not in ``groot``.
        base: What fields are taken from that neither file names.

    Raises:
        ConfigError: A field asks for something this implementation does not do.
    """
    config = base or GrootConfig()
    for name, value in _FIXED.items():
        if name in groot and groot[name] != value:
            msg = f"config.json has {name} = {groot[name]!r}; only {value!r} is supported"
            raise ConfigError(msg)
    dit = _fields(groot.get("diffusion_model_cfg"), _DIT_FIELDS, config.dit)
    if "attend_text_every_n_blocks" in groot:
        dit = replace(dit, attend_text_every_n_blocks=_integer(groot["attend_text_every_n_blocks"]))
    language, vision = config.language, config.vision
    if eagle is not None:
        language = _fields(eagle.get("text_config"), _LANGUAGE_FIELDS, language)
        vision = _fields(eagle.get("vision_config"), _VISION_FIELDS, vision)
        vision = replace(vision, position_grid=_grid(eagle.get("vision_config"), vision.position_grid))
        if "image_token_index" in eagle:
            language = replace(language, image_token_id=_integer(eagle["image_token_index"]))
    if "select_layer" in groot:
        language = replace(language, layers=_integer(groot["select_layer"]))
    if groot.get("backbone_embedding_dim", language.hidden_size) != language.hidden_size:
        msg = (
            f"config.json has backbone_embedding_dim {groot['backbone_embedding_dim']}, the decoder is "
            f"{language.hidden_size} wide; give the eagle configuration that belongs to this checkpoint"
        )
        raise ConfigError(msg)
    if groot.get("input_embedding_dim", dit.width) != dit.width:
        msg = (
            f"config.json has input_embedding_dim {groot['input_embedding_dim']}, but heads times head_dim "
            f"is {dit.width}; both must be of one checkpoint"
        )
        raise ConfigError(msg)
    return replace(
        config,
        dit=dit,
        language=language,
        vision=vision,
        head=_fields(groot, _HEAD_FIELDS, config.head),
        tune=_fields(groot, _TUNE_FIELDS, config.tune),
    )


def written_config(config: GrootConfig, original: Json | None = None) -> dict[str, object]:
    """Return ``config.json`` for a model; fields of ``original`` that mean nothing here are kept."""
    result = dict(original or {"model_type": "Gr00tN1d6", "architectures": ["Gr00tN1d6"]})
    result.update(_FIXED)
    for fields, owner in ((_HEAD_FIELDS, config.head), (_TUNE_FIELDS, config.tune)):
        result.update({name: getattr(owner, field) for name, field in fields.items()})
    known = result.get("diffusion_model_cfg")
    dit = dict(known) if isinstance(known, Mapping) else {}
    dit.update({name: getattr(config.dit, field) for name, field in _DIT_FIELDS.items()})
    dit.update({"norm_type": "ada_norm", "final_dropout": True, "interleave_self_attention": True})
    dit.setdefault("positional_embeddings", None)
    result["diffusion_model_cfg"] = dit
    result["attend_text_every_n_blocks"] = config.dit.attend_text_every_n_blocks
    result["select_layer"] = config.language.layers
    result["backbone_embedding_dim"] = config.language.hidden_size
    result["input_embedding_dim"] = config.dit.width
    return result


T = TypeVar("T", DiTConfig, HeadConfig, TuneConfig, LanguageConfig, VisionConfig)


def _fields(source: object, names: Mapping[str, str], base: T) -> T:
    if not isinstance(source, Mapping):
        return base
    found = {field: source[name] for name, field in names.items() if name in source}
    return updated(base, found, where="config.json")


def _integer(value: object) -> int:
    if not isinstance(value, int):
        msg = f"expected a whole number in config.json, got {value!r}"
        raise ConfigError(msg)
    return value


def _grid(source: object, default: int) -> int:
    patches = source.get("num_patches") if isinstance(source, Mapping) else None
    if patches is None:
        return default
    side = round(_integer(patches) ** 0.5)
    if side * side != patches:
        msg = f"vision num_patches must be a square number, got {patches}"
        raise ConfigError(msg)
    return side
