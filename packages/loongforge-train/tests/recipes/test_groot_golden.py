"""The model against tensors that the original implementation computed from the same weights."""

from __future__ import annotations

import pytest
import torch
from loongforge.recipes.gr00t_n1_6.dit import time_projection
from loongforge.recipes.gr00t_n1_6.heads import action_time_encoding
from torch import Tensor

TOLERANCE = 1e-5  # of the largest magnitude of each tensor


def off(ours: Tensor, reference: Tensor) -> float:
    """Largest difference relative to the largest magnitude of the reference."""
    ours, reference = ours.detach(), reference.detach()
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    return ((ours - reference).abs().max() / reference.abs().max()).item()


class Recorder:
    """Keeps outputs and first inputs of modules."""

    def __init__(self, model):
        self.values = {}
        vl, head = model.backbone.model, model.action_head
        vision = vl.vision_model.vision_model
        decoder = vl.language_model.model
        self._out("vision.embeddings", vision.embeddings)
        self._out("vision.last_hidden_state", vision)
        self._in("vision.unshuffled", vl.mlp1)
        self._out("vision.connector_out", vl.mlp1)
        self._in("llm.inputs_embeds", decoder.layers[0])
        for i, layer in enumerate(decoder.layers):
            self._out(f"llm.layer{i}.out", layer)
        self._out("llm.final_norm_out", decoder.norm)
        self._out("head.vl_features", head.vlln)
        self._out("head.state_features", head.state_encoder)
        self._out("head.action_features", head.action_encoder)
        self._out("head.pred_velocity", head.action_decoder)
        self._in("dit.in", head.model)
        self._out("dit.out", head.model)
        self._out("dit.temb", head.model.timestep_encoder)
        for i, block in enumerate(head.model.transformer_blocks):
            self._out(f"dit.block{i}.out", block)

    def _out(self, name, module):
        module.register_forward_hook(
            lambda _m, _i, out: self.values.setdefault(name, []).append(out.detach())
        )

    def _in(self, name, module):
        module.register_forward_pre_hook(lambda _m, i: self.values.setdefault(name, []).append(i[0].detach()))


def per_image(values, width):
    """Flatten what was computed per image size, in call order."""
    return torch.cat([value.reshape(-1, width) for value in values])


@pytest.mark.parametrize("case", ["a", "m"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "dense"])
def test_golden_intermediates(groot_reference, case, split):
    golden, model = groot_reference.golden, groot_reference.model(split_cross_attention=split)
    recorder = Recorder(model)
    batch = groot_reference.batch(case)
    out = model(batch)
    mask = batch["attention_mask"].bool()
    layout = model.canonical(batch)
    for name, values in recorder.values.items():
        reference = golden[f"{case}.{name}"]
        if name.startswith("vision"):
            # Image 0 and 1 of each sample have sizes of their own in case m: one call each, in order.
            assert off(per_image(values, reference.shape[-1]), reference[0]) < TOLERANCE, name
        elif reference.shape[:2] == mask.shape:
            # The original pads on the left, we pad on the right; valid rows come in the same order.
            valid = layout["attention_mask"]
            assert off(values[0][valid], reference[mask]) < TOLERANCE, name
        else:
            assert off(values[0], reference) < TOLERANCE, name
    noisy, buckets, target = model.flow(batch)
    assert torch.equal(buckets, golden[f"{case}.head.t_discretized"])
    assert off(noisy, golden[f"{case}.head.noisy_actions"]) < TOLERANCE
    assert off(target, golden[f"{case}.head.velocity_target"]) < TOLERANCE
    assert off(time_projection(buckets), golden[f"{case}.dit.time_proj"]) < TOLERANCE
    steps, width = noisy.shape[1], groot_reference.config.dit.width
    encoding = action_time_encoding(buckets, steps, width)
    assert off(encoding, golden[f"{case}.head.action_time_encoding"]) < TOLERANCE
    assert off(out["loss"], golden[f"{case}.loss"][0]) < TOLERANCE
    per_element = golden[f"{case}.loss.per_element"]
    assert off(out["loss_sum"], per_element.flatten(1).sum(1)) < TOLERANCE
    assert torch.equal(out["loss_count"], batch["action_mask"].flatten(1).sum(1))
    explicit = {
        "head.t_discretized",
        "head.noisy_actions",
        "head.velocity_target",
        "head.action_time_encoding",
        "dit.time_proj",
        "loss",
        "loss.per_element",
        "grad_norms",
        "backbone.image_mask",
        "backbone.attention_mask",
    }
    names = {name.removeprefix(f"{case}.") for name in golden if name.startswith(f"{case}.")}
    left = {n for n in names if not n.startswith(("in.", "grad."))} - set(recorder.values) - explicit
    assert not left, f"not compared: {left}"


@pytest.mark.parametrize("case", ["a", "m"])
def test_golden_gradients(groot_reference, case):
    golden, model = groot_reference.golden, groot_reference.model()
    model(groot_reference.batch(case))["loss"].backward()
    parameters = dict(model.named_parameters())
    trainable = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trainable == set(groot_reference.gradient_names)
    compared = 0
    for name, reference in golden.items():
        if name.startswith(f"{case}.grad."):
            assert off(parameters[name.removeprefix(f"{case}.grad.")].grad, reference) < TOLERANCE, name
            compared += 1
    assert compared >= 4
    norms = golden[f"{case}.grad_norms"]
    for name, reference in zip(groot_reference.gradient_names, norms, strict=True):
        ours = parameters[name].grad.norm()
        # A key bias shifts all scores of a row alike, so its true gradient is zero: both sides hold rounding.
        limit = TOLERANCE * max(reference.item(), 1e-2)
        assert abs(ours - reference).item() <= limit, name


def test_golden_inference(groot_reference):
    golden, model = groot_reference.golden, groot_reference.model()
    recorder = Recorder(model)
    batch = groot_reference.batch("a")
    del batch["action"]
    actions = model.get_action({**batch, "initial_noise": golden["b.in.initial_noise"]})
    assert off(actions, golden["b.action_pred"]) < TOLERANCE
    velocities = torch.stack(recorder.values["head.pred_velocity"])
    assert off(velocities, golden["b.velocity_per_step"]) < TOLERANCE
    assert off(torch.stack(recorder.values["dit.out"]), golden["b.dit.out_per_step"]) < TOLERANCE
    assert len(recorder.values["llm.final_norm_out"]) == 1  # the backbone runs once, not once a step
