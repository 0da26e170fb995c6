//! Texts and other bytes of any length between ranks.

use std::panic::resume_unwind;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::buffer::Buffer;
use super::communicator::Communicator;
use super::error::CommError;

/// In place of a length: the bytes are not made yet.
const NOT_YET: i64 = -1;

/// The bytes of every rank, in group order; each may give as many as it likes.
///
/// # Errors
/// Those of two [`all_gather`](Communicator::all_gather)s.
pub fn all_gather_bytes(comm: &dyn Communicator, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
    let lengths = match comm.all_gather(vec![own.len() as i64].into())? {
        Buffer::I64(lengths) => lengths,
        other => unreachable!("i64 went in, {} came out", other.dtype()),
    };
    let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
    let mut padded = own.to_vec();
    padded.resize(longest, 0);
    let all = as_bytes(comm.all_gather(padded.into())?);
    let part = |(rank, length): (usize, i64)| {
        all[rank * longest..rank * longest + length as usize].to_vec()
    };
    Ok(lengths.into_iter().enumerate().map(part).collect())
}

/// The bytes of the rank with index `root`, on every rank; what the others give is not read.
///
/// # Errors
/// Those of two [`broadcast`](Communicator::broadcast)s.
pub fn broadcast_bytes(
    comm: &dyn Communicator,
    own: &[u8],
    root: usize,
) -> Result<Vec<u8>, CommError> {
    let length = broadcast_length(comm, own.len() as i64, root)?;
    broadcast_of(comm, own, length, root)
}

/// [`broadcast_bytes`] of what the rank with index `root` is yet to make, which may take longer than a call
/// waits: `make` runs on a thread beside, and the rank tells the others every `beat` that it is not there
/// yet. Only that rank gives a `make`.
///
/// # Errors
/// Those of the [`broadcast`](Communicator::broadcast)s. What `make` fails with is given to the rank that
/// made it alone: it is to end then, which the others see in the call that they wait in.
pub fn broadcast_made<E: Send>(
    comm: &dyn Communicator,
    make: Option<impl FnOnce() -> Result<Vec<u8>, E> + Send>,
    root: usize,
    beat: Duration,
) -> Result<Result<Vec<u8>, E>, CommError> {
    let Some(make) = make else {
        loop {
            let length = broadcast_length(comm, 0, root)?;
            if length != NOT_YET {
                return broadcast_of(comm, &[], length, root).map(Ok);
            }
        }
    };
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let maker = scope.spawn(move || {
            let made = make();
            // Nobody listens any more where a broadcast has failed.
            let _ = tell.send(());
            made
        });
        while told.recv_timeout(beat) == Err(RecvTimeoutError::Timeout) {
            broadcast_length(comm, NOT_YET, root)?;
        }
        let made = maker.join().unwrap_or_else(|panic| resume_unwind(panic));
        match made {
            Ok(own) => {
                let length = broadcast_length(comm, own.len() as i64, root)?;
                broadcast_of(comm, &own, length, root).map(Ok)
            }
            Err(error) => Ok(Err(error)),
        }
    })
}

fn broadcast_length(comm: &dyn Communicator, own: i64, root: usize) -> Result<i64, CommError> {
    match comm.broadcast(vec![own].into(), root)? {
        Buffer::I64(length) => Ok(length[0]),
        other => unreachable!("i64 went in, {} came out", other.dtype()),
    }
}

fn broadcast_of(
    comm: &dyn Communicator,
    own: &[u8],
    length: i64,
    root: usize,
) -> Result<Vec<u8>, CommError> {
    let mut bytes = own.to_vec();
    bytes.resize(length as usize, 0);
    Ok(as_bytes(comm.broadcast(bytes.into(), root)?))
}

fn as_bytes(buffer: Buffer) -> Vec<u8> {
    match buffer {
        Buffer::U8(bytes) => bytes,
        other => unreachable!("u8 went in, {} came out", other.dtype()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{Rank, World};

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
    /// The work goes on until the other rank is in its fifth call: none of its calls waits for all of it.
    #[test]
    fn the_others_do_not_wait_in_one_call_for_what_is_still_being_made() {
        let (tell, told) = mpsc::channel::<Rank>();
        let told = Mutex::new(told);
        let results = World::threads(2).unwrap().run(|rank| {
            let make = (rank.rank() == 0).then_some(|| {
                let other = told.lock().unwrap().recv().unwrap();
                let polls = (0..60_000).take_while(|_| other.recent_calls().len() < 5);
                polls.for_each(|_| thread::sleep(Duration::from_millis(1)));
                let calls = other.recent_calls().len();
                (calls >= 5).then(|| b"made".to_vec()).ok_or("no beats")
            });
            if rank.rank() == 1 {
                tell.send(rank.clone()).unwrap();
            }
            let beat = Duration::from_millis(1);
            let made = broadcast_made(&*rank.communicator(), make, 0, beat);
            made.map_err(|error| error.to_string())?
                .map_err(String::from)
        });
        assert_eq!(results.unwrap(), [b"made", b"made"]);
    }

    #[test]
    fn who_cannot_make_it_says_why_and_ends_the_others() {
        let result = World::threads(2).unwrap().run(|rank| {
            let make = || Err("no disk".to_string());
            let make = (rank.rank() == 0).then_some(make);
            let beat = Duration::from_secs(60);
            let made = broadcast_made(&*rank.communicator(), make, 0, beat);
            made.map_err(|error| error.to_string())?
        });
        let error = result.unwrap_err().to_string();
        assert!(error.contains("no disk"), "{error}");
    }
}
