//! Messages that a rank sends to itself.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::result_slot::ResultSlot;
use crate::buffer::Buffer;

/// The messages of one group that this rank sends to itself, keyed by number. The slot of a message is created by its
/// send or its receive, whichever comes first.
#[derive(Debug, Default)]
pub(super) struct Loopback(Mutex<HashMap<u64, Arc<ResultSlot>>>);

impl Loopback {
    /// Delivers the message with the given number.
    pub fn deliver(&self, number: u64, message: Buffer) {
        self.slot(number).fulfil(Ok(message));
    }

    /// Returns the slot of the message with the given number. Called once by the send and once by the receive.
    pub fn slot(&self, number: u64) -> Arc<ResultSlot> {
        let mut slots = self.0.lock();
        match slots.remove(&number) {
            Some(slot) => slot,
            None => slots.entry(number).or_default().clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn sender_and_receiver_meet_in_either_order() {
        let loopback = Loopback::default();
        loopback.deliver(0, vec![1u8].into());
        let (first, second) = (loopback.slot(0), loopback.slot(1));
        loopback.deliver(1, vec![2u8].into());
        let take = |slot: Arc<ResultSlot>| slot.take_within(Duration::ZERO).unwrap().unwrap();
        assert_eq!(
            [take(second), take(first)],
            [vec![2u8].into(), vec![1u8].into()]
        );
        assert!(loopback.0.lock().is_empty());
    }
}
