//! Collectives for byte strings whose lengths may differ between ranks.

use std::panic::resume_unwind;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crate::communicator::Communicator;
use crate::error::CommError;

/// Sent in place of the length while the root still computes the bytes.
const NOT_READY: i64 = -1;

/// The maximum length of a byte string. A greater received length is corrupted, so it is rejected before memory is
/// allocated.
const MAX_BYTES: i64 = 1 << 32;

/// Checks a length that was sent by the rank with index `rank` in the group.
fn check_length(comm: &dyn Communicator, rank: usize, length: i64) -> Result<usize, CommError> {
    match usize::try_from(length) {
        Ok(bytes) if length <= MAX_BYTES => Ok(bytes),
        _ => {
            let group = comm.group();
            let rank = group.ranks()[rank];
            let reason = format!(
                "the length of the bytes of rank {rank} was corrupted: expected 0 to {MAX_BYTES}, got {length}"
            );
            Err(CommError::invalid_call(group, "exchange of bytes", reason))
        }
    }
}

/// Gathers one byte string from each rank, in group order. The lengths may differ between ranks.
///
/// Collective: call on all ranks of the group.
///
/// ```
/// use burn_megatron_comm::{World, all_gather_bytes};
///
/// let names = World::threads(2)?.run(|rank| {
///     let own = "x".repeat(1 + rank.rank());
///     all_gather_bytes(&*rank.communicator(), own.as_bytes())
/// })?;
/// assert_eq!(names[0], [b"x".to_vec(), b"xx".to_vec()]);
/// # Ok::<(), burn_megatron_comm::WorldError>(())
/// ```
///
/// # Errors
/// The errors of [`all_gather`](Communicator::all_gather). [`CommError::InvalidCall`] if the byte string of a rank is
/// longer than 4 GiB.
pub fn all_gather_bytes(comm: &dyn Communicator, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
    let lengths: Vec<i64> = comm.all_gather(vec![own.len() as i64].into())?.into_vec();
    let lengths = lengths.into_iter().enumerate();
    let lengths = lengths.map(|(rank, length)| check_length(comm, rank, length));
    let lengths: Vec<usize> = lengths.collect::<Result<_, _>>()?;
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let mut padded = own.to_vec();
    padded.resize(longest, 0);
    let all: Vec<u8> = comm.all_gather(padded.into())?.into_vec();
    let part = |(rank, length): (usize, usize)| all[rank * longest..][..length].to_vec();
    Ok(lengths.into_iter().enumerate().map(part).collect())
}

/// Broadcasts a byte string from the rank with index `root` in the group. On the other ranks `own` is ignored.
///
/// Collective: call on all ranks of the group.
///
/// # Errors
/// The errors of [`broadcast`](Communicator::broadcast). [`CommError::InvalidCall`] if the byte string is longer than 4
/// GiB.
pub fn broadcast_bytes(
    comm: &dyn Communicator,
    own: &[u8],
    root: usize,
) -> Result<Vec<u8>, CommError> {
    let length = comm.broadcast_scalar(own.len() as i64, root)?;
    broadcast_of(comm, own, length, root)
}

