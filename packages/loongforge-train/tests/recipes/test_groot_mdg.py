"""The dependency graph of the tiny GR00T model: every shape, edge and gradient, kept in golden/."""

from pathlib import Path

import pytest
import torch
from loongforge.recipes import get_recipe

comm = pytest.importorskip("loongforge_comm")


def test_graph_of_the_tiny_model(tiny_batch):
    from loongforge_comm.testing import assert_snapshot

    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options()
    model = recipe.build_model(options, 0).train()
    graph = comm.build_mdg(model, (tiny_batch,))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    order = []
    for name, parameter in trained.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(tiny_batch)["loss"].backward()
    fired = [g.name for g in graph.gradients if g.name in set(order)]
    assert fired == order
    assert {g.name for g in graph.gradients} == set(trained)
    assert all(torch.Size(g.shape) == trained[g.name].shape for g in graph.gradients)
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert_snapshot(Path(__file__).parent / "golden" / "groot_tiny_mdg.json", graph)
