//! Counts of the files in a folder.

use std::collections::BTreeMap;
use std::fmt;

use indicatif::HumanCount;

use crate::numbers::count;

/// Maximum number of file kinds that are listed among the skipped files.
const KINDS: usize = 5;

/// Number of files that are read, and number of skipped files by kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FileCounts {
    pub read: usize,
    left_out: BTreeMap<String, usize>,
}

impl FileCounts {
    /// Returns whether the counts are worth printing: not just a single file that is read.
    pub fn is_notable(&self) -> bool {
        self.read != 1 || !self.left_out.is_empty()
    }

    /// Returns the kinds of the skipped files, the most frequent first, if there are any.
    pub fn left_out(&self) -> Option<String> {
        let mut kinds: Vec<_> = self.left_out.iter().collect();
        kinds.sort_by_key(|(_, files)| std::cmp::Reverse(**files));
        let shown = kinds.iter().take(KINDS);
        let mut shown: Vec<_> = shown
            .map(|(kind, files)| format!("{kind} {}", HumanCount(**files as u64)))
            .collect();
        let rest: usize = kinds.iter().skip(KINDS).map(|(_, files)| **files).sum();
        if rest > 0 {
            shown.push(format!("others {}", HumanCount(rest as u64)));
        }
        (!shown.is_empty()).then(|| shown.join(", "))
    }

    pub fn leave_out(&mut self, kind: String) {
        *self.left_out.entry(kind).or_default() += 1;
    }
}

/// Formats the counts as in `12 files read, 30 left out (.py 20, .toml 10)`.
impl fmt::Display for FileCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} read", count(self.read, "file"))?;
        let files: usize = self.left_out.values().sum();
        match self.left_out() {
            Some(kinds) => write!(f, ", {} left out ({kinds})", HumanCount(files as u64)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_kinds_are_named() {
        let mut counts = FileCounts {
            read: 1,
            ..FileCounts::default()
        };
        assert!(!counts.is_notable());
        for (kind, files) in [(".a", 3), (".b", 1200), (".c", 1), (".d", 2), (".e", 2)] {
            (0..files).for_each(|_| counts.leave_out(kind.into()));
        }
        let shown = "1 file read, 1,208 left out (.b 1,200, .a 3, .d 2, .e 2, .c 1)";
        assert_eq!(counts.to_string(), shown);
        counts.leave_out(".f".into());
        counts.leave_out(".g".into());
        let shown = "1 file read, 1,210 left out (.b 1,200, .a 3, .d 2, .e 2, .c 1, others 2)";
        assert_eq!(counts.to_string(), shown);
    }
}
