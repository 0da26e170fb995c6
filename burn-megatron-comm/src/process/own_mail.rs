//! Messages of a rank to itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::slot::Slot;
use crate::buffer::Buffer;

/// The messages of one group that this rank sends to itself, by number: whichever of the two comes first,
/// sender or receiver, leaves the slot for the other.
#[derive(Debug, Default)]
pub(super) struct OwnMail(Mutex<HashMap<u64, Arc<Slot>>>);

impl OwnMail {
    /// Delivers message `number`.
    pub fn post(&self, number: u64, letter: Buffer) {
        self.slot(number).fulfil(Ok(letter));
    }

    /// Where message `number` is, or will be. Each side asks once.
    pub fn slot(&self, number: u64) -> Arc<Slot> {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
        let mail = OwnMail::default();
        mail.post(0, vec![1u8].into());
        let (first, second) = (mail.slot(0), mail.slot(1));
        mail.post(1, vec![2u8].into());
        let take = |slot: Arc<Slot>| slot.take_within(Duration::ZERO).unwrap().unwrap();
        assert_eq!(
            [take(second), take(first)],
            [vec![2u8].into(), vec![1u8].into()]
        );
        assert!(mail.0.lock().unwrap().is_empty());
    }
}
