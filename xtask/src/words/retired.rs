//! Finds retired names and phrases in the tree.
//!
//! `xtask/retired-words.tsv` lists them, one per line: the old text, a tab, and the new text. A name (letters, digits
//! and `_`) matches as a whole word. Any other text matches anywhere within a line.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use aho_corasick::AhoCorasick;

use super::has_word;

/// The list. The list itself is not searched.
pub const LIST: &str = "xtask/retired-words.tsv";

/// Extensions of the files that are searched.
const EXTENSIONS: [&str; 5] = ["rs", "md", "toml", "sh", "py"];

/// Searches the files for retired words.
///
/// # Errors
/// Returns `path:line: "old": use "new"` for each match, or a mistake in the list.
pub fn check(root: &Path, files: &[String]) -> Result<(), String> {
    let list = root.join(LIST);
    let text = fs::read_to_string(&list).map_err(|e| format!("{}: {e}", list.display()))?;
    let retired = RetiredWords::new(parse(&text)?)?;
    let searched = files.iter().filter(|path| is_searched(path));
    let (mut count, mut matches) = (0, Vec::new());
    for path in searched {
        // A tracked file that was deleted has no text.
        let Ok(text) = fs::read_to_string(root.join(path)) else {
            continue;
        };
        count += 1;
        matches.extend(retired.find(path, &text));
    }
    if matches.is_empty() {
        println!("{count} files, {} retired words", retired.words.len());
        return Ok(());
    }
    Err(format!(
        "retired words: {}\n{}",
        matches.len(),
        matches.join("\n")
    ))
}

/// A name or a phrase that is no longer used.
#[derive(Debug, PartialEq)]
struct RetiredWord {
    old: String,
    successor: String,
}

impl RetiredWord {
    fn is_in(&self, line: &str) -> bool {
        if self.old.chars().all(super::is_of_word) {
            has_word(line, &self.old)
        } else {
            line.contains(&self.old)
        }
    }
}

/// Reads the list. Empty lines and lines that begin with `#` are skipped.
fn parse(text: &str) -> Result<Vec<RetiredWord>, String> {
    let mut retired: Vec<RetiredWord> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let fields: Vec<_> = line.split('\t').map(str::trim).collect();
        let [old, successor] = fields[..] else {
            return Err(format!(
                "{LIST}:{number}: expected `old<TAB>use instead`, found {line:?}"
            ));
        };
        if old.is_empty() || successor.is_empty() {
            return Err(format!("{LIST}:{number}: a field is empty"));
        }
        if retired.iter().any(|word| word.old == old) {
            return Err(format!("{LIST}:{number}: \"{old}\" is listed twice"));
        }
        retired.push(RetiredWord {
            old: old.to_owned(),
            successor: successor.to_owned(),
        });
    }
    Ok(retired)
}

/// The list, with an automaton that finds all words in one pass over a text.
struct RetiredWords {
    words: Vec<RetiredWord>,
    search: AhoCorasick,
}

impl RetiredWords {
    fn new(words: Vec<RetiredWord>) -> Result<Self, String> {
        let search = AhoCorasick::new(words.iter().map(|word| &word.old));
        let search = search.map_err(|error| format!("{LIST}: {error}"))?;
        Ok(Self { words, search })
    }

    /// Returns the matches in one file, in order.
    fn find(&self, path: &str, text: &str) -> Vec<String> {
        // Few files contain retired words.
        let found = self.search.find_overlapping_iter(text);
        let present: BTreeSet<_> = found.map(|found| found.pattern().as_usize()).collect();
        if present.is_empty() {
            return vec![];
        }
        let mut matches = vec![];
        for (number, line) in (1..).zip(text.lines()) {
            let words = present.iter().map(|index| &self.words[*index]);
            matches.extend(words.filter(|word| word.is_in(line)).map(|word| {
                format!(
                    "{path}:{number}: \"{}\": use \"{}\"",
                    word.old, word.successor
                )
            }));
        }
        matches
    }
}

/// Returns whether a file is searched, by its path.
fn is_searched(path: &str) -> bool {
    let extension = Path::new(path).extension().and_then(|name| name.to_str());
    extension.is_some_and(|name| EXTENSIONS.contains(&name)) && !super::is_fixture(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(old: &str, successor: &str) -> RetiredWord {
        RetiredWord {
            old: old.into(),
            successor: successor.into(),
        }
    }

    #[test]
    fn names_match_as_whole_words_and_phrases_as_text() {
        let name = word("frobnicate", "reduce");
        for line in [
            "frobnicate(x)",
            "x.frobnicate",
            "`frobnicate`",
            "frobnicate",
        ] {
            assert!(name.is_in(line), "{line}");
        }
        for line in [
            "frobnicated",
            "defrobnicate",
            "frobnicate_all",
            "Frobnicate",
        ] {
            assert!(!name.is_in(line), "{line}");
        }
        assert!(name.is_in("frobnicated, then frobnicate"));
        let phrase = word("blue moon", "rarely");
        assert!(phrase.is_in("once in a blue moonlight"));
        assert!(!phrase.is_in("blue  moon"));
    }

    #[test]
    fn the_list_is_read_and_its_mistakes_are_named() {
        let read = parse("# a comment\n\nold_name\tnew_name\nan old phrase\ta new one\n").unwrap();
        assert_eq!(
            read,
            [
                word("old_name", "new_name"),
                word("an old phrase", "a new one")
            ]
        );
        for (text, wanted) in [
            ("old_name new_name", ":1: expected"),
            ("a\tb\tc", ":1: expected"),
            ("# x\nold_name\t", ":2: a field is empty"),
            ("a\tb\na\tc", ":2: \"a\" is listed twice"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn matches_name_the_place_and_the_successor() {
        let retired = RetiredWords::new(vec![word("old_name", "new_name")]).unwrap();
        assert_eq!(
            retired.find("src/a.rs", "one\nfn old_name() {}\nold_names\n"),
            ["src/a.rs:2: \"old_name\": use \"new_name\""]
        );
    }

    #[test]
    fn only_sources_and_texts_are_searched() {
        for path in ["a/b.rs", "README.md", "Cargo.toml", "x.sh", "x.py"] {
            assert!(is_searched(path), "{path}");
        }
        for path in [
            LIST,
            "a/fixtures/b.rs",
            "fixtures/b/c.md",
            "a.json",
            "LICENSE",
        ] {
            assert!(!is_searched(path), "{path}");
        }
    }
}
