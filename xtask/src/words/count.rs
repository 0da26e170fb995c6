//! Counts the marked sentences by file type.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

use super::markers::{Marker, markers, opening, phrases};
use super::{is_fixture, markdown, rustdoc, strings};

/// The file types: pages of the book, the README, other Markdown files, documentation of items, string literals.
pub const TYPES: [&str; 5] = ["book", "readme", "guides", "rustdoc", "strings"];

/// The source folder of this check, whose string literals are the markers.
const THIS: &str = "xtask/src/words/";

/// A sentence with at least one marker.
pub struct Found {
    path: String,
    line: usize,
    text: String,
    markers: Vec<Marker>,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let markers: Vec<_> = self.markers.iter().map(Marker::to_string).collect();
        let text = self.text.replace('\u{a0}', " ");
        let (path, line) = (&self.path, self.line);
        write!(f, "{path}:{line}: [{}] {text}", markers.join(", "))
    }
}

/// The count of a file type.
#[derive(Default)]
pub struct Count {
    /// The number of sentences, of documented items or of string literals.
    pub all: usize,
    /// The number of sentences or items with a marker. For string literals: the number of markers.
    pub marked: usize,
    /// Every sentence with a marker.
    pub found: Vec<Found>,
}

/// Counts the marked sentences of tracked files, in the order of [`TYPES`]. Fixtures are left out.
pub fn count(root: &Path, files: &[String]) -> [Count; TYPES.len()] {
    let mut counts = <[Count; TYPES.len()]>::default();
    let [book, readme, guides, rustdoc, strings] = &mut counts;
    for path in files.iter().filter(|path| !is_fixture(path)) {
        let is_rust = path.ends_with(".rs");
        if !is_rust && !path.ends_with(".md") {
            continue;
        }
        // A tracked file that was deleted has no text.
        let Ok(text) = fs::read_to_string(root.join(path)) else {
            continue;
        };
        if is_rust {
            rustdoc.add_items(path, &text);
            if !path.starts_with(THIS) {
                strings.add_literals(path, &text);
            }
        } else if path.starts_with("docs/src/") {
            book.add_page(path, &text);
        } else if path == "README.md" {
            readme.add_page(path, &text);
        } else {
            guides.add_page(path, &text);
        }
    }
    counts
}

impl Count {
    fn add_page(&mut self, path: &str, text: &str) {
        for sentence in markdown::read((1..).zip(text.lines())) {
            let markers = markers(&sentence.text);
            self.all += 1;
            self.marked += usize::from(!markers.is_empty());
            self.push(path, sentence.line, sentence.text, markers);
        }
    }

    fn add_items(&mut self, path: &str, text: &str) {
        for item in rustdoc::items(text) {
            let before = self.found.len();
            for (at, sentence) in markdown::read(item).into_iter().enumerate() {
                let opening = opening(&sentence.text).filter(|_| at == 0);
                let markers = opening.into_iter().chain(markers(&sentence.text));
                let markers = markers.collect();
                self.push(path, sentence.line, sentence.text, markers);
            }
            self.all += 1;
            self.marked += usize::from(self.found.len() > before);
        }
    }

    fn add_literals(&mut self, path: &str, text: &str) {
        for literal in strings::literals(text) {
            self.all += 1;
            for sentence in literal {
                // A literal may be a program or a table, whose lines are not sentences. The length of a literal does
                // not count.
                let markers = phrases(&sentence.text);
                self.marked += markers.len();
                self.push(path, sentence.line, sentence.text, markers);
            }
        }
    }

    fn push(&mut self, path: &str, line: usize, text: String, markers: Vec<Marker>) {
        if !markers.is_empty() {
            let path = path.to_owned();
            self.found.push(Found {
                path,
                line,
                text,
                markers,
            });
        }
    }

    /// Returns the most frequent markers, with their counts.
    fn most_frequent(&self) -> String {
        let mut numbers = BTreeMap::new();
        for marker in self.found.iter().flat_map(|found| &found.markers) {
            *numbers.entry(*marker).or_insert(0) += 1;
        }
        let mut numbers: Vec<_> = numbers.into_iter().collect();
        numbers.sort_by_key(|(_, number)| std::cmp::Reverse(*number));
        let texts = numbers.iter().take(8).map(|(m, n)| format!("{m} {n}"));
        texts.collect::<Vec<_>>().join(", ")
    }
}

/// Returns a line for each file type: the counts, the share, and the most frequent markers.
pub fn summary(counts: &[Count; TYPES.len()]) -> String {
    let lines = TYPES.iter().zip(counts).map(|(name, count)| {
        let share = 100.0 * count.marked as f64 / count.all.max(1) as f64;
        let (marked, all, frequent) = (count.marked, count.all, count.most_frequent());
        format!("{name:<8} {marked:>6} of {all:>6} ({share:.1} %): {frequent}\n")
    });
    lines.collect()
}
