"""Graphs of the models this field trains: shapes, edges, order, branches, control flow; kept in golden/."""

import json
from pathlib import Path

import pytest
import torch
from loongforge_comm import CompiledModelError, LinkModel, ModuleDependencyGraph, build_mdg, plan_buckets
from loongforge_comm.testing import assert_snapshot
from torch import Tensor, nn

GOLDEN = Path(__file__).parent / "golden"


class MultiModalEncoder(nn.Module):
    """Vision, audio and IMU encoders, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 32)
        )
        self.audio = nn.Sequential(
            nn.Conv1d(1, 4, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 16)
        )
        self.imu = nn.GRU(6, 8, batch_first=True)
        self.head = nn.Linear(32 + 16 + 8, 7)

    def forward(self, image: Tensor, audio: Tensor, imu: Tensor) -> Tensor:
        parts = [self.vision(image), self.audio(audio), self.imu(imu)[0][:, -1]]
        return self.head(torch.cat(parts, dim=-1))


class Policy(nn.Module):
    """Optional modality, tied weights, a directly used parameter and a dictionary input."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.image = nn.Linear(12, 8)
        self.gate = nn.Parameter(torch.ones(8))
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.tokens(batch["text"])
        if "image" in batch:
            x = x + self.image(batch["image"]).unsqueeze(1)
        for layer in self.body:
            x = x + layer(x) * self.gate
        return {"loss": self.head(x).logsumexp(-1).mean()}


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:
            return self.a(x)
        return self.b(x)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state, self.image, self.out = nn.Linear(4, 8), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, state: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.state(state)
        if image is not None:
            x = x + self.image(image)
        return self.out(torch.relu(x))


