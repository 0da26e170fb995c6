//! Where the result of a call is put by the engine and taken by the rank that waits.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::buffer::Buffer;
use crate::error::CommError;

/// The result of one call, once it is there.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    result: Mutex<Option<Result<Buffer, CommError>>>,
    bell: Condvar,
}

impl Slot {
    /// Puts the result in and wakes who waits. Only the first counts.
    pub fn fulfil(&self, result: Result<Buffer, CommError>) {
        let mut place = self.lock();
        if place.is_none() {
            *place = Some(result);
            self.bell.notify_all();
        }
    }

    /// Takes the result, or waits for it at most so long.
    pub fn take_within(&self, patience: Duration) -> Option<Result<Buffer, CommError>> {
        let until = Instant::now() + patience;
        let mut place = self.lock();
        loop {
            if let Some(result) = place.take() {
                return Some(result);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            (place, _) = self
                .bell
                .wait_timeout(place, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Result<Buffer, CommError>>> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn a_result_is_taken_once() {
        let slot = Slot::default();
        assert!(slot.take_within(Duration::ZERO).is_none());
        slot.fulfil(Ok(vec![1u8].into()));
        slot.fulfil(Ok(vec![2u8].into()));
        let taken = slot.take_within(Duration::ZERO).unwrap();
        assert_eq!(taken, Ok(vec![1u8].into()));
        assert!(slot.take_within(Duration::ZERO).is_none());
    }

    #[test]
    fn a_waiting_rank_is_woken() {
        let slot = Arc::new(Slot::default());
        let other = slot.clone();
        let thread = thread::spawn(move || other.take_within(Duration::from_secs(60)));
        thread::sleep(Duration::from_millis(20));
        slot.fulfil(Ok(vec![7u8].into()));
        assert_eq!(thread.join().unwrap(), Some(Ok(vec![7u8].into())));
    }
}
