//! Output macros that do not panic if writing fails: `pretrain | head` continues to train and writes its files.
//!
//! The macros of the standard library panic if writing fails. The macros of this crate have the same names and do not
//! panic. On standard output, a closed pipe is ignored. Any other error, such as a full disk, is reported once and
//! changes the exit code. Errors on standard error are ignored.

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether writing to standard output failed for a reason other than a closed pipe.
static FAILED: AtomicBool = AtomicBool::new(false);

macro_rules! print {
    ($($text:tt)*) => { $crate::stdio::write(format_args!($($text)*)) };
}

macro_rules! println {
    () => { $crate::stdio::write(format_args!("\n")) };
    ($($text:tt)*) => { $crate::stdio::write(format_args!("{}\n", format_args!($($text)*))) };
}

macro_rules! eprintln {
    ($($text:tt)*) => { $crate::stdio::write_error(format_args!("{}\n", format_args!($($text)*))) };
}

/// Writes to standard output.
pub fn write(text: fmt::Arguments<'_>) {
    check(io::stdout().lock().write_fmt(text));
}

/// Writes to standard error. Errors are ignored.
pub fn write_error(text: fmt::Arguments<'_>) {
    let _ = io::stderr().lock().write_fmt(text);
}

/// Flushes standard output. Returns whether everything was written or the reader closed the pipe.
pub fn finish() -> bool {
    check(io::stdout().lock().flush());
    !FAILED.load(Ordering::Relaxed)
}

fn check(written: io::Result<()>) {
    if let Err(error) = written
        && error.kind() != ErrorKind::BrokenPipe
        && !FAILED.swap(true, Ordering::Relaxed)
    {
        eprintln!("error: cannot write to standard output: {error}");
    }
}
