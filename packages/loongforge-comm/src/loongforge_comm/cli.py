"""Command line: ``python -m loongforge_comm graph | plan | simulate | monitor | store``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

from loongforge_comm.gantt import draw
from loongforge_comm.groups import apply_overrides, load_overrides
from loongforge_comm.link import LinkModel
from loongforge_comm.mdg import ModuleDependencyGraph, build_mdg
from loongforge_comm.mdg.render import communication_groups, to_html, to_svg
from loongforge_comm.monitor import watch
from loongforge_comm.plan import CommPlan
from loongforge_comm.planner import plan_buckets
from loongforge_comm.presets import PRESETS
from loongforge_comm.simulate import link_from_topology, scale_link, simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 success, 2 wrong input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loongforge_comm", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    graph = commands.add_parser("graph", help="draw or print the module dependency graph of a model")
    graph.add_argument(
        "model", help="PACKAGE.MODULE:FUNCTION that returns a model, or (model, args[, kwargs])"
    )
    graph.add_argument("-o", "--output", type=Path, help="FILE.svg, FILE.html or FILE.json; default: a table")
    graph.add_argument("--plan", type=Path, help="colour by the groups of this plan")
    graph.add_argument(
        "--crossover-kib", type=float, default=256.0, help="high load above this size without a plan"
    )
    graph.add_argument("--depth", type=int, default=0, help="merge modules below this depth; 0 keeps all")
    graph.set_defaults(run=_graph)
    plan = commands.add_parser("plan", help="compute a plan from a model or its graph, and explain it")
    plan.add_argument("model", help="PACKAGE.MODULE:FUNCTION, or a graph written by 'graph -o FILE.json'")
    plan.add_argument("--backward-ms", type=float, required=True, help="time of one backward in milliseconds")
    plan.add_argument("--mdg-config", type=Path, help="YAML with group overrides")
    plan.add_argument("-o", "--output", type=Path, help="write the plan here")
    _link_options(plan)
    plan.set_defaults(run=_plan)
    sim = commands.add_parser("simulate", help="predict a step of a plan at any number of ranks (a model)")
    sim.add_argument("plan", type=Path, help="plan written by 'plan -o' or taken from a checkpoint")
    sim.add_argument("--jitter", type=float, default=0.0, help="relative spread of a rank's backward time")
    sim.add_argument("--steps", type=int, default=200, help="simulated steps when there is jitter")
    sim.add_argument("--seed", type=int, default=0)
    sim.add_argument("--gantt", type=Path, metavar="FILE.png", help="draw one step")
    sim.add_argument("--json", action="store_true", help="machine-readable output")
    _link_options(sim)
    sim.set_defaults(run=_simulate)
    monitor = commands.add_parser("monitor", help="live view of a running scheduler")
    monitor.add_argument("status", type=Path, help="the run's status_path")
    monitor.add_argument("--interval", type=float, default=2.0, help="seconds between refreshes")
    monitor.add_argument("--once", action="store_true", help="print once and end")
    monitor.add_argument("--json", action="store_true", help="one JSON object per refresh")
    monitor.set_defaults(run=_monitor)
    store = commands.add_parser("store", help="a store of its own for runs whose first node may be lost")
    store.add_argument("--host", default="0.0.0.0", help="address to listen on")
    store.add_argument("--port", type=int, default=29400, help="port to listen on; 0 takes a free one")
    store.set_defaults(run=_store)
    return parser


def _link_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks")
    parser.add_argument(
        "--link",
        default="h100-ib400",
        help=f"preset ({', '.join(sorted(PRESETS))}) or a link model's JSON file",
    )


def load_link(name: str, ranks: int) -> LinkModel:
    """A preset by name, or a measured link from a file, for the given number of ranks."""
    if ranks < 2:
        msg = f"ranks is {ranks}, allowed are at least 2"
        raise ValueError(msg)
    if name in PRESETS:
        return link_from_topology(PRESETS[name], ranks)
    path = Path(name)
    if not path.is_file():
        msg = (
            f"link is {name!r}, allowed are {', '.join(sorted(PRESETS))} or the path of a link "
            "model's JSON file"
        )
        raise ValueError(msg)
    link = LinkModel.from_json(path.read_text())
    return link if link.world_size == ranks else scale_link(link, ranks)


def _store(options: argparse.Namespace) -> int:
    """Serve until interrupted; runs keep their own part of it.

    torch's store asks the name service for every host that connects, and answers nobody meanwhile: where that
    service is slow it gets one second instead of twice five.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    store = dist.TCPStore(options.host, options.port, is_master=True, wait_for_workers=False)
    sys.stdout.write(f"store at {options.host}:{store.port}\n")
    sys.stdout.flush()
    threading.Event().wait()
    return 0


