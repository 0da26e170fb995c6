//! Raises the limit of open files of the process that hosts the rendezvous, which has a connection for each rank.

#[cfg(unix)]
use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};

/// Raises the limit as far as this process is allowed to raise it. When the limit is reached, further connections are
/// refused.
#[cfg(unix)]
pub(super) fn raise_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && let Some(raised) = raised(soft, hard)
    {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, raised, hard);
    }
}

#[cfg(not(unix))]
pub(super) fn raise_limit() {}

/// Returns the new limit, or `None` if the limit is high enough.
#[cfg(unix)]
fn raised(soft: rlim_t, hard: rlim_t) -> Option<rlim_t> {
    let wanted = hard.min(1 << 16);
    (soft < wanted).then_some(wanted)
}

#[cfg(all(test, unix))]
mod tests {
    use nix::sys::resource::RLIM_INFINITY;

    use super::*;

    #[test]
    fn a_limit_is_raised_and_never_lowered() {
        assert_eq!(raised(1024, 4096), Some(4096));
        assert_eq!(raised(1024, RLIM_INFINITY), Some(1 << 16));
        assert_eq!(raised(4096, 4096), None);
        assert_eq!(raised(1 << 20, 1 << 20), None);
        assert_eq!(raised(1 << 20, RLIM_INFINITY), None);
        assert_eq!(raised(RLIM_INFINITY, RLIM_INFINITY), None);
    }
}