/// Broadcasts the byte string that the closure `make` returns on the rank with index `root` in the group.
///
/// The root runs `make` on a second thread. `make` may take longer than the timeout of a collective: until it returns,
/// the root broadcasts a short "not ready" message every `interval`. The other ranks pass `None` for `make`.
///
/// Collective: call on all ranks of the group.
///
/// # Errors
/// The errors of [`broadcast`](Communicator::broadcast). If `make` fails, only the root returns the error of `make`.
/// The root rank must then end with an error, so that the collectives of the other ranks fail too.
pub fn broadcast_when_ready<E: Send>(
    comm: &dyn Communicator,
    make: Option<impl FnOnce() -> Result<Vec<u8>, E> + Send>,
    root: usize,
    interval: Duration,
) -> Result<Result<Vec<u8>, E>, CommError> {
    let Some(make) = make else {
        loop {
            let length = comm.broadcast_scalar(0, root)?;
            if length != NOT_READY {
                return broadcast_of(comm, &[], length, root).map(Ok);
            }
        }
    };
    thread::scope(|scope| {
        let (done, finished) = mpsc::channel();
        let producer = scope.spawn(move || {
            let made = make();
            // The receiver is gone if a broadcast has failed.
            let _ = done.send(());
            made
        });
        while finished.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            comm.broadcast_scalar(NOT_READY, root)?;
        }
        let made = producer.join().unwrap_or_else(|panic| resume_unwind(panic));
        match made {
            Ok(own) => {
                let length = comm.broadcast_scalar(own.len() as i64, root)?;
                broadcast_of(comm, &own, length, root).map(Ok)
            }
            Err(error) => Ok(Err(error)),
        }
    })
}

fn broadcast_of(
    comm: &dyn Communicator,
    own: &[u8],
    length: i64,
    root: usize,
) -> Result<Vec<u8>, CommError> {
    let mut bytes = own.to_vec();
    bytes.resize(check_length(comm, root, length)?, 0);
    Ok(comm.broadcast(bytes.into(), root)?.into_vec())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{Rank, SingleRank, World};

    #[test]
    fn bytes_of_any_length_reach_every_rank() {
        let texts = ["", "one", "twenty-two"];
        let results = World::threads(3).unwrap().run(|rank| {
            let (comm, own) = (rank.communicator(), texts[rank.rank()].as_bytes());
            let all = all_gather_bytes(&*comm, own)?;
            Ok::<_, CommError>((all, broadcast_bytes(&*comm, own, 2)?))
        });
        for (all, last) in results.unwrap() {
            assert_eq!(all, texts.map(str::as_bytes));
            assert_eq!(last, texts[2].as_bytes());
        }
    }

    #[test]
    fn a_corrupted_length_is_an_error() {
        let one = SingleRank::new("world");
        for length in [-2, i64::MAX] {
            let error = broadcast_of(&one, b"own", length, 0)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains(&format!("expected 0 to 4294967296, got {length}")),
                "{error}"
            );
        }
    }

    /// `make` returns once the other rank is in its fifth call, so no single call spans all of `make`.
    #[test]
    fn no_single_call_waits_for_the_whole_of_make() {
        let (done, finished) = mpsc::channel::<Rank>();
        let finished = Mutex::new(finished);
        let results = World::threads(2).unwrap().run(|rank| {
            let make = (rank.rank() == 0).then_some(|| {
                let other = finished.lock().unwrap().recv().unwrap();
                let polls = (0..60_000).take_while(|_| other.recent_calls().len() < 5);
                polls.for_each(|_| thread::sleep(Duration::from_millis(1)));
                let calls = other.recent_calls().len();
                (calls >= 5)
                    .then(|| b"made".to_vec())
                    .ok_or("no keepalives")
            });
            if rank.rank() == 1 {
                done.send(rank.clone()).unwrap();
            }
            let interval = Duration::from_millis(1);
            let made = broadcast_when_ready(&*rank.communicator(), make, 0, interval);
            made.map_err(|error| error.to_string())?
                .map_err(String::from)
        });
        assert_eq!(results.unwrap(), [b"made", b"made"]);
    }

    #[test]
    fn an_error_of_make_ends_all_ranks() {
        let result = World::threads(2).unwrap().run(|rank| {
            let make = || Err("no disk".to_string());
            let make = (rank.rank() == 0).then_some(make);
            let interval = Duration::from_secs(60);
            let made = broadcast_when_ready(&*rank.communicator(), make, 0, interval);
            made.map_err(|error| error.to_string())?
        });
        let error = result.unwrap_err().to_string();
        assert!(error.contains("no disk"), "{error}");
    }
}
