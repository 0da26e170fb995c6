//! A cache whose values several threads may request at the same time.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

/// A thread-safe cache of values by key. Each value is computed once. If a thread requests a value that another thread
/// is computing, it waits for this value.
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
