//! A cache of values that several threads request.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

/// Values by key. Each value is computed once. A thread that requests a value that is being computed waits for this
/// value only.
#[derive(Debug)]
pub(super) struct Cache<K, V>(Mutex<HashMap<K, Arc<OnceLock<V>>>>);

impl<K, V> Default for Cache<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Clone> Cache<K, V> {
    pub fn get(&self, key: K, make: impl FnOnce() -> V) -> V {
        let value = self.0.lock().entry(key).or_default().clone();
        value.get_or_init(make).clone()
    }
}
