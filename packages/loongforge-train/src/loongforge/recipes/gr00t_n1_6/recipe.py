"""The GR00T N1.6 family of recipes: one builder, many configuration files."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from loongforge.errors import ConfigError
from loongforge.recipes.base import Collate, FileRecipe, SampleSource, decay_groups
from loongforge.recipes.gr00t_n1_6.budget import plan_memory
from loongforge.recipes.gr00t_n1_6.checkpoint import (
    export_model,
    find_checkpoint,
    load_model,
    open_checkpoint,
)
from loongforge.recipes.gr00t_n1_6.collate import GrootCollate, view_plans
from loongforge.recipes.gr00t_n1_6.initialise import build_on_meta, materialise, random_fill
from loongforge.recipes.gr00t_n1_6.model import GrootModel
from loongforge.recipes.gr00t_n1_6.options import GrootOptions, processor_changes, with_processor
from loongforge.recipes.gr00t_n1_6.predict import GrootPredictor
from loongforge.recipes.gr00t_n1_6.processing.embodiment import (
    EMBODIMENT_IDS,
    Embodiment,
    Features,
    ModalityLike,
    resolve_embodiment,
    slot_of,
)
from loongforge.recipes.gr00t_n1_6.processing.normalise import StateActionProcessor, Statistics
from loongforge.recipes.gr00t_n1_6.processing.relative import TabularSource, relative_statistics
from loongforge.recipes.gr00t_n1_6.processing.text import (
    ByteTokenizer,
    FolderTokenizer,
    PromptBuilder,
    PromptTokenizer,
)
from loongforge.recipes.gr00t_n1_6.processor_files import (
    STATISTICS_FILE,
    has_statistics,
    read_settings,
    read_slots,
    read_statistics,
    write_processor,
)
from loongforge.recipes.gr00t_n1_6.slots import (
    DECAY_BOUND,
    SlotDecision,
    decide_slots,
    has_live_slots_only,
    use_single_slot,
)

log = logging.getLogger("loongforge")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The names that the public recipe leaves without weight decay, besides the parameters of nn.LayerNorm.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|layer_norm|vlln")


class _Episode(Protocol):
    @property
    def index(self) -> int: ...


class GrootRecipe(FileRecipe[GrootOptions]):
    """Builds model, data set and collate function from :class:`GrootOptions`."""

    def fitted(self, options: GrootOptions) -> GrootOptions:
        """Return the options with what the memory budget asks for; unchanged where there is no budget."""
        if options.memory_budget_gb is None:
            return options
        # The recipe's own batch size: a run with another one should say so in a copy of the file.
        samples = int(_number(self.training.get("batch_size"), 1))
        plan = plan_memory(
            options.config,
            options.lora,
            budget_gb=options.memory_budget_gb,
            batch_size=samples,
            tokens=options.pad_to or 220,
            live_slots=self.slot_decision(options).live,
        )
        log.info(
            "memory budget %s GB with %d samples a micro-batch (the recipe's batch_size): %s",
            options.memory_budget_gb,
            samples,
            ", ".join(plan.steps) or "fits as it is",
        )
        return replace(options, config=plan.config, lora=plan.lora)

    # ---- model -------------------------------------------------------------------------------------------
    def build_model(self, options: GrootOptions, seed: int, *, device: str = "cpu") -> GrootModel:
        """Build the model on ``device``, tensor by tensor, so that no second copy ever exists."""
        asked, options = options, self.fitted(self.resolved(options))
        if changed := processor_changes(asked, options):
            log.info("the checkpoint's processor decides (option processor = 'recipe' off): %s", changed)
        dtype = _DTYPES[options.frozen_dtype]
        if options.checkpoint is None:
            model = build_on_meta(options.config, options.lora)
            materialise(model, device, frozen_dtype=dtype, fill=random_fill(seed, options.config))
        else:
            source = open_checkpoint(find_checkpoint(options.checkpoint))
            model, report = load_model(
                source, options.config, lora=options.lora, seed=seed, device=device, frozen_dtype=dtype
            )
            log.info("loaded %d tensors from %s", report.tensors, source.folder)
        return self._bound(model, options)

    def blank_model(self, options: GrootOptions, *, device: str = "cpu") -> GrootModel:
        """Build the model of a run with zeros for weights, to be filled from the run's own checkpoint.

        Sizes and slot come from the checkpoint the run started from; its weights are not read.
        """
        options = self.fitted(self.resolved(options))
        model = build_on_meta(options.config, options.lora)
        dtype = _DTYPES[options.frozen_dtype]
        materialise(model, device, frozen_dtype=dtype, fill=_zero)
        return self._bound(model, options)

    def _bound(self, model: GrootModel, options: GrootOptions) -> GrootModel:
        """Give a model the image pipeline and the embodiment slot of resolved options."""
        model.image_options = options.image
        use_single_slot(model, self.slot(options), live_only=self.slot_decision(options).live)
        return model.train()

    def resolved(self, options: GrootOptions) -> GrootOptions:
        """Return the options with sizes and processor of the checkpoint they name; what trains stays."""
        if options.checkpoint is None:
            return options
        folder = find_checkpoint(options.checkpoint)
        config = open_checkpoint(folder).config(options.config)
        options = replace(options, config=replace(config, tune=options.config.tune, work=options.config.work))
        return options if options.processor == "recipe" else with_processor(options, read_settings(folder))

    def deployed(self, options: GrootOptions, folder: Path) -> GrootOptions:
        """Return the options of a policy in ``folder``, which normalises as it was trained.

        A checkpoint without statistics of this robot leaves them to the data set.
        """
        if options.statistics is not None or not (folder / STATISTICS_FILE).is_file():
            return options
        if not has_statistics(folder, options.embodiment.tag):
            log.warning(
                "%s has no statistics of robot '%s': those of the data set are used, so actions are in its "
                "range, not in that of the training data",
                folder,
                options.embodiment.tag,
            )
            return options
        return replace(options, statistics=str(folder))

    def slot(self, options: GrootOptions) -> int:
        """Return the embodiment slot of the options' robot."""
        return slot_of(options.embodiment, options.config.head.max_embodiments, self.known_slots(options))

    def known_slots(self, options: GrootOptions) -> Mapping[str, int]:
        """Return slot by embodiment tag: the published table, overruled by the checkpoint's."""
        return (
            EMBODIMENT_IDS if options.checkpoint is None else read_slots(find_checkpoint(options.checkpoint))
        )

    def export(
        self, model: nn.Module, dataset: SampleSource, options: GrootOptions, folder: str | Path
    ) -> list[Path]:
        """Write model and processor files in the published layout; return the weight files.

        The original inference code loads the result; a fine-tuned robot is added to the processor files of
        the checkpoint the run started from.
        """
        options = self.resolved(options)
        source = None if options.checkpoint is None else open_checkpoint(find_checkpoint(options.checkpoint))
        target = Path(folder)
        if source is not None and target.resolve() == source.folder.resolve():
            msg = f"{target} is the checkpoint the run started from; give another folder to export to"
            raise ConfigError(msg)
        files = export_model(cast(GrootModel, model), target, source=source)
        robot = self.embodiment(dataset, options)
        statistics, relative = self._numbers(robot, dataset, options)
        write_processor(
            target,
            robot=robot,
            statistics=statistics,
            relative=relative,
            config=options.config,
            image=options.image,
            formalise_language=options.formalise_language,
            source=None if source is None else source.folder,
        )
        return files

    def slot_decision(self, options: GrootOptions) -> SlotDecision:
        """Tell whether unused embodiment slots can be left out, judged by the recipe's training settings."""
        return decide_slots(
            embodiments=1,
            learning_rate=_number(self.training.get("learning_rate"), 1e-4),
            weight_decay=_number(self.training.get("weight_decay"), 1e-5),
            enabled=options.live_slots == "auto",
        )

    def param_groups(
        self, model: nn.Module, weight_decay: float, *, learning_rate: float | None = None
    ) -> list[dict[str, object]]:
        """Return the groups of the public recipe: biases and norms are not decayed, category ``b`` is.

        Raises:
            ConfigError: The model left unused slots out, and ``weight_decay`` times ``learning_rate``
                (default: the recipe's) would have changed them.
        """
        rate = learning_rate or _number(self.training.get("learning_rate"), 1e-4)
        if isinstance(model, GrootModel) and has_live_slots_only(model) and rate * weight_decay > DECAY_BOUND:
            msg = (
                f"learning_rate {rate} times weight_decay {weight_decay} exceeds {DECAY_BOUND:.1e}, so "
                "weight decay would change the embodiment slots that this model leaves out; set the recipe "
                "option live_slots to 'off', or lower one of them"
            )
            raise ConfigError(msg)
        return decay_groups(model.named_parameters(), weight_decay, decays)

    # ---- data --------------------------------------------------------------------------------------------
    def build_dataset(
        self, root: str, options: GrootOptions, *, episodes: Sequence[int] | None = None
    ) -> SampleSource:
        """Open a LeRobot data set with action windows and images decoded at the pipeline's size.

        ``episodes`` None takes all but the held-out ones.
        """
        from loongforge_data import open_dataset

        options = self.resolved(options)
        probe = open_dataset(root)
        robot = self.embodiment(probe, options)
        plans = view_plans(robot, _features(probe), options.image)
        sizes = {plan.decoded for plan in plans} if options.image.first_resize == "decoder" else set()
        if episodes is None and options.held_out:
            episodes = _all_but(probe.episodes, options.held_out)
        window = {column: range(robot.action_steps) for column in robot.action_columns}
        return cast(
            SampleSource,
            open_dataset(
                root,
                window=window,
                episodes=episodes,
                cameras=list(robot.views),
                # One size for all cameras while decoding; cameras of other ratios are resized when batched.
                image_size=sizes.pop() if len(sizes) == 1 else None,
            ),
        )

    def embodiment(self, dataset: object, options: GrootOptions) -> Embodiment:
        """Match the configured robot with a data set."""
        modality = cast(ModalityLike | None, getattr(dataset, "modality", None))
        return resolve_embodiment(
            options.embodiment,
            _features(dataset),
            modality,
            slots=options.config.head.max_embodiments,
            known_slots=self.known_slots(options),
        )

    def build_collate(self, dataset: SampleSource, model: nn.Module, options: GrootOptions) -> Collate:
        """Return the function from samples to a model batch on the host."""
        options = self.resolved(options)
        robot = self.embodiment(dataset, options)
        return GrootCollate(
            embodiment=robot,
            plans=view_plans(robot, _features(dataset), options.image),
            prompts=PromptBuilder(self.tokenizer(options), formalise_language=options.formalise_language),
            vectors=self.vectors(robot, dataset, options),
            image_options=options.image,
            pad_to=options.pad_to,
            multiple=options.pad_multiple,
            tasks=cast(Mapping[int, str] | None, getattr(dataset, "tasks", None)),
        )

    def vectors(
        self, robot: Embodiment, dataset: SampleSource, options: GrootOptions
    ) -> StateActionProcessor:
        """Return the normaliser of states and actions, by the data set's statistics or the policy's."""
        head = options.config.head
        statistics, relative = self._numbers(robot, dataset, options)
        return StateActionProcessor(
            robot,
            statistics,
            relative=relative,
            max_state_dim=head.max_state_dim,
            max_action_dim=head.max_action_dim,
            action_horizon=head.action_horizon,
        )

    def _numbers(
        self, robot: Embodiment, dataset: SampleSource, options: GrootOptions
    ) -> tuple[Statistics, Statistics]:
        """Return column statistics and per-step statistics of relative keys."""
        if options.statistics is not None:
            return read_statistics(Path(options.statistics), robot)
        return _statistics(dataset), relative_statistics(cast(TabularSource, dataset), robot)

    def predictor(self, model: nn.Module, collate: Collate) -> GrootPredictor:
        """Return what turns samples into raw actions, for evaluation."""
        return GrootPredictor(cast(GrootModel, model), cast(GrootCollate, collate))

    def tokenizer(self, options: GrootOptions) -> PromptTokenizer:
        """Return the tokenizer, checked against the model's image token and vocabulary."""
        language = options.config.language
        if options.tokenizer != "bytes":
            return FolderTokenizer(options.tokenizer, image_token_id=language.image_token_id)
        stand_in = ByteTokenizer()
        if language.vocab_size < stand_in.vocab_size:
            msg = (
                f"the byte tokenizer needs a vocabulary of {stand_in.vocab_size}, the model has "
                f"{language.vocab_size}"
            )
            raise ConfigError(msg)
        if options.checkpoint is not None and language.image_token_id != stand_in.image_token_id:
            msg = (
                "tokenizer 'bytes' is a stand-in that the weights of the checkpoint do not know (its "
                f"image token is {stand_in.image_token_id}, theirs {language.image_token_id}); set option "
                "tokenizer to the folder with the checkpoint's tokenizer files"
            )
            raise ConfigError(msg)
        return stand_in


