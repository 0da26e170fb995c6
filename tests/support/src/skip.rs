//! Marks tests as skipped at run time. The harness of `cargo test` does not support skipping and counts these tests
//! as passed. `cargo xtask test` parses the lines that are printed here, and lists and counts the tests as skipped.

use std::fmt::Display;
use std::io::Write;
use std::thread;

const WHOLE: &str = "skipped: ";
const PART: &str = "skipped in part: ";

/// Marks the calling test as skipped. The test should then return.
pub fn skipped(reason: impl Display) {
    print(WHOLE, reason);
}

/// Marks a part of the calling test as skipped.
pub fn skipped_in_part(reason: impl Display) {
    print(PART, reason);
}

/// A skipped test, parsed from the output of a test binary.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Skip {
    /// The whole test: `NAME: reason`.
    Whole(String),
    /// A part of the test: `NAME: reason`.
    Part(String),
}

impl Skip {
    /// Parses a line. Returns `None` if it is not a skip line.
    pub fn parse(line: &str) -> Option<Self> {
        let line = line.trim_end();
        let whole = line
            .strip_prefix(WHOLE)
            .map(|text| Self::Whole(text.into()));
        whole.or_else(|| line.strip_prefix(PART).map(|text| Self::Part(text.into())))
    }
}

/// Prints directly to standard output, since the harness captures the output of macros in tests that pass. The text
/// starts with a line break, since the harness may have printed the start of a line.
fn print(kind: &str, reason: impl Display) {
    let thread = thread::current();
    let line = line(kind, thread.name().unwrap_or("a test"), reason);
    let mut out = std::io::stdout().lock();
    // A closed pipe must not fail the test.
    let _ = write!(out, "\n{line}\n").and_then(|()| out.flush());
}

/// Formats a single line. Line breaks in the reason are replaced.
fn line(kind: &str, test: &str, reason: impl Display) -> String {
    format!("{kind}{test}: {reason}").replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_are_written() {
        let text = || "disk::full: no root,\nno disk";
        let read = |kind| {
            let (test, reason) = text().split_once(": ").unwrap();
            Skip::parse(&(line(kind, test, reason) + "\n"))
        };
        let expected = text().replace('\n', " ");
        assert_eq!(read(WHOLE), Some(Skip::Whole(expected.clone())));
        assert_eq!(read(PART), Some(Skip::Part(expected)));
        assert_eq!(Skip::parse("step 2: skipped: on every rank"), None);
        assert_eq!(Skip::parse("test disk::full ... ok"), None);
    }

    /// Checks that the line is printed even though the harness captures the output of tests that pass.
    #[test]
    fn the_line_comes_through_the_harness() {
        const CHILD: &str = "BURN_MEGATRON_TEST_SKIP_CHILD";
        if std::env::var_os(CHILD).is_some() {
            println!("captured");
            return skipped("this is a child");
        }
        let name = "skip::tests::the_line_comes_through_the_harness";
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
