//! Tables of objects with handles.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys::CUresult;

use super::Answer;

/// The next handle. A handle is never reused, so that handles of destroyed objects or of other kinds are detected.
static NEXT: AtomicUsize = AtomicUsize::new(0x10_0000);

/// Returns a new handle.
pub(super) fn unique() -> usize {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// Objects by their handles, in the order of creation.
#[derive(Debug)]
pub(super) struct Table<T>(BTreeMap<usize, T>);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> Table<T> {
    /// Adds an object and returns its handle.
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

    /// Returns the object of a handle as a mutable reference.
    pub fn get_mut(&mut self, handle: usize) -> Answer<&mut T> {
        let thing = self.0.get_mut(&handle);
        thing.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// Removes an object.
    pub fn remove(&mut self, handle: usize) -> Answer<T> {
        let thing = self.0.remove(&handle);
        thing.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// Returns all objects.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.values_mut()
    }
}