def _zero(name: str, value: Tensor) -> None:
    del name
    value.zero_()


def _all_but(episodes: Iterable[_Episode], held_out: Sequence[int]) -> list[int]:
    known = [episode.index for episode in episodes]
    absent = sorted(set(held_out) - set(known))
    if absent:
        msg = f"held_out names episodes {absent} that the data set lacks; it has {min(known)}..{max(known)}"
        raise ConfigError(msg)
    left = [index for index in known if index not in set(held_out)]
    if not left:
        msg = f"held_out leaves no episode to train on; the data set has {len(known)}"
        raise ConfigError(msg)
    return left


def _statistics(dataset: object) -> Statistics:
    statistics = getattr(dataset, "stats", None)
    if not isinstance(statistics, Mapping) or not statistics:
        msg = "the data set has no statistics; compute them with `loongforge-data` before training"
        raise ConfigError(msg)
    return statistics


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def decays(name: str) -> bool:
    """Tell whether the public recipe decays the parameter ``name``."""
    return _NO_DECAY.search(name.lower()) is None


def _features(dataset: object) -> Features:
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping):
        msg = (
            f"{type(dataset).__name__} has no 'features'; this recipe needs a robot data set as "
            "loongforge_data.open_dataset returns it"
        )
        raise ConfigError(msg)
    return cast(Features, features)
