//! Python binding of the pool: heaps with their steps, the process-wide allocator behind torch's hooks, and the
//! comparison of policies on traces.

mod cabi;
mod devices;
mod driver;
mod global;
mod host;
mod oom;
mod parts;
mod py_global;
mod py_heap;
mod py_hooks;
mod py_sim;
mod py_time;
mod stats;

use pyo3::prelude::*;

/// Native part of `loongforge_mem`.
#[pymodule]
mod _core {
    /// Version of the native part.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use super::host::HostArena;
    #[pymodule_export]
    use super::py_global::{
        global_begin_step, global_end_step, global_label, global_phase, global_relabel,
        global_reset, global_set_plan, global_set_plan_rule, global_state, global_stats,
        global_trim, set_label,
    };
    #[pymodule_export]
    use super::py_heap::PyHeap;
    #[pymodule_export]
    use super::py_hooks::{
        c_abi, configure, driver_error, set_check_fail, set_oom_thrower, set_timing,
    };
    #[pymodule_export]
    use super::py_sim::{make_plan, merge_items, policies, simulate, trace_items, verify_plan};
    #[pymodule_export]
    use super::py_time::time_steps;
}
