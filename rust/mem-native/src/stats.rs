//! Statistics as flat dictionaries.

use loongforge_pool::error::PoolError;
use loongforge_pool::heap::{Choice, Heap, HeapStats, LABEL_NAMES, Reason, StepReport, StepSource};
use loongforge_pool::replay::MISS_NAMES;
use loongforge_pool::stats::{Gauge, Histogram};
use pyo3::exceptions::{PyKeyError, PyMemoryError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The one place where errors of the core become Python exceptions.
pub fn to_python(error: PoolError) -> PyErr {
    let text = error.to_string();
    match error {
        PoolError::OutOfMemory { .. } => PyMemoryError::new_err(text),
        PoolError::UnknownBlock { .. } => PyKeyError::new_err(text),
        PoolError::BadSize { .. } | PoolError::BadTrace { .. } | PoolError::BadPlan { .. } => {
            PyValueError::new_err(text)
        }
        PoolError::BadStep { .. } => PyRuntimeError::new_err(text),
        PoolError::Device { .. } => PyOSError::new_err(text),
    }
}

fn gauge(out: &Bound<'_, PyDict>, name: &str, gauge: Gauge) -> PyResult<()> {
    out.set_item(format!("{name}.current"), gauge.current)?;
    out.set_item(format!("{name}.peak"), gauge.peak)?;
    out.set_item(format!("{name}.allocated"), gauge.allocated)?;
    out.set_item(format!("{name}.freed"), gauge.freed)
}

fn times(out: &Bound<'_, PyDict>, name: &str, h: &Histogram) -> PyResult<()> {
    out.set_item(format!("{name}.calls"), h.count())?;
    out.set_item(format!("{name}.total_ns"), h.total_ns())?;
    out.set_item(format!("{name}.max_ns"), h.max_ns())?;
    for (label, q) in [("p50_ns", 0.5), ("p99_ns", 0.99), ("p999_ns", 0.999)] {
        out.set_item(format!("{name}.{label}"), h.quantile(q))?;
    }
    out.set_item(format!("{name}.within_10us"), h.fraction_within(10_000))
}

/// The figures of a heap at one moment. They are taken under its lock and turned into Python objects without it: making
/// an object may collect garbage, and garbage may be tensors, whose frees need the lock.
pub struct Figures {
    heap: HeapStats,
    alloc: Histogram,
    free: Histogram,
    choice: Choice,
    reason: String,
    last_oom: Option<String>,
}

impl Figures {
    /// The figures now.
    pub fn of(heap: &Heap) -> Self {
        Self {
            heap: heap.stats(),
            alloc: heap.alloc_time.clone(),
            free: heap.free_time.clone(),
            choice: heap.choice(),
            reason: heap.choice().text(heap.plan_rule()),
            last_oom: heap.last_oom().map(str::to_owned),
        }
    }
}

/// All figures of a heap.
pub fn heap_stats(py: Python<'_>, figures: Figures) -> PyResult<Bound<'_, PyDict>> {
    let s = figures.heap;
    let out = PyDict::new(py);
    for (name, value) in LABEL_NAMES.iter().zip(s.labels) {
        gauge(&out, &format!("{name}_bytes"), value)?;
    }
    gauge(&out, "allocations", s.requests)?;
    gauge(&out, "requested_bytes", s.requested)?;
    gauge(&out, "granted_bytes", s.granted)?;
    gauge(&out, "reserved_bytes", s.reserved)?;
    gauge(&out, "touched_bytes", s.touched)?;
    let c = s.counters;
    for (name, value) in [
        ("free_bytes", s.free),
        ("largest_free_bytes", s.largest_free),
        ("waiting_blocks", s.waiting),
        ("graph_bytes", s.graph_bytes),
        ("graph_pools", s.graph_pools),
        ("streams", s.streams),
        ("plan_bytes", s.plan_bytes),
        ("planned_hits", s.replay.hits),
        ("resyncs", s.replay.resyncs),
        ("device_allocs", c.device_allocs),
        ("device_frees", c.device_frees),
        ("device_commits", c.commits),
        ("stream_transfers", c.transfers),
        ("deferred_frees", c.deferred_frees),
        ("unknown_frees", c.unknown_frees),
        ("ooms", c.ooms),
        ("plans", c.plans),
        ("dissolved_plans", c.dissolved),
        ("synchronizations", c.synchronizations),
        ("stale_captures", c.stale_captures),
    ] {
        out.set_item(name, value)?;
    }
    for (name, value) in MISS_NAMES.iter().zip(s.replay.misses) {
        out.set_item(format!("misses.{name}"), value)?;
    }
    let choice = figures.choice;
    out.set_item("placement", placement_name(choice))?;
    out.set_item("placement_reason", figures.reason)?;
    out.set_item("placement_held_bytes", choice.held)?;
    out.set_item("placement_spare_bytes", choice.spare)?;
    out.set_item("internal_waste", s.internal)?;
    out.set_item("reserve_overhead", s.reserve)?;
    out.set_item("external_fragmentation", s.external)?;
    times(&out, "alloc", &figures.alloc)?;
    times(&out, "free", &figures.free)?;
    out.set_item("last_oom", figures.last_oom)?;
    Ok(out)
}

/// What serves the next step.
pub fn placement_name(choice: Choice) -> &'static str {
    match (choice.planned, choice.reason) {
        (true, _) => "plan",
        (false, Reason::Profiling) => "profiling",
        (false, _) => "run_fit",
    }
}

/// Name of a step source.
pub fn source_name(source: StepSource) -> &'static str {
    match source {
        StepSource::Profiled => "profiled",
        StepSource::Replayed => "replayed",
        StepSource::Dissolved => "dissolved",
        StepSource::NoRegion => "no_region",
        StepSource::RunFit => "run_fit",
    }
}

/// A step report as a dictionary.
pub fn step_report<'py>(py: Python<'py>, report: &StepReport) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("step", report.serial)?;
    out.set_item("source", source_name(report.source))?;
    out.set_item("allocations", report.allocs)?;
    out.set_item("planned_hits", report.hits)?;
    out.set_item("peak_requested_bytes", report.peak_requested)?;
    out.set_item("survivors", report.survivors)?;
    out.set_item("planned", report.planned)?;
    out.set_item("placement", placement_name(report.choice))?;
    out.set_item("call_ns", report.call_ns)?;
    out.set_item("plan_bytes", report.plan_bytes)?;
    out.set_item("device_calls", report.device_calls)?;
    out.set_item("resyncs", report.resyncs)?;
    let misses = PyDict::new(py);
    for (name, value) in MISS_NAMES.iter().zip(report.misses) {
        misses.set_item(name, value)?;
    }
    out.set_item("misses", misses)?;
    Ok(out)
}
