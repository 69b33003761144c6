"""Order of parallel branches: Johnson's rule against all orders."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_comm import LinkModel, build_mdg
from loongforge_comm.interleave import BranchLoad, branch_loads, finish_ms, order_branches
from torch import Tensor, nn

times = st.floats(0.0, 10.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(times, times), min_size=1, max_size=5))
def test_no_other_order_finishes_earlier(pairs: list[tuple[float, float]]) -> None:
    loads = [BranchLoad(name=str(i), compute_ms=a, comm_ms=b) for i, (a, b) in enumerate(pairs)]
    advice = order_branches(loads)
    best = min(finish_ms(order) for order in itertools.permutations(loads))
    assert advice.finish_ms == pytest.approx(best)
    assert advice.forward == advice.backward[::-1]
    assert advice.finish_ms <= advice.given_ms + 1e-9


def test_loads_come_from_the_graph() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heavy, self.wide = nn.Linear(64, 64), nn.Embedding(1000, 64)

        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            return self.heavy(x) + self.wide(i)

    graph = build_mdg(Two(), (torch.ones(512, 64), torch.zeros(512, dtype=torch.long)))
    link = LinkModel.from_alpha_beta(0.1, 0.1)
    loads = branch_loads(graph, ("heavy", "wide"), link, backward_ms=10.0)
    assert loads[0].compute_ms == pytest.approx(10.0)
    assert loads[1].comm_ms > loads[0].comm_ms
    assert order_branches(loads).backward == ("wide", "heavy")
    with pytest.raises(ValueError, match="allowed are module paths"):
        branch_loads(graph, ("audio",), link, backward_ms=1.0)
