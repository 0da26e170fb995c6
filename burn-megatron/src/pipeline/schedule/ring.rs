//! Ranks that wait for one another.

/// The ring of ranks that is reached from `start` by going from each rank to the one it waits for.
///
/// `waits_for` gives a rank for every rank on the way.
pub(super) fn ring(start: usize, waits_for: impl Fn(usize) -> usize) -> Vec<usize> {
    let mut path = vec![start];
    loop {
        let next = waits_for(path[path.len() - 1]);
        match path.iter().position(|rank| *rank == next) {
            Some(first) => return path.split_off(first),
            None => path.push(next),
        }
    }
}
