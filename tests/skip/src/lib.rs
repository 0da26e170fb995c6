//! How a test that cannot run where it was started says so. The harness of `cargo test` knows no tests
//! that find this out when they run: it counts them as passed. `cargo xtask test` reads the lines that
//! are printed here, and counts and lists these tests as skipped.

use std::fmt::Display;
use std::io::Write;
use std::thread;

const WHOLE: &str = "skipped: ";
const PART: &str = "skipped in part: ";

/// Says that the calling test could not run. It should return then.
pub fn skipped(reason: impl Display) {
    print(WHOLE, reason);
}

/// Says that a part of the calling test could not run; the test counts by the rest.
pub fn skipped_in_part(reason: impl Display) {
    print(PART, reason);
}

/// What a line of a test binary's output says of a test.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Skip {
    /// It could not run: `NAME: reason`.
    Whole(String),
    /// A part of it could not run: `NAME: reason`.
    Part(String),
}

impl Skip {
    /// Reads a line; `None` if it is another one.
    pub fn parse(line: &str) -> Option<Self> {
        let line = line.trim_end();
        let whole = line
            .strip_prefix(WHOLE)
            .map(|told| Self::Whole(told.into()));
        whole.or_else(|| line.strip_prefix(PART).map(|told| Self::Part(told.into())))
    }
}

/// Straight to standard output: the harness keeps what the macros print to itself if the test passes. It may
/// have printed the beginning of a line.
fn print(kind: &str, reason: impl Display) {
    let thread = thread::current();
    let line = line(kind, thread.name().unwrap_or("a test"), reason);
    let mut out = std::io::stdout().lock();
    // A closed pipe is no reason for a test to fail.
    let _ = write!(out, "\n{line}\n").and_then(|()| out.flush());
}

/// One line, whatever the reason holds.
fn line(kind: &str, test: &str, reason: impl Display) -> String {
    format!("{kind}{test}: {reason}").replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_are_written() {
        let told = || "disk::full: no root,\nno disk";
        let read = |kind| {
            let (test, reason) = told().split_once(": ").unwrap();
            Skip::parse(&(line(kind, test, reason) + "\n"))
        };
        let expected = told().replace('\n', " ");
        assert_eq!(read(WHOLE), Some(Skip::Whole(expected.clone())));
        assert_eq!(read(PART), Some(Skip::Part(expected)));
        assert_eq!(Skip::parse("step 2: skipped: on every rank"), None);
        assert_eq!(Skip::parse("test disk::full ... ok"), None);
    }

    /// The line passes the harness, which captures what a passing test prints.
    #[test]
    fn the_line_comes_through_the_harness() {
        const CHILD: &str = "BURN_MEGATRON_TEST_SKIP_CHILD";
        if std::env::var_os(CHILD).is_some() {
            println!("captured");
            return skipped("this is a child");
        }
        let name = "tests::the_line_comes_through_the_harness";
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        let read: Vec<_> = output.lines().filter_map(Skip::parse).collect();
        assert_eq!(read, [Skip::Whole(format!("{name}: this is a child"))]);
        assert!(!output.contains("captured"), "{output}");
    }
}
