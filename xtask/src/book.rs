//! `cargo xtask book`: the summary, the pages and the links of the book agree.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::links::{links, problem};
use crate::process::run as run_command;
use crate::report::{Outcome, Report};

/// Checks the links of the book and of the README, and builds the book if mdbook is installed.
pub fn run(root: &Path, report: &mut Report) {
    report.step("book links", || check_links(root));
    report.step("book build", || build(root));
}

fn check_links(root: &Path) -> Result<(), String> {
    let pages = root.join("docs/src");
    let mut files = vec![root.join("README.md")];
    files.extend(markdown_files(&pages)?);
    let mut problems = pages_not_listed(&pages, &files[1..])?;
    for file in &files {
        let text = read(file)?;
        let name = file.strip_prefix(root).unwrap_or(file).display();
        problems.extend(links(&text).iter().filter_map(|link| {
            let reason = problem(file, &text, &link.target)?;
            Some(format!("{name}:{}: {reason}", link.line))
        }));
    }
    if problems.is_empty() {
        println!("{} files checked", files.len());
        return Ok(());
    }
    Err(format!(
        "problems: {}\n{}",
        problems.len(),
        problems.join("\n")
    ))
}

/// mdBook builds only pages that the summary lists.
fn pages_not_listed(pages: &Path, files: &[PathBuf]) -> Result<Vec<String>, String> {
    let summary = pages.join("SUMMARY.md");
    let listed: Vec<_> = links(&read(&summary)?)
        .iter()
        .map(|l| pages.join(&l.target))
        .collect();
    let lost = files
        .iter()
        .filter(|file| **file != summary && !listed.contains(file));
    Ok(lost
        .map(|file| format!("{}: not in SUMMARY.md", file.display()))
        .collect())
}

/// Every Markdown file of a folder and the folders in it, in the order of their names.
fn markdown_files(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let unreadable = |e| format!("{}: {e}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.is_dir() {
            files.extend(markdown_files(&path)?);
        } else if path.extension().is_some_and(|end| end == "md") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn read(file: &Path) -> Result<String, String> {
    fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))
}

fn build(root: &Path) -> Outcome {
    let probe = Command::new("mdbook")
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    if probe.is_err() {
        return Outcome::Skipped("mdbook is not installed (cargo install mdbook)".into());
    }
    run_command(
        Command::new("mdbook")
            .args(["build", "docs"])
            .current_dir(root),
    )
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    fn book() -> TempDir {
        let root = TempDir::new("book").unwrap();
        root.write("README.md", "[the book](docs/src/introduction.md)");
        root.write("docs/src/SUMMARY.md", "- [Introduction](introduction.md)\n");
        root.write(
            "docs/src/introduction.md",
            "# Introduction\n[up](#introduction)",
        );
        root
    }

    #[test]
    fn a_sound_book_passes() {
        assert_eq!(check_links(book().path()), Ok(()));
    }

    #[test]
    fn every_problem_is_listed_with_its_place() {
        let root = book();
        root.write("README.md", "# Title\n\n[gone](docs/gone.md)");
        root.write(
            "docs/src/SUMMARY.md",
            "[Introduction](introduction.md)\n[Mesh](mesh.md)\n",
        );
        root.write("docs/src/rooms/lost.md", "");
        let error = check_links(root.path()).unwrap_err();
        assert!(error.starts_with("problems: 3\n"), "{error}");
        assert!(
            error.contains("README.md:3: docs/gone.md does not exist"),
            "{error}"
        );
        assert!(
            error.contains("SUMMARY.md:2: mesh.md does not exist"),
            "{error}"
        );
        assert!(error.contains("lost.md: not in SUMMARY.md"), "{error}");
    }

    #[test]
    fn a_missing_summary_is_named() {
        let root = book();
        fs::remove_file(root.path().join("docs/src/SUMMARY.md")).unwrap();
        assert!(
            check_links(root.path())
                .unwrap_err()
                .contains("SUMMARY.md: ")
        );
    }
}
