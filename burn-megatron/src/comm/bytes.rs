//! Texts and other bytes of any length between ranks.

use super::buffer::Buffer;
use super::communicator::Communicator;
use super::error::CommError;

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
    let length = match comm.broadcast(vec![own.len() as i64].into(), root)? {
        Buffer::I64(length) => length[0] as usize,
        other => unreachable!("i64 went in, {} came out", other.dtype()),
    };
    let mut bytes = own.to_vec();
    bytes.resize(length, 0);
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
    use super::*;
    use crate::comm::World;

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
}
