//! What the engines whose ranks are processes have in common.

mod slot;
mod transport;

pub(super) use slot::Slot;
pub(super) use transport::{GroupId, Job, Transport};
