//! Counts and times of tests, read from the test harness or counted in source text.
//!
//! The JSON output of the harness is not available for documentation tests and emulated tests.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::AddAssign;

use burn_megatron_test_support::Skip;

/// Tests by result, over any number of test binaries.
#[derive(Debug, Default, PartialEq)]
pub struct Totals {
    /// Tests that passed.
    pub passed: usize,
    /// Tests that failed.
    pub failed: usize,
    /// Tests that were ignored or skipped.
    pub skipped: usize,
    /// Messages of tests that were skipped completely or in part: `NAME: reason`.
    pub skip_messages: BTreeSet<Skip>,
    /// Seconds and name of each test whose time the harness printed.
    pub times: Vec<(f64, String)>,
    /// The failed tests, each with its name and the first lines of its output.
    pub failures: Vec<String>,
}

/// The number of tests that are listed with their times.
const SLOWEST: usize = 10;

/// The number of output lines of a failed test that are listed.
const LINES_OF_FAILURE: usize = 20;

impl Totals {
    /// Returns the slowest tests, one per line. The text is empty if no time was printed.
    pub fn slowest(&self) -> String {
        let mut times: Vec<_> = self.times.iter().collect();
        times.sort_by(|one, other| other.0.total_cmp(&one.0));
        let line = |(seconds, name): &(f64, String)| format!("{seconds:7.1} s  {name}\n");
        times.into_iter().take(SLOWEST).map(line).collect()
    }

    /// Returns the messages of skipped tests, one per line.
    pub fn skip_messages(&self) -> String {
        let line = |skip: &Skip| match skip {
            Skip::Whole(message) => format!("skipped          {message}\n"),
            Skip::Part(message) => format!("skipped in part  {message}\n"),
        };
        self.skip_messages.iter().map(line).collect()
    }
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.skip_messages.extend(other.skip_messages);
        self.times.extend(other.times);
        self.failures.extend(other.failures);
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

/// Reads the output of test binaries, one after the other.
#[derive(Default)]
pub struct Harness {
    totals: Totals,
    /// Whether a binary has announced its tests and not yet printed its result.
    running: bool,
    /// The messages of skipped tests of this binary. The harness counts these tests as passed.
    skip_messages: BTreeSet<Skip>,
    /// The number of remaining lines of the last failed test to keep.
    lines_left: usize,
}

impl Harness {
    /// Reads one line of output. A line that the harness did not print counts nothing.
    pub fn read(&mut self, line: &str) {
        if is_start(line) {
            self.end_binary();
            self.running = true;
        } else if let Some(name) = failed_test(line) {
            self.totals.failures.push(name.to_owned());
            self.lines_left = LINES_OF_FAILURE;
        } else if line.trim_end() == "failures:" {
            self.lines_left = 0;
        } else if self.lines_left > 0 {
            self.lines_left -= 1;
            if let Some(failure) = self.totals.failures.last_mut() {
                *failure += &format!("\n    {}", line.trim_end());
            }
        } else if let Some(result) = line.strip_prefix("test result: ") {
            self.totals += with_skipped(
                parse_result(result),
                std::mem::take(&mut self.skip_messages),
            );
            self.running = false;
        } else if let Some(skip) = Skip::parse(line) {
            self.skip_messages.insert(skip);
        } else {
            self.totals.times.extend(parse_time(line));
        }
    }

    /// Returns the totals of all binaries. A binary that ended without a result counts as one failed test.
    pub fn finish(mut self) -> Totals {
        self.end_binary();
        self.totals
    }

