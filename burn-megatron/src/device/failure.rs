//! Detects panics of the threads on which CubeCL runs a device.
//!
//! CubeCL catches a panic of such a thread and continues. The outputs of the task that panicked are then read although
//! they were never computed. All later results can therefore be wrong.

use std::panic;
use std::sync::{Once, OnceLock};
use std::thread;

use super::DeviceError;

static FIRST: OnceLock<String> = OnceLock::new();

/// Starts to record the panics of device threads. Only the first panic is printed, because a kernel that cannot be
/// compiled causes a panic at each launch.
pub fn watch() {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let is_first = || FIRST.set(info.to_string()).is_ok();
            if !thread::current().name().is_some_and(is_of_device) || is_first() {
                previous(info);
            }
        }));
    });
}

/// Whether a thread has a name that CubeCL gives to device threads: `DSU-` or `DSD-`, the device type and its
/// index.
fn is_of_device(thread: &str) -> bool {
    ["DSU-", "DSD-"].iter().any(|name| thread.starts_with(name))
}

/// Checks that no thread of a device has panicked since [`watch`].
///
/// # Errors
///
/// [`DeviceError::Failed`] with the message of the first panic.
pub fn failure() -> Result<(), DeviceError> {
    match FIRST.get() {
        Some(panic) => Err(DeviceError::Failed(panic.clone())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_devices_are_known_by_their_names() {
        assert!(is_of_device("DSD-0-1"));
        assert!(is_of_device("DSU-3-0"));
        assert!(!is_of_device("rank 1"));
    }

    /// A panic of a device thread would also fail the other tests of this process, so no test causes such a
    /// panic.
    #[test]
    fn a_panic_of_another_thread_is_no_failure() {
        watch();
        let panicking = thread::Builder::new().name("rank 1".into());
        let panicking = panicking.spawn(|| panic!("of this test")).unwrap();
        assert!(panicking.join().is_err());
        assert_eq!(failure(), Ok(()));
    }
}
