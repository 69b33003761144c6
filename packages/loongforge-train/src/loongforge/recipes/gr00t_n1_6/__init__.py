"""GR00T N1.6: the published architecture, its checkpoint, its data path."""

from loongforge.recipes.gr00t_n1_6.config import (
    DiTConfig,
    GrootConfig,
    HeadConfig,
    LanguageConfig,
    TuneConfig,
    VisionConfig,
    WorkConfig,
)
from loongforge.recipes.gr00t_n1_6.model import GrootModel

__all__ = [
    "DiTConfig",
    "GrootConfig",
    "GrootModel",
    "HeadConfig",
    "LanguageConfig",
    "TuneConfig",
    "VisionConfig",
    "WorkConfig",
]
