//! The system's limit on the size of a file (`ulimit -f`).

/// Makes a write beyond the limit fail with an error, like a write to a full disk. By default, the signal SIGXFSZ
/// ends the process at such a write, without a message.
pub fn make_it_an_error() {
    #[cfg(unix)]
    // SAFETY: an ignored signal runs no code.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Returns a note about the limit if the text of `error` contains the system's error for the limit.
#[cfg(unix)]
pub fn note(error: &str) -> Option<String> {
    if !error.contains(&format!("(os error {})", libc::EFBIG)) {
        return None;
    }
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the pointer is valid.
    let found = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    let is_limited = found == 0 && limit.rlim_cur != libc::RLIM_INFINITY;
    is_limited.then(|| {
        format!(
            "a file of this process may have at most {} bytes: raise the limit with `ulimit -f unlimited`, or in the job \
             scheduler",
            limit.rlim_cur
        )
    })
}

/// Returns `None`, because other systems have no such limit.
#[cfg(not(unix))]
pub fn note(_error: &str) -> Option<String> {
    None
}
