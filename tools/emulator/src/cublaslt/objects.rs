//! The objects behind the handles of callers.
//!
//! A handle is a number, not an address, so that a destroyed or invalid handle is detected.

use std::collections::BTreeMap;

use parking_lot::{Mutex, MutexGuard};

use super::attributes::Attributes;
use super::{NOT_INITIALIZED, Refusal, invalid};

/// Kind of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Library,
    Description,
    Layout,
    Preference,
}

#[derive(Debug)]
pub(super) struct Objects {
    next: usize,
    all: BTreeMap<usize, (Kind, Attributes)>,
}

static OBJECTS: Mutex<Objects> = Mutex::new(Objects {
    next: 1,
    all: BTreeMap::new(),
});

pub(super) fn objects() -> MutexGuard<'static, Objects> {
    OBJECTS.lock()
}

impl Objects {
    pub(super) fn create(&mut self, kind: Kind, attributes: Attributes) -> usize {
        // Handles are spaced like addresses.
        let handle = self.next << 4;
        self.next += 1;
        self.all.insert(handle, (kind, attributes));
        handle
    }

    pub(super) fn destroy(&mut self, kind: Kind, handle: usize) -> Result<(), Refusal> {
        self.get(kind, handle)?;
        self.all.remove(&handle);
        Ok(())
    }

    pub(super) fn get(&self, kind: Kind, handle: usize) -> Result<&Attributes, Refusal> {
        match self.all.get(&handle) {
            Some((found, attributes)) if *found == kind => Ok(attributes),
            _ => Err(missing(kind, handle)),
        }
    }

    pub(super) fn get_mut(
        &mut self,
        kind: Kind,
        handle: usize,
    ) -> Result<&mut Attributes, Refusal> {
        match self.all.get_mut(&handle) {
            Some((found, attributes)) if *found == kind => Ok(attributes),
            _ => Err(missing(kind, handle)),
        }
    }
}

fn missing(kind: Kind, handle: usize) -> Refusal {
    let refusal = invalid(format!(
        "{handle:#x} is the handle of no {kind:?} that lives"
    ));
    match kind {
        Kind::Library => Refusal {
            status: NOT_INITIALIZED,
            ..refusal
        },
        _ => refusal,
    }
}