    fn end_binary(&mut self) {
        self.totals.failed += usize::from(self.running);
        self.lines_left = 0;
        self.totals.skip_messages.append(&mut self.skip_messages);
        self.running = false;
    }
}

/// Returns the name in "---- NAME stdout ----". The harness repeats the output of a failed test after this line.
fn failed_test(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?
        .trim_end()
        .strip_suffix(" stdout ----")
}

/// Parses "test NAME ... ok <1.234s>".
fn parse_time(line: &str) -> Option<(f64, String)> {
    let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let (_, seconds) = result.trim_end().strip_suffix("s>")?.rsplit_once(" <")?;
    Some((seconds.parse().ok()?, name.to_owned()))
}

/// Returns whether a line is "running N tests".
fn is_start(line: &str) -> bool {
    let mut words = line.split_whitespace();
    words.next() == Some("running")
        && words
            .next()
            .is_some_and(|count| count.parse::<usize>().is_ok())
        && matches!(words.next(), Some("test" | "tests"))
        && words.next().is_none()
}

/// Parses "ok. 12 passed; 0 failed; 1 ignored; ...". The last two words of a part are its count.
fn parse_result(result: &str) -> Totals {
    let mut totals = Totals::default();
    for part in result.split(';') {
        let mut words = part.split_whitespace().rev();
        let (Some(kind), Some(count)) = (words.next(), words.next()) else {
            continue;
        };
        let Ok(count) = count.parse() else { continue };
        match kind {
            "passed" => totals.passed = count,
            "failed" => totals.failed = count,
            "ignored" => totals.skipped = count,
            _ => {}
        }
    }
    totals
}

/// Counts tests that reported themselves as skipped. The harness counts these tests as passed.
fn with_skipped(mut totals: Totals, skip_messages: BTreeSet<Skip>) -> Totals {
    let name = |message: &str| message.split(": ").next().unwrap_or_default().to_owned();
    let whole: BTreeSet<_> = skip_messages
        .iter()
        .filter_map(|skip| match skip {
            Skip::Whole(message) => Some(name(message)),
            Skip::Part(_) => None,
        })
        .collect();
    let skipped = whole.len().min(totals.passed);
    totals.passed -= skipped;
    totals.skipped += skipped;
    totals.skip_messages = skip_messages;
    totals
}

/// Returns the number of `#[test]` functions in a source text.
pub fn tests_in(source: &str) -> usize {
    source
        .lines()
        .filter(|line| line.trim_start().starts_with("#[test]"))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(output: &str) -> Totals {
        let mut harness = Harness::default();
        output.lines().for_each(|line| harness.read(line));
        harness.finish()
    }

    #[test]
    fn results_of_several_binaries_add_up() {
        let totals = read(
            "\
running 3 tests
test mesh::tests::orders_ranks ... ok
test a_test_that_says_5_failed ... ok
test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s

running 9 tests
test result: FAILED. 7 passed; 2 failed; 0 ignored; 0 measured; 4 filtered out; finished in 1s
",
        );
        assert_eq!(
            totals,
            Totals {
                passed: 9,
                failed: 2,
                skipped: 1,
                ..Totals::default()
            }
        );
        assert_eq!(totals.to_string(), "9 passed, 2 failed, 1 skipped");
    }

    /// Checks that a test counts once, even if it reports several times. A test that ran in part counts with its
    /// other result.
    #[test]
    fn tests_that_could_not_run_are_skipped_and_listed() {
        let totals = read(
            "\
running 4 tests
test a ...
skipped: disk::full: only root can mount
skipped: disk::full: only root can mount
skipped in part: ends::all: no mpirun
ok
test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.02s

running 2 tests
skipped: disk::full: no root
test result: ok. 2 passed; 0 failed; 1 ignored
",
        );
        assert_eq!(totals.to_string(), "4 passed, 0 failed, 3 skipped");
        let skip_messages = "skipped          disk::full: no root\n\
                    skipped          disk::full: only root can mount\n\
                    skipped in part  ends::all: no mpirun\n";
        assert_eq!(totals.skip_messages(), skip_messages);
    }

    #[test]
    fn the_slowest_tests_are_listed_slowest_first() {
        let mut totals = read(
            "\
test a ... ok <0.300s>
test b - should panic ... FAILED <62.000s>
test c ... ignored, slow
test d <0.1s> ... ok
",
        );
        let slowest = "   62.0 s  b - should panic\n    0.3 s  a\n";
        assert_eq!(totals.slowest(), slowest);
        totals += read(&"test many ... ok <1.5s>\n".repeat(SLOWEST));
        assert_eq!(totals.slowest().lines().count(), SLOWEST);
        assert!(totals.slowest().starts_with("   62.0 s  b"));
    }

    #[test]
    fn failures_are_listed_with_what_they_printed() {
        let many = "line\n".repeat(2 * LINES_OF_FAILURE);
        let totals = read(&format!(
            "running 3 tests\n\nfailures:\n\n---- a stdout ----\nleft: 1\n---- b::c stdout ----\n{many}\n\
             failures:\n    a\n    b::c\n\ntest result: FAILED. 1 passed; 2 failed; 0 ignored\n"
        ));
        assert_eq!(totals.to_string(), "1 passed, 2 failed, 0 skipped");
        let [a, b] = &totals.failures[..] else {
            panic!("{:?}", totals.failures)
        };
        assert_eq!(a, "a\n    left: 1");
        assert_eq!(b.lines().count(), 1 + LINES_OF_FAILURE);
        assert!(b.starts_with("b::c\n    line\n"), "{b}");
    }

    #[test]
    fn a_binary_that_dies_counts_as_failed_wherever_it_stands() {
        let sound = "running 1 test\ntest result: ok. 1 passed; 0 failed; 0 ignored\n";
        let dead = "running 8 tests\ntest a ... ok\n";
        let expected = Totals {
            passed: 2,
            failed: 2,
            ..Totals::default()
        };
        assert_eq!(read(&[sound, dead, sound, dead].concat()), expected);
    }

    #[test]
    fn colours_do_not_hide_a_result() {
        let totals = read("test result: \u{1b}[32mok\u{1b}[m. 4 passed; 0 failed; 0 ignored");
        assert_eq!(
            totals,
            Totals {
                passed: 4,
                ..Totals::default()
            }
        );
    }

    #[test]
    fn tests_are_counted_by_their_attribute() {
        let source = "\
#[test]
fn one() {}
    #[test] fn two() {}
// #[test]
/// Text about #[test].
#[testing]
#[cfg(test)]
";
        assert_eq!(tests_in(source), 2);
    }
}
