//! Things that callers hold by a handle.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys::CUresult;

use super::Answer;

/// Handles are used once, for whatever kind: one of another kind, or of something that is gone, is
/// told apart from a good one.
static NEXT: AtomicUsize = AtomicUsize::new(0x10_0000);

/// A handle that nothing has had.
pub(super) fn unique() -> usize {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// Things by their handles, in the order in which they were made.
#[derive(Debug)]
pub(super) struct Table<T>(BTreeMap<usize, T>);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> Table<T> {
    /// Takes something in; its handle.
    pub fn add(&mut self, thing: T) -> usize {
        let handle = unique();
        self.0.insert(handle, thing);
        handle
    }

    /// Returns the object of a handle.
    pub fn get(&self, handle: usize) -> Answer<&T> {
        let thing = self.0.get(&handle);
        thing.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// As [`get`](Self::get), to change it.
    pub fn get_mut(&mut self, handle: usize) -> Answer<&mut T> {
        let thing = self.0.get_mut(&handle);
        thing.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// Takes something out.
    pub fn remove(&mut self, handle: usize) -> Answer<T> {
        let thing = self.0.remove(&handle);
        thing.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// Everything.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.values_mut()
    }
}
