//! A key-value store that ranks use before they have a communicator.

use std::fmt;
use std::time::Duration;

use burn_megatron_rendezvous::RendezvousClient;

use crate::error::CommError;

/// A key-value store that all ranks of a world share. Each key is posted only once.
///
/// The rendezvous implements this trait. Tests of engines use an implementation in memory.
pub(crate) trait KeyValueStore: fmt::Debug + Send + Sync {
    /// Posts `value` under `key`.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the store cannot be reached.
    fn post(&self, key: &str, value: &[u8]) -> Result<(), CommError>;

    /// Waits until a rank has posted a value under `key`, and returns the value.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the key was not posted within `timeout`.
    fn read(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, CommError>;
}

impl KeyValueStore for RendezvousClient {
    fn post(&self, key: &str, value: &[u8]) -> Result<(), CommError> {
        Self::post(self, key, value).map_err(|message| CommError::engine("rendezvous", message))
    }

    fn read(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, CommError> {
        Self::read(self, key, timeout).map_err(|message| CommError::engine("rendezvous", message))
    }
}

#[cfg(test)]
pub(crate) use memory::MemoryStore;

#[cfg(test)]
mod memory {
    use std::collections::HashMap;
    use std::sync::{Condvar, Mutex};

    use super::*;

    /// A key-value store for tests in which the ranks are threads.
    #[derive(Debug, Default)]
    pub(crate) struct MemoryStore {
        values: Mutex<HashMap<String, Vec<u8>>>,
        posted: Condvar,
    }

    impl KeyValueStore for MemoryStore {
        fn post(&self, key: &str, value: &[u8]) -> Result<(), CommError> {
            let mut values = self.values.lock().unwrap();
            let before = values.insert(key.into(), value.into());
            assert_eq!(before, None, "{key} is posted twice");
            self.posted.notify_all();
            Ok(())
        }

        fn read(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, CommError> {
            let values = self.values.lock().unwrap();
            let missing = |values: &mut HashMap<String, _>| !values.contains_key(key);
            let waited = self.posted.wait_timeout_while(values, timeout, missing);
            let (values, _) = waited.unwrap();
            values.get(key).cloned().ok_or_else(|| CommError::Engine {
                engine: "test".into(),
                message: format!("no rank has published {key}"),
            })
        }
    }
}