def load_graph(name: str) -> ModuleDependencyGraph:
    """A graph from a JSON file, or built from PACKAGE.MODULE:FUNCTION."""
    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        return ModuleDependencyGraph.from_json(path.read_text())
    module_name, _, function = name.partition(":")
    if not function:
        msg = (
            f"model is {name!r}, allowed are PACKAGE.MODULE:FUNCTION or an existing graph file ending in "
            ".json"
        )
        raise ValueError(msg)
    sys.path.insert(0, str(Path.cwd()))
    made = getattr(importlib.import_module(module_name), function)()
    if isinstance(made, nn.Module):
        return build_mdg(made)
    if not isinstance(made, tuple) or not made or not isinstance(made[0], nn.Module):
        msg = f"{name} returned {type(made).__name__}, allowed are a module or (module, args[, kwargs])"
        raise ValueError(msg)
    args = made[1] if len(made) > 1 else ()
    kwargs = made[2] if len(made) > 2 else {}
    return build_mdg(made[0], args if isinstance(args, (tuple, list)) else (args,), kwargs)


def _graph(options: argparse.Namespace) -> int:
    graph = load_graph(options.model)
    if options.output is None:
        sys.stdout.write(graph.table() + "\n")
        return 0
    plan = CommPlan.from_json(options.plan.read_text()) if options.plan else None
    groups = communication_groups(graph, plan, options.crossover_kib * 1024)
    writers = {
        ".svg": lambda: to_svg(graph, groups, depth=options.depth),
        ".html": lambda: to_html(graph, groups, depth=options.depth),
        ".json": graph.to_json,
    }
    if options.output.suffix not in writers:
        msg = f"output is {options.output}, allowed are files that end in .svg, .html or .json"
        raise ValueError(msg)
    options.output.write_text(writers[options.output.suffix]())
    return 0


def _plan(options: argparse.Namespace) -> int:
    graph = load_graph(options.model)
    specs = apply_overrides(graph.gradient_specs(options.backward_ms), load_overrides(options.mdg_config))
    plan = plan_buckets(specs, load_link(options.link, options.ranks), source="mdg")
    if options.output is not None:
        options.output.write_text(plan.to_json())
    sys.stdout.write(plan.explain() + "\n")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    plan = CommPlan.from_json(options.plan.read_text())
    result = simulate(
        plan,
        load_link(options.link, options.ranks),
        jitter=options.jitter,
        steps=options.steps if options.jitter > 0 else 1,
        seed=options.seed,
    )
    if options.gantt is not None:
        draw(plan, result, options.gantt)
    if options.json:
        fields: Mapping[str, object] = {
            k: v for k, v in result.__dict__.items() if k not in ("spans", "ready")
        }
        sys.stdout.write(json.dumps({"kind": "model", **fields}) + "\n")
    else:
        sys.stdout.write(result.report() + "\n")
    return 0


def _monitor(options: argparse.Namespace) -> int:
    return watch(options.status, interval_s=options.interval, as_json=options.json, once=options.once)