class Step(nn.Module):
    """The shape of a small VLA: vision tower, connector, language model, action head that alternates its
    attention."""

    class Block(nn.Module):
        def __init__(self, width: int, *, cross: bool) -> None:
            super().__init__()
            self.cross = cross
            self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
            self.mlp = nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            q = self.norm(x)
            kv = context if self.cross else q
            x = x + self.attention(q, kv, kv, need_weights=False)[0]
            return x + self.mlp(x)

    def __init__(self) -> None:
        super().__init__()
        width = 16
        self.patch = nn.Conv2d(3, width, 8, stride=8)
        self.vision = nn.ModuleList(Step.Block(width, cross=False) for _ in range(2))
        self.connector = nn.Linear(width * 4, width)
        self.embed = nn.Embedding(50, width)
        self.language = nn.ModuleList(Step.Block(width, cross=False) for _ in range(2))
        self.language[0].requires_grad_(False)
        self.action = nn.Linear(7, width)
        self.head = nn.ModuleList(Step.Block(width, cross=k % 2 == 0) for k in range(4))
        self.out = nn.Linear(width, 7)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        v = self.patch(batch["image"]).flatten(2).transpose(1, 2)
        for block in self.vision:
            v = block(v, v)
        b, n, w = v.shape
        v = self.connector(v.reshape(b, n // 4, w * 4))
        x = torch.cat([v, self.embed(batch["text"])], dim=1)
        for block in self.language:
            x = block(x, x)
        noise = torch.randn(batch["action"].shape, device=x.device)
        a = self.action(batch["action"] + noise)
        for block in self.head:
            a = block(a, x)
        return {"loss": (self.out(a) - batch["action"]).square().mean()}


def snapshot(name: str, graph: ModuleDependencyGraph) -> None:
    assert_snapshot(GOLDEN / f"{name}.json", graph)


def eager_order(model: nn.Module, *args: object, **kwargs: object) -> list[str]:
    """Ready order of a real backward."""
    order: list[str] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    out = model(*args, **kwargs)
    out = out["loss"] if isinstance(out, dict) else out.sum()
    out.backward()
    return order


def encoder_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 3, 32, 32), torch.randn(2, 1, 128), torch.randn(2, 5, 6)


def step_batch() -> dict[str, Tensor]:
    return {
        "image": torch.randn(2, 3, 32, 32),
        "text": torch.zeros(2, 3, dtype=torch.long),
        "action": torch.randn(2, 4, 7),
    }


def test_multi_modal_encoder() -> None:
    model = MultiModalEncoder()
    graph = build_mdg(model, encoder_inputs())
    assert (graph.source, graph.run) == ("fx", "meta")
    assert graph.node("head").inputs[0].shape == (2, 56)
    assert graph.node("vision.0").outputs[0].shape == (2, 8, 8, 8)
    assert graph.node("head").inputs[0].device == "cpu"
    assert {e.source for e in graph.edges if e.target == "head"} == {"vision.3", "audio.3", "imu"}
    assert [g.name for g in graph.gradients] == eager_order(model, *encoder_inputs())
    assert graph.node("head").flops == 2 * 2 * 56 * 7
    snapshot("multi_modal_encoder", graph)


def test_edges_of_the_symbolic_trace_equal_the_observed_ones() -> None:
    from loongforge_comm.mdg.observe import observe
    from loongforge_comm.mdg.symbolic import trace_edges

    for model, args in (
        (MultiModalEncoder(), encoder_inputs()),
        (Optional(), (torch.randn(2, 4), torch.randn(2, 6))),
    ):
        observed = observe(model, args, {}, meta=True).edges
        traced, opaque = trace_edges(model, {})
        assert not opaque
        assert {e for e in traced if not e[0].startswith("input:")} == {
            e for e in observed if not e[0].startswith("input:")
        }


def test_small_vla_with_frozen_layers_and_direct_order() -> None:
    model = Step()
    graph = build_mdg(model, (step_batch(),))
    assert graph.run == "meta"
    assert not [g for g in graph.gradients if g.name.startswith("language.0")]
    assert [g.name for g in graph.gradients] == eager_order(model, step_batch())
    assert graph.gradients[0].ready_ms < graph.gradients[-1].ready_ms <= 1.0
    plan = plan_buckets(graph.gradient_specs(50.0), LinkModel.from_alpha_beta(0.1, 0.01))
    assert plan.nbytes == sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    snapshot("small_vla", graph)


def test_dictionary_inputs_branches_ties_and_direct_parameters() -> None:
    batch = {"text": torch.zeros(2, 3, dtype=torch.long), "image": torch.randn(2, 12)}
    graph = build_mdg(Policy(), (batch,))
    assert graph.branches() == {"batch.image": ("image",)}
    assert [g.name for g in graph.gradients].count("tokens.weight") == 1
    assert "head.weight" not in [g.name for g in graph.gradients]
    assert any(n.name == "#gate" and n.parameters == ("gate",) for n in graph.nodes)
    assert any(c.detail == "'image' in batch" for c in graph.control_flow)
    snapshot("policy", graph)


def test_optional_input_is_a_branch_and_its_absence_is_traced_as_such() -> None:
    present = build_mdg(Optional(), (torch.randn(2, 4), torch.randn(2, 6)))
    assert present.branches() == {"image": ("image",)}
    absent = build_mdg(Optional(), (torch.randn(2, 4),))
    assert absent.source == "fx"
    assert not [e for e in absent.edges if "image" in e.source]
    assert absent.gradients[-1].name.startswith("image")
    assert any(c.kind == "optional-input" for c in absent.control_flow)


def test_data_dependent_branch_is_run_eagerly_and_marked() -> None:
    model = DataDependent()
    nn.init.ones_(model.first.weight)  # takes the first branch
    graph = build_mdg(model, (torch.ones(3, 4),))
    assert (graph.source, graph.run) == ("hooks", "eager")
    assert any(c.kind == "data-dependent" and c.detail == "x.sum() > 0" for c in graph.control_flow)
    assert "copy of the model" in graph.notes[0]
    assert all(p.grad is None for p in model.parameters())
    snapshot("data_dependent", graph)
    with pytest.raises(ValueError, match="allow_eager=True"):
        build_mdg(model, (torch.ones(3, 4),), allow_eager=False)
    with pytest.raises(ValueError, match="example_args"):
        build_mdg(model, ())


def test_hugging_face_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.Qwen2ForCausalLM(config)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    graph = build_mdg(model, (), {"input_ids": tokens, "labels": tokens})
    assert graph.run == "meta"
    assert graph.node("lm_head").outputs[0].shape == (2, 5, 64)
    assert graph.node("model.layers.1.mlp.down_proj").inputs[0].shape == (2, 5, 48)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert sorted(g.name for g in graph.gradients) == sorted(trained)
    edges = {(e.source, e.target) for e in graph.edges}
    assert ("model.layers.0.mlp.down_proj", "model.layers.1.input_layernorm") in edges
    assert [g.name for g in graph.gradients] == eager_order(model, input_ids=tokens, labels=tokens)
    if transformers.__version__.startswith("5.24."):
        snapshot("qwen2", graph)  # module names and their order belong to the version


def test_text_form_is_exact_and_versions_are_checked() -> None:
    graph = build_mdg(Policy(), ({"text": torch.zeros(2, 3, dtype=torch.long)},))
    again = ModuleDependencyGraph.from_json(graph.to_json())
    assert again == graph
    assert again.hash == graph.hash
    with pytest.raises(ValueError, match="version 3, allowed is 1"):
        ModuleDependencyGraph.from_json(json.dumps({"version": 3}))
    with pytest.raises(KeyError, match="similar"):
        graph.node("body.7")
    assert "GFLOP" in graph.table()


def test_compiled_models_are_refused() -> None:
    model = Optional()
    model.compile(backend="eager")
    with pytest.raises(CompiledModelError, match=r"block\.compile"):
        build_mdg(model, (torch.randn(2, 4),))
