//! The slot through which an engine passes the result of a call to the rank that waits for it.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::buffer::Buffer;
use crate::error::CommError;

/// A slot for the result of one call.
#[derive(Debug, Default)]
pub(crate) struct ResultSlot {
    result: Mutex<Option<Result<Buffer, CommError>>>,
    condvar: Condvar,
}

impl ResultSlot {
    /// Sets the result and wakes the thread that waits for it. Has no effect if a result is already set.
    pub fn fulfil(&self, result: Result<Buffer, CommError>) {
        let mut current = self.result.lock();
        if current.is_none() {
            *current = Some(result);
            self.condvar.notify_all();
        }
    }

    /// Waits up to `timeout` for the result and takes it out of the slot.
    pub fn take_within(&self, timeout: Duration) -> Option<Result<Buffer, CommError>> {
        let mut current = self.result.lock();
        self.condvar
            .wait_while_for(&mut current, |result| result.is_none(), timeout);
        current.take()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn a_result_is_taken_once() {
        let slot = ResultSlot::default();
        assert!(slot.take_within(Duration::ZERO).is_none());
        slot.fulfil(Ok(vec![1u8].into()));
        slot.fulfil(Ok(vec![2u8].into()));
        let taken = slot.take_within(Duration::ZERO).unwrap();
        assert_eq!(taken, Ok(vec![1u8].into()));
        assert!(slot.take_within(Duration::ZERO).is_none());
    }

    #[test]
    fn a_waiting_rank_is_woken() {
        let slot = Arc::new(ResultSlot::default());
        let other = slot.clone();
        let thread = thread::spawn(move || other.take_within(Duration::from_secs(60)));
        thread::sleep(Duration::from_millis(20));
        slot.fulfil(Ok(vec![7u8].into()));
        assert_eq!(thread.join().unwrap(), Some(Ok(vec![7u8].into())));
    }
}
