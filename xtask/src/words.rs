//! `cargo xtask check words`: no retired name or phrase is in the tree.
//!
//! `xtask/retired-words.tsv` lists them, one per line: the old text, a tab, and what to use instead. A name (letters,
//! digits and `_`) matches as a whole word, any other text wherever it stands within a line.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::report::Outcome;

/// The list, which is not searched itself.
const LIST: &str = "xtask/retired-words.tsv";

/// Endings of the files that are searched.
const EXTENSIONS: [&str; 5] = ["rs", "md", "toml", "sh", "py"];

/// A folder of this name holds files that other programs or earlier versions wrote.
const FIXTURES: &str = "fixtures";

/// Searches every tracked file; skipped where git does not list them, as in an archive of the sources.
pub fn run(root: &Path) -> Outcome {
    match tracked_files(root) {
        Ok(files) => check(root, &files).into(),
        Err(reason) => Outcome::Skipped(reason),
    }
}

/// # Errors
/// `path:line: "old": use "new"` for each match, and what is wrong with the list.
fn check(root: &Path, files: &[String]) -> Result<(), String> {
    let list = root.join(LIST);
    let text = fs::read_to_string(&list).map_err(|e| format!("{}: {e}", list.display()))?;
    let retired = parse(&text)?;
    let searched = files.iter().filter(|path| is_searched(path));
    let (mut count, mut matches) = (0, Vec::new());
    for path in searched {
        // A tracked file that was deleted has no text.
        let Ok(text) = fs::read_to_string(root.join(path)) else {
            continue;
        };
        count += 1;
        matches.extend(find(&retired, path, &text));
    }
    if matches.is_empty() {
        println!("{count} files, {} retired words", retired.len());
        return Ok(());
    }
    Err(format!(
        "retired words: {}\n{}",
        matches.len(),
        matches.join("\n")
    ))
}

/// A name or a phrase that is not used any more.
#[derive(Debug, PartialEq)]
struct RetiredWord {
    old: String,
    successor: String,
}

impl RetiredWord {
    fn is_in(&self, line: &str) -> bool {
        if self.old.chars().all(is_of_word) {
            has_word(line, &self.old)
        } else {
            line.contains(&self.old)
        }
    }
}

/// Whether a name may have this character.
fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether a text has this name as a whole word.
pub fn has_word(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(start, name)| {
        let before = text[..start].chars().next_back();
        let after = text[start + name.len()..].chars().next();
        !before.is_some_and(is_of_word) && !after.is_some_and(is_of_word)
    })
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

/// The matches in one file, in order.
fn find(retired: &[RetiredWord], path: &str, text: &str) -> Vec<String> {
    // Few files have any, and searching a whole file is fast.
    let present = retired.iter().filter(|word| text.contains(&word.old));
    let present: Vec<_> = present.collect();
    let mut matches = Vec::new();
    if present.is_empty() {
        return matches;
    }
    for (number, line) in (1..).zip(text.lines()) {
        let found = present.iter().filter(|word| word.is_in(line));
        matches.extend(found.map(|word| {
            format!(
                "{path}:{number}: \"{}\": use \"{}\"",
                word.old, word.successor
            )
        }));
    }
    matches
}

fn is_searched(path: &str) -> bool {
    let extension = Path::new(path).extension().and_then(|name| name.to_str());
    extension.is_some_and(|name| EXTENSIONS.contains(&name))
        && !path.split('/').any(|folder| folder == FIXTURES)
}

/// The paths of all files that git tracks, from `root`.
pub fn tracked_files(root: &Path) -> Result<Vec<String>, String> {
    let output = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root)
        .output()
        .map_err(|e| format!("git could not start: {e}"))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        return Err(format!("git ls-files: {}", reason.trim()));
    }
    let paths = String::from_utf8_lossy(&output.stdout);
    let paths = paths.split('\0').filter(|path| !path.is_empty());
    Ok(paths.map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

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
        let retired = [word("old_name", "new_name")];
        assert_eq!(
            find(&retired, "src/a.rs", "one\nfn old_name() {}\nold_names\n"),
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

    #[test]
    fn tracked_files_are_searched_and_others_are_not() {
        let root = TempDir::new("words").unwrap();
        let git = |args: &[&str]| {
            let mut command = Command::new("git");
            let status = command.args(args).current_dir(root.path()).status();
            assert!(status.unwrap().success(), "{args:?}");
        };
        git(&["init", "-q"]);
        root.write(LIST, "old_name\tnew_name\n");
        root.write("src/a.rs", "fn new_name() {}\n");
        root.write("src/untracked.rs", "fn old_name() {}\n");
        git(&["add", "src/a.rs", LIST]);
        assert_eq!(run(root.path()), Outcome::Passed);
        root.write("src/a.rs", "fn f() {}\nfn old_name() {}\n");
        let wanted = "retired words: 1\nsrc/a.rs:2: \"old_name\": use \"new_name\"";
        assert_eq!(run(root.path()), Outcome::Failed(wanted.into()));
    }
}
