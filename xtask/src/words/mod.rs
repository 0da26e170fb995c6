//! `cargo xtask check words`: finds retired names, and counts the markers of sentences that are hard to read.

mod budgets;
mod count;
mod markdown;
mod markers;
mod retired;
mod rustdoc;
mod sentences;
mod strings;

use std::path::Path;
use std::process::Command;

use crate::report::Outcome;

/// The name of folders with files that other programs or earlier versions wrote.
const FIXTURES: &str = "fixtures";

/// Checks every tracked file. The check is skipped if git does not list the files, as in an archive of the sources.
pub fn run(root: &Path) -> Outcome {
    let files = match tracked_files(root) {
        Ok(files) => files,
        Err(reason) => return Outcome::Skipped(reason),
    };
    let results = [
        retired::check(root, &files),
        budgets::check(root, &count::count(root, &files)),
    ];
    let failures: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    if failures.is_empty() {
        Outcome::Passed
    } else {
        Outcome::Failed(failures.join("\n"))
    }
}

/// Prints every sentence that has a marker, with its file and line.
pub fn list(root: &Path) -> Outcome {
    match tracked_files(root) {
        Ok(files) => {
            let counts = count::count(root, &files);
            for found in counts.iter().flat_map(|count| &count.found) {
                println!("{found}");
            }
            print!("{}", count::summary(&counts));
            Outcome::Passed
        }
        Err(reason) => Outcome::Skipped(reason),
    }
}

/// Returns whether a name may contain this character.
fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns whether a text contains this name as a whole word.
pub fn has_word(text: &str, name: &str) -> bool {
    count_word(text, name) > 0
}

/// Returns the number of times that a text contains this name or phrase as a whole word.
fn count_word(text: &str, name: &str) -> usize {
    let is_whole = |(start, name): &(usize, &str)| {
        let before = text[..*start].chars().next_back();
        let after = text[start + name.len()..].chars().next();
        !before.is_some_and(is_of_word) && !after.is_some_and(is_of_word)
    };
    text.match_indices(name).filter(is_whole).count()
}

/// Returns the paths of all files that git tracks, relative to `root`.
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

/// Returns whether a file was written by another program or an earlier version.
fn is_fixture(path: &str) -> bool {
    path.split('/').any(|folder| folder == FIXTURES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    #[test]
    fn tracked_files_are_searched_and_others_are_not() {
        let root = TempDir::new("words").unwrap();
        let git = |args: &[&str]| {
            let mut command = Command::new("git");
            let status = command.args(args).current_dir(root.path()).status();
            assert!(status.unwrap().success(), "{args:?}");
        };
        git(&["init", "-q"]);
        root.write(retired::LIST, "old_name\tnew_name\n");
        root.write(
            budgets::TABLE,
            "book\t0\nreadme\t0\nguides\t0\nrustdoc\t0\nstrings\t0\n",
        );
        root.write("src/a.rs", "fn new_name() {}\n");
        root.write("src/untracked.rs", "fn old_name() {}\n");
        git(&["add", "src/a.rs", retired::LIST]);
        assert_eq!(run(root.path()), Outcome::Passed);
        root.write("src/a.rs", "/// As a rule.\nfn old_name() {}\n");
        let wanted = "retired words: 1\nsrc/a.rs:2: \"old_name\": use \"new_name\"\n\
                      rustdoc: 1 with a marker, and the budget is 0\n\
                      Run `cargo xtask check words --list`, and reword the new sentences.";
        assert_eq!(run(root.path()), Outcome::Failed(wanted.into()));
    }
}
