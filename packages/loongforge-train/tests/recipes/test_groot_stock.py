"""The model of the stock columns of the step benchmark computes what ours and the original compute."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
TOLERANCE = 1e-5  # of the largest magnitude of each tensor
# A key bias shifts all scores of a row alike: its true gradient is zero, and both sides hold rounding.
ROUNDING = 1e-7


@pytest.fixture(scope="module")
def stock_bench():
    if not (BENCHMARKS / "_step_stock.py").is_file():
        pytest.skip("the repository's benchmarks are not here")
    pytest.importorskip("transformers")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(
            groot=importlib.import_module("_groot_full"), stock=importlib.import_module("_step_stock")
        )
    finally:
        sys.path.remove(str(BENCHMARKS))


def shell_of(model):
    """Return the model with the same parameters in new modules, as the benchmark's columns have it."""
    return copy.deepcopy(model, {id(t): t for t in [*model.parameters(), *model.buffers()]})


def tiny_model(stock_bench):
    """Return the benchmark's tiny model in float32; no weight is a one or a zero that hides its use."""
    model = stock_bench.groot.build(tiny=True, device="cpu", masters=True, dropout=0.0).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def loss_and_gradients(model, parameters, batch):
    for parameter in parameters.values():
        parameter.grad = None
    loss = model(batch)["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in parameters.items() if p.grad is not None}


def assert_close(found, expected, what):
    off = (found - expected).abs().max()
    assert off <= max(TOLERANCE * expected.abs().max(), torch.tensor(ROUNDING)), (what, off)


def test_loss_and_gradients_are_those_of_our_model(stock_bench):
    model = tiny_model(stock_bench)
    batch = model.draw(
        stock_bench.groot.micro_batch(3, model=model, device="cpu", side=84, tokens=72),
        torch.Generator().manual_seed(2),
    )
    batch["pixel_values"] = batch["pixel_values"].float()
    lengths = batch["attention_mask"].sum(1)
    assert lengths.min() < batch["attention_mask"].shape[1], "no row is padded: the masks are not tried"
    parameters = dict(model.named_parameters())
    loss, gradients = loss_and_gradients(model, parameters, batch)
    stock = stock_bench.stock.stock_of(shell_of(model))
    stock_loss, stock_gradients = loss_and_gradients(stock, parameters, batch)
    assert_close(stock_loss, loss, "loss")
    assert stock_gradients.keys() == gradients.keys()
    assert gradients.keys() == {name for name, p in parameters.items() if p.requires_grad}
    for name, gradient in gradients.items():
        assert_close(stock_gradients[name], gradient, name)


def test_loss_and_gradients_are_those_of_the_original(stock_bench, groot_reference):
    golden = groot_reference.golden
    model = groot_reference.model(keep_unused=False)
    batch = groot_reference.batch("a")
    count = batch["input_ids"].shape[0]
    pixels = torch.stack([image.reshape(image.shape[-3:]) for image in batch["pixel_values"]])
    batch["pixel_values"] = pixels.unflatten(0, (count, -1))
    parameters = dict(model.named_parameters())
    stock = stock_bench.stock.stock_of(shell_of(model))
    loss, gradients = loss_and_gradients(stock, parameters, batch)
    assert_close(loss, golden["a.loss"][0], "loss")
    norms = zip(groot_reference.gradient_names, golden["a.grad_norms"], strict=True)
    for name, reference in norms:
        limit = TOLERANCE * max(reference.item(), 1e-2)
        assert abs(gradients[name].norm() - reference).item() <= limit, name


def test_the_towers_are_stock_and_hold_the_very_parameters(stock_bench):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
    from transformers.models.siglip2.modeling_siglip2 import Siglip2EncoderLayer

    model = tiny_model(stock_bench)
    stock = stock_bench.stock.stock_of(shell_of(model))
    config = model.config
    kinds = [type(module) for module in stock.modules()]
    assert kinds.count(Siglip2EncoderLayer) == config.vision.layers
    assert kinds.count(Qwen3DecoderLayer) == config.language.layers
    assert {id(p) for p in stock.parameters()} == {id(p) for p in model.parameters()}
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in stock_bench.groot.build(tiny=True, device="cpu").parameters()
    ]
    # The model that the other columns run is as it was.
    assert not any(module.__class__.__module__ == "_step_stock" for module in model.modules())
    assert model.work.split_cross_attention
    assert model.single_slot == 0


def test_the_logits_of_the_whole_vocabulary_are_made(stock_bench):
    model = tiny_model(stock_bench)
    stock = stock_bench.stock.stock_of(shell_of(model))
    made = []
    head = stock.backbone.language_model.lm_head
    head.register_forward_hook(lambda _m, _i, out: made.append(tuple(out.shape)))
    batch = stock_bench.groot.micro_batch(2, model=model, device="cpu", side=84, tokens=72)
    batch["pixel_values"] = batch["pixel_values"].float()
    with torch.no_grad():
        stock(batch)
    assert made == [(2, 72, model.config.language.vocab_size)]


def test_the_full_configuration_has_the_shapes_of_the_stock_classes(stock_bench):
    from loongforge.recipes.gr00t_n1_6.initialise import build_on_meta

    model = build_on_meta(stock_bench.groot.config())
    shapes = {id(p): p.shape for p in model.parameters()}
    stock = stock_bench.stock.stock_of(model)
    assert {id(p): p.shape for p in stock.parameters()} == shapes
    assert sum(p.numel() for p in stock.parameters()) > 2.6e9


def test_other_parameters_than_published_are_refused_with_their_names(stock_bench):
    from torch import nn

    with pytest.raises(RuntimeError, match=r"other parameters.*'weight'.*known to work"):
        stock_bench.stock.share(nn.Linear(3, 2), {"weight": nn.Parameter(torch.zeros(2, 4))})


def test_missing_transformers_are_named_with_the_way_out(stock_bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeError, match=r"need transformers.*pip install transformers"):
        stock_bench.stock.transformers_version()


def test_classes_that_transformers_lacks_are_named_with_its_version(stock_bench, monkeypatch):
    other = SimpleNamespace(__version__="4.1", Siglip2VisionConfig=None)
    monkeypatch.setitem(sys.modules, "transformers", other)
    with pytest.raises(RuntimeError, match=r"transformers 4\.1 has not the classes.*Siglip2VisionModel"):
        stock_bench.stock.stock_of(shell_of(tiny_model(stock_bench)))
