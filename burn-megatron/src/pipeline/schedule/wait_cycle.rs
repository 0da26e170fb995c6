//! Finds cycles of ranks that wait for each other.

/// Returns the cycle of ranks reached from `start` by following `waits_for`, which maps each rank to the rank
/// that it waits for.
pub(super) fn wait_cycle(start: usize, waits_for: impl Fn(usize) -> usize) -> Vec<usize> {
    let mut path = vec![start];
    loop {
        let next = waits_for(path[path.len() - 1]);
        match path.iter().position(|rank| *rank == next) {
            Some(first) => return path.split_off(first),
            None => path.push(next),
        }
    }
}
