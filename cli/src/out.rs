//! Standard output and standard error that may go away: `pretrain | head` trains on and writes its files.
//!
//! The macros of the standard library panic where nothing can be written. Those of this crate, which have their
//! names, let the command go on: quietly where nobody reads any more, with a word and another exit code where
//! something else is wrong, such as a full disk.

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether something was lost that somebody would have read.
static LOST: AtomicBool = AtomicBool::new(false);

macro_rules! print {
    ($($text:tt)*) => { $crate::out::write(format_args!($($text)*)) };
}

macro_rules! println {
    () => { $crate::out::write(format_args!("\n")) };
    ($($text:tt)*) => { $crate::out::write(format_args!("{}\n", format_args!($($text)*))) };
}

macro_rules! eprintln {
    ($($text:tt)*) => { $crate::out::write_error(format_args!("{}\n", format_args!($($text)*))) };
}

/// Writes to standard output.
pub fn write(text: fmt::Arguments<'_>) {
    note(io::stdout().lock().write_fmt(text));
}

/// Writes to standard error. There is nobody to tell that it cannot be.
pub fn write_error(text: fmt::Arguments<'_>) {
    let _ = io::stderr().lock().write_fmt(text);
}

/// Whether all was written, as far as it was read.
pub fn finish() -> bool {
    note(io::stdout().lock().flush());
    !LOST.load(Ordering::Relaxed)
}

fn note(written: io::Result<()>) {
    if let Err(error) = written
        && error.kind() != ErrorKind::BrokenPipe
        && !LOST.swap(true, Ordering::Relaxed)
    {
        eprintln!("error: standard output cannot be written: {error}");
    }
}
