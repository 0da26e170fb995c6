//! The places of the ranks at the rendezvous, and who does not fit one.

use std::time::Duration;

use super::message::Hello;
use crate::log::Position;

/// The place of a rank.
#[derive(Debug, Default)]
pub(super) enum Seat {
    #[default]
    Empty,
    Taken(Guest),
}

/// A rank that has come.
#[derive(Debug)]
pub(super) struct Guest {
    pub hello: Hello,
    /// When it was last heard of.
    pub heard: Duration,
    pub position: Position,
    pub returned: bool,
    /// Its connection is closed.
    pub gone: bool,
}

impl Seat {
    pub fn guest(&self) -> Option<&Guest> {
        match self {
            Seat::Taken(guest) => Some(guest),
            Seat::Empty => None,
        }
    }

    pub fn guest_mut(&mut self) -> Option<&mut Guest> {
        match self {
            Seat::Taken(guest) => Some(guest),
            Seat::Empty => None,
        }
    }
}

/// Whether a rank there says nothing more.
pub(super) fn is_over(position: &Position) -> bool {
    matches!(
        position,
        Position::Failed(_) | Position::Gone(_) | Position::Returned | Position::Silent(..)
    )
}

/// Why a rank that has the token does not fit this world.
pub(super) fn misfit(hello: &Hello, seats: &[Seat]) -> Option<String> {
    let Hello { rank, size, .. } = *hello;
    let world = seats.len();
    let version = env!("CARGO_PKG_VERSION");
    if hello.version != version {
        return Some(format!(
            "rank {rank} runs version {} of burn-megatron, the rendezvous {version}",
            hello.version
        ));
    }
    if size != world {
        return Some(format!(
            "rank {rank} was told that there are {size} ranks, the rendezvous {world}; give all \
             the same WORLD_SIZE"
        ));
    }
    if rank >= world {
        let most = world - 1;
        return Some(format!(
            "a process says that it is rank {rank} of {size}; 0 to {most} would fit"
        ));
    }
    let other = &seats[rank].guest()?.hello;
    Some(format!(
        "two processes say that they are rank {rank}: process {} on {} and process {} on {}",
        other.process, other.host, hello.process, hello.host
    ))
}
