//! Counts of cases, by how they ended.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::case::Verdict;
use super::run::{Finding, Kind};
use crate::draw::Settings;

/// The maximum length of a reason. Reasons that agree up to this length are counted together.
const REASON_LENGTH: usize = 110;

/// The number of reasons for refusals that are printed.
const REASONS: usize = 40;

/// The maximum number of differing results that are shrunk, as one message may have several causes.
const SHRUNK: usize = 6;

/// Counts of cases.
#[derive(Default)]
pub struct Totals {
    pub cases: usize,
    passed: usize,
    refused: BTreeMap<String, usize>,
    found: BTreeMap<Kind, usize>,
    signatures: BTreeMap<(Kind, String), Vec<u64>>,
    drawn: BTreeSet<String>,
    compared: BTreeSet<String>,
}

impl Totals {
    /// Counts a case. Returns whether it shows a fault that no earlier case has shown.
    pub fn count(&mut self, number: u64, settings: &Settings, verdict: &Verdict) -> bool {
        self.cases += 1;
        self.drawn.extend(settings.keys().map(str::to_owned));
        match verdict {
            Verdict::Passed => {
                self.passed += 1;
                self.compared.extend(settings.keys().map(str::to_owned));
                false
            }
            Verdict::Refused(reason) => {
                *self.refused.entry(general(reason)).or_default() += 1;
                false
            }
            Verdict::Found(finding) => {
                let found = self.found.entry(finding.kind).or_default();
                *found += 1;
                let is_few = finding.kind == Kind::Differs && *found <= SHRUNK;
                let cases = self.signatures.entry(signature(finding)).or_default();
                cases.push(number);
                cases.len() == 1 || is_few
            }
        }
    }

    /// Fails if there are findings, or if so few cases passed that nothing was tested.
    pub fn result(&self) -> Result<(), String> {
        let found: usize = self.found.values().sum();
        if found > 0 {
            return Err(format!("{found} of {} cases show a fault", self.cases));
        }
        if 2 * self.passed < self.cases {
            return Err(format!(
                "only {} of {} cases were compared",
                self.passed, self.cases
            ));
        }
        Ok(())
    }
}

/// Returns the key that all cases of the same fault share.
pub fn signature(finding: &Finding) -> (Kind, String) {
    let text = match finding.kind {
        // The first number that differs depends on the recipe.
        Kind::Differs => finding
            .message
            .split(' ')
            .next()
            .unwrap_or_default()
            .to_owned(),
        _ => general(&finding.message),
    };
    (finding.kind, text)
}

/// Returns a message without its numbers.
fn general(message: &str) -> String {
    let mut text = String::new();
    for c in message.chars().take(3 * REASON_LENGTH) {
        match c {
            '0'..='9' if text.ends_with('N') => {}
            '0'..='9' => text.push('N'),
            c => text.push(c),
        }
    }
    text.chars().take(REASON_LENGTH).collect()
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let refused: usize = self.refused.values().sum();
        write!(
            f,
            "{} cases: {} passed, {refused} refused",
            self.cases, self.passed
        )?;
        for kind in Kind::ALL {
            write!(
                f,
                ", {} {}",
                self.found.get(&kind).unwrap_or(&0),
                kind.name()
            )?;
        }
        writeln!(f)?;
        let mut reasons: Vec<_> = self.refused.iter().collect();
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        if !reasons.is_empty() {
            writeln!(f, "\nrefused:")?;
        }
        for (reason, count) in reasons.iter().take(REASONS) {
            writeln!(f, "{count:>6}  {reason}")?;
        }
        if !self.signatures.is_empty() {
            writeln!(f, "\nfaults:")?;
        }
        for ((kind, text), cases) in &self.signatures {
            let first: Vec<_> = cases.iter().take(8).map(u64::to_string).collect();
            writeln!(
                f,
                "{:>6}  {}: {text} (cases {})",
                cases.len(),
                kind.name(),
                first.join(", ")
            )?;
        }
        let never: Vec<_> = self
            .drawn
            .difference(&self.compared)
            .map(String::as_str)
            .collect();
        if !never.is_empty() {
            writeln!(
                f,
                "\nsettings that were drawn, but are in no case that passed: {}",
                never.join(", ")
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_counted_by_their_end() {
        let mut totals = Totals::default();
        let settings = Settings::default();
        let found = |kind, message: &str| Verdict::Found(Finding::new(kind, message));
        assert!(!totals.count(0, &settings, &Verdict::Passed));
        assert!(!totals.count(1, &settings, &Verdict::Refused("heads 12 of 5".into())));
        assert!(!totals.count(2, &settings, &Verdict::Refused("heads 3 of 55".into())));
        assert_eq!(
            totals.result(),
            Err("only 1 of 3 cases were compared".into())
        );
        assert!(totals.count(3, &settings, &found(Kind::Panicked, "panicked at a.rs:3")));
        assert!(!totals.count(4, &settings, &found(Kind::Panicked, "panicked at a.rs:31")));
        let text = totals.to_string();
        assert!(
            text.starts_with(
                "5 cases: 1 passed, 2 refused, 0 differs, 2 panicked, 0 failed, 0 timed out\n"
            ),
            "{text}"
        );
        assert!(text.contains("     2  heads N of N\n"), "{text}");
        assert!(text.contains("panicked at a.rs:N (cases 3, 4)"), "{text}");
        assert_eq!(totals.result(), Err("2 of 5 cases show a fault".into()));
    }
}
