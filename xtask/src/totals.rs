//! Counts of tests: read from the test harness, and counted in source text.

use std::fmt;
use std::ops::AddAssign;

/// Tests by result, over any number of test binaries.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Totals {
    /// Tests that passed.
    pub passed: usize,
    /// Tests that failed.
    pub failed: usize,
    /// Tests that were ignored or left out.
    pub skipped: usize,
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
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
    /// A binary has said how many tests it runs and not yet how they went.
    running: bool,
}

impl Harness {
    /// Reads one line of output; a line that is not the harness's own counts nothing.
    pub fn read(&mut self, line: &str) {
        if is_start(line) {
            self.end_binary();
            self.running = true;
        } else if let Some(result) = line.strip_prefix("test result: ") {
            self.totals += parse_result(result);
            self.running = false;
        }
    }

    /// The totals of all binaries. One that ended without a result counts as one failed test.
    pub fn finish(mut self) -> Totals {
        self.end_binary();
        self.totals
    }

    fn end_binary(&mut self) {
        self.totals.failed += usize::from(self.running);
        self.running = false;
    }
}

/// Whether a line is "running N tests".
fn is_start(line: &str) -> bool {
    let mut words = line.split_whitespace();
    words.next() == Some("running")
        && words
            .next()
            .is_some_and(|count| count.parse::<usize>().is_ok())
        && matches!(words.next(), Some("test" | "tests"))
        && words.next().is_none()
}

/// Parses "ok. 12 passed; 0 failed; 1 ignored; ...": the last two words of a part are its count.
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

/// The number of `#[test]` functions in a source text.
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
                skipped: 1
            }
        );
        assert_eq!(totals.to_string(), "9 passed, 2 failed, 1 skipped");
    }

    #[test]
    fn a_binary_that_dies_counts_as_failed_wherever_it_stands() {
        let sound = "running 1 test\ntest result: ok. 1 passed; 0 failed; 0 ignored\n";
        let dead = "running 8 tests\ntest a ... ok\n";
        let expected = Totals {
            passed: 2,
            failed: 2,
            skipped: 0,
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
                failed: 0,
                skipped: 0
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
