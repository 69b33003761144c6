"""The model on a GPU: same numbers, no waiting for the device, capturable, full size trains."""

from __future__ import annotations

import pytest
import torch
from loongforge.recipes import get_recipe
from loongforge.recipes.gr00t_n1_6.processing.images import (
    ImageOptions,
    crop_images,
    jitter_colours,
    plan_decoded,
    prepare_images,
    resize_uint8,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def tiny(device="cuda", **options):
    recipe = get_recipe("gr00t_n1_6_tiny")
    return recipe.build_model(recipe.options(options), 0, device=device)


def to(batch, device):
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in batch.items()}


@pytest.fixture(autouse=True)
def _full_precision():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("case", ["a", "m"])
def test_golden_loss_and_gradients_on_a_gpu(groot_reference, case):
    model = groot_reference.model().cuda()
    batch = groot_reference.batch(case)
    batch["pixel_values"] = [image.cuda() for image in batch["pixel_values"]]
    out = model(to(batch, "cuda"))
    out["loss"].backward()
    golden = groot_reference.golden
    assert abs(out["loss"].item() / golden[f"{case}.loss"].item() - 1) < 1e-5
    parameters = dict(model.named_parameters())
    for name, reference in golden.items():
        if name.startswith(f"{case}.grad."):
            ours = parameters[name.removeprefix(f"{case}.grad.")].grad.cpu()
            # Sines of angles up to 1000 radians differ between devices in the fifth digit.
            limit = 2e-4 if "timestep_embedder" in name else 5e-5
            assert (ours - reference).abs().max() <= limit * reference.abs().max(), name


def test_bfloat16_autocast_stays_near_float32(tiny_batch):
    batch = to(tiny_batch, "cuda")
    exact = tiny()(batch)["loss"].item()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        mixed = tiny(frozen_dtype="bfloat16")(batch)["loss"].item()
    assert mixed == pytest.approx(exact, rel=2e-2)


def test_a_step_never_waits_for_the_device(tiny_batch):
    model = tiny(frozen_dtype="bfloat16").train()
    batch = to(tiny_batch, "cuda")
    batch = {n: v for n, v in batch.items() if n not in ("noise", "time", "augmentation")}

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(model.draw(batch))["loss"]
        loss.backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "autocast"])
def test_forward_and_backward_can_be_captured(tiny_batch, mixed, dropout):
    frozen = "bfloat16" if mixed else "float32"
    model = tiny(**{"frozen_dtype": frozen, "config.dit.dropout": dropout}).train()
    batch = to(tiny_batch, "cuda")

    def work():
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mixed, cache_enabled=False):
            loss = model(batch)["loss"]
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            eager_loss = work().detach().clone()
        eager = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = work()
    losses = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        losses.append(loss.item())
    if dropout:
        assert losses[0] != losses[1]
        return
    assert losses[0] == losses[1] == pytest.approx(eager_loss.item(), rel=1e-3)
    for name, parameter in model.named_parameters():
        if name in eager:
            # Captured without gradients there, so each replay writes them anew instead of adding.
            torch.testing.assert_close(parameter.grad, eager[name], rtol=2e-2 if mixed else 1e-3, atol=1e-4)


def drawn_images():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 2, 64, 85, 3), dtype=torch.uint8, generator=generator)
    drawn = torch.tensor([[0.1, 0.9, 1.2, 0.8, 1.4, 0.05], [0.5, 0.0, 0.9, 1.3, 0.6, -0.07]])
    return images, drawn


STAGES = {
    "crop": lambda x, d: crop_images(x.movedim(-3, -1), (60, 80), d[:, :2]).movedim(-1, -3),
    "area": lambda x, d: resize_uint8(x.flatten(0, 1), (48, 64), mode="area"),
    "bicubic": lambda x, d: resize_uint8(x.flatten(0, 1), (56, 70), mode="bicubic"),
    "colours": lambda x, d: jitter_colours(x, d[:, 2:]),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_of_the_images_is_alike_on_both_devices(stage):
    images, drawn = drawn_images()
    x = images.movedim(-1, -3).float()
    host = STAGES[stage](x.clone(), drawn)
    device = STAGES[stage](x.cuda(), drawn.cuda()).cpu()
    # Where a sum sits on the border of rounding a value differs by one; hue has the steepest slope.
    levels = (host - device).abs()
    assert levels.max() <= (0 if stage == "crop" else 8 if stage == "colours" else 1)
    assert (levels > 0.5).float().mean() < 0.005


def test_images_are_prepared_alike_on_both_devices():
    options = ImageOptions(short_edge=64)
    images, drawn = drawn_images()
    plan = plan_decoded(64, 85, options)
    host = prepare_images(images, plan, options, drawn)
    device = prepare_images(images.cuda(), plan, options, drawn.cuda()).cpu()
    # A value that one stage rounds the other way is carried on: bicubic resizing reads it 16 times.
    levels = (host - device).abs() * 127.5
    assert levels.max() <= 8.1
    assert (levels > 0.5).float().mean() < 16 * 0.005


@pytest.mark.slow
def test_the_full_size_model_takes_a_step():
    recipe = get_recipe("gr00t_n1_6")
    options = recipe.options({"config.work.keep_unused": False, "config.dit.dropout": 0.0})
    torch.cuda.reset_peak_memory_stats()
    model = recipe.build_model(options, 0, device="cuda")
    language, head = options.config.language, options.config.head
    from loongforge.recipes.gr00t_n1_6.layout import layout_tokens

    rows = [[1] * 20 + [language.image_token_id] * 162 + [2] * 10] * 2
    layout = layout_tokens(rows, image_token_id=language.image_token_id, pad_token_id=language.pad_token_id)
    batch: dict[str, object] = {
        **layout.items(),
        "images": torch.randint(0, 256, (2, 2, 256, 256, 3), dtype=torch.uint8),
        "state": torch.randn(2, 1, head.max_state_dim),
        "action": torch.randn(2, head.action_horizon, head.max_action_dim).clamp(-1, 1),
        "action_mask": torch.ones(2, head.action_horizon, head.max_action_dim),
        "embodiment_id": torch.full((2,), 10),
    }
    batch = model.draw(to(batch, "cuda"))
    optimizer = torch.optim.AdamW(recipe.param_groups(model, 1e-5), lr=2e-5, fused=True)
    losses = []
    for _ in range(6):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    print("losses", losses, "peak GiB", torch.cuda.max_memory_allocated() / 2**30)
