"""A model of every modality: cameras, sound, inertial series, language, action tokens."""

from loongforge.recipes.multimodal.config import AudioConfig, MultimodalConfig, SeriesConfig
from loongforge.recipes.multimodal.model import MultimodalModel

__all__ = ["AudioConfig", "MultimodalConfig", "MultimodalModel", "SeriesConfig"]
