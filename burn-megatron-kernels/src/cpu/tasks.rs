//! Runs the tasks of a CPU implementation on the threads of rayon's pool.
//!
//! Rayon's iterators are compiled again for every closure, which took a third of this crate's build time. In this
//! module, the parallel code is compiled only once. Each closure is also compiled once, for both parallel and serial
//! execution.

use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

/// Calls `work` with each task and returns after all calls have returned.
///
/// A single task, or any task in a pool of one thread, runs on the calling thread. The assignment
/// of tasks to threads is not fixed, so results must not depend on it.
pub(crate) fn for_each_task<T: Send>(
    tasks: impl IntoIterator<Item = T>,
    work: impl Fn(T) + Sync + Send,
) {
    let tasks: Vec<_> = tasks
        .into_iter()
        .map(|task| Mutex::new(Some(task)))
        .collect();
    run(tasks.len(), &|i| {
        let task = lock(&tasks[i]).take();
        task.into_iter().for_each(&work);
    });
}

/// Returns the results of `work` in the order of the tasks. See [`for_each_task`].
pub(crate) fn map_tasks<T: Send, R: Send>(
    tasks: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R + Sync + Send,
) -> Vec<R> {
    let tasks: Vec<T> = tasks.into_iter().collect();
    let mut results: Vec<Option<R>> = tasks.iter().map(|_| None).collect();
    for_each_task(tasks.into_iter().zip(&mut results), |(task, result)| {
        *result = Some(work(task))
    });
    results.into_iter().flatten().collect()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run(count: usize, work: &(dyn Fn(usize) + Sync)) {
    if count > 1 && rayon::current_num_threads() > 1 {
        (0..count).into_par_iter().with_max_len(1).for_each(work)
    } else {
        (0..count).for_each(work)
    }
}
