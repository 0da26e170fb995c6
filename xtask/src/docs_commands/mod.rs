//! `cargo xtask docs-commands`: runs the shell commands of the README and of the book exactly as printed.
//!
//! Commands are taken from the code blocks with the language `sh`. The commands of a page run one after the other, in a
//! separate copy of the checkout. `xtask/docs-commands.tsv` lists the exceptions: the files that a page assumes, the commands
//! that CI leaves out, and the commands that cannot run here. Every other command must end with the exit code 0.

mod blocks;
mod folder;
mod list;
mod shell;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;

use crate::mpi;
use crate::process::{cargo, run as run_command, target_folder};
use crate::report::Report;
use crate::temp::TempDir;
use crate::test;

use blocks::DocsCommand;
use folder::PageFolder;
use list::{LIST, List};
use shell::Ended;

/// The maximum time of a command.
const DEADLINE: Duration = Duration::from_secs(30 * 60);

/// The maximum time of a command in CI, which runs only short commands.
const DEADLINE_OF_CI: Duration = Duration::from_secs(20 * 60);

/// Which commands run, and how they are built.
#[derive(Args, Debug, Default)]
pub struct Options {
    /// Run the commands of these pages only, such as `README.md` and `docs/src/verify.md`.
    #[arg(value_name = "PAGE")]
    pages: Vec<String>,
    /// Leave out the commands that are marked as slow, as `ci` does.
    #[arg(long)]
    quick: bool,
    /// Run programs of the dev profile, with the build of the tests, as `ci` does.
    #[arg(long)]
    dev: bool,
}

impl Options {
    /// Returns the options of `cargo xtask ci`.
    pub fn of_ci() -> Self {
        Self {
            pages: vec![],
            quick: true,
            dev: true,
        }
    }
}

/// A command and how it ended.
struct Row {
    command: String,
    result: String,
    time: Duration,
}

/// Reads the pages and the list, builds the programs, and runs the commands of each page.
pub fn run(options: &Options, root: &Path, report: &mut Report) {
    let mut read = None;
    report.step("docs commands, list", || {
        let (commands, list) = read_all(root)?;
        // Checked before the programs are built, to fail early.
        let mut wanted = options.pages.iter();
        if let Some(page) = wanted.find(|page| !pages(&commands).contains(&&page[..])) {
            return Err(format!(
                "{page} has no commands: expected README.md or a page such as docs/src/verify.md"
            ));
        }
        read = Some((commands, list));
        Ok::<_, String>(())
    });
    let Some((commands, list)) = read else { return };
    let mut programs = None;
    report.step("docs commands, programs", || {
        programs = Some(build(options, root)?);
        Ok::<_, String>(())
    });
    let Some(programs) = programs else { return };
    report.step("docs commands", || {
        let mut rows = vec![];
        for page in pages(&commands) {
            if options.pages.is_empty() || options.pages.iter().any(|wanted| wanted == page) {
                let of_page = commands.iter().filter(|command| command.page == page);
                rows.extend(run_page(options, root, &programs, page, of_page, &list)?);
            }
        }
        print!("{}", table(&rows));
        let failed: Vec<_> = rows
            .iter()
            .filter(|row| row.result.starts_with("FAILED"))
            .collect();
        if failed.is_empty() {
            return Ok(());
        }
        let lines = failed
            .iter()
            .map(|row| format!("\n{}: {}", row.command, row.result));
        Err(format!(
            "{} commands fail{}",
            failed.len(),
            lines.collect::<String>()
        ))
    });
}

/// Returns the commands of all pages, and the list. Its entries must match the commands.
fn read_all(root: &Path) -> Result<(Vec<DocsCommand>, List), String> {
    let read =
        |path: &Path| fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()));
    let pages = root.join("docs/src");
    let entries = fs::read_dir(&pages).map_err(|e| format!("{}: {e}", pages.display()))?;
    let names = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<_> = names.filter(|name| name.ends_with(".md")).collect();
    names.sort();
    let names = names.into_iter().map(|name| format!("docs/src/{name}"));
    let mut commands = vec![];
    for page in std::iter::once("README.md".to_string()).chain(names) {
        commands.extend(blocks::commands(&page, &read(&root.join(&page))?)?);
    }
    let list = List::parse(&read(&root.join(LIST))?)?;
    list.check(&commands)?;
    println!(
        "{} commands in {} pages",
        commands.len(),
        pages_of(&commands)
    );
    Ok((commands, list))
}

fn pages(commands: &[DocsCommand]) -> Vec<&str> {
    let mut pages: Vec<_> = commands.iter().map(|command| &command.page[..]).collect();
    pages.dedup();
    pages
}

fn pages_of(commands: &[DocsCommand]) -> usize {
    pages(commands).len()
}

/// Builds the programs that commands run, and returns their folder.
fn build(options: &Options, root: &Path) -> Result<std::path::PathBuf, String> {
    let folder = target_folder(root)?;
    if options.dev {
        test::build_programs(root)?;
        return Ok(folder.join("debug"));
    }
    let words = "build --release -p burn-megatron-cli -p burn-megatron-bench -p burn-megatron-examples \
                 -p burn-megatron-learner --bins --examples";
    let words: Vec<_> = words.split(' ').collect();
    let mut command = cargo(root, &words);
    if mpi::missing().is_empty() {
        command.args([
            "--features",
            "burn-megatron-cli/mpi,burn-megatron-learner/mpi",
        ]);
    }
    run_command(&mut command)?;
    Ok(folder.join("release"))
}

/// Runs the commands of a page in a separate folder.
fn run_page<'a>(
    options: &Options,
    root: &Path,
    programs: &Path,
    page: &str,
    commands: impl Iterator<Item = &'a DocsCommand>,
    list: &List,
) -> Result<Vec<Row>, String> {
    let mut rows = vec![];
    let mut folder = None;
    let has_mpi = mpi::missing().is_empty();
    for command in commands {
        let row = |result: String, time| Row {
            command: format!("{page}:{}: {}", command.line, command.first_line()),
            result,
            time,
        };
        let left_out = match list.skipped(command) {
            Some(reason) => Some(format!("cannot run here: {reason}")),
            None if options.quick && list.is_slow(command) => Some("slow, not in CI".into()),
            None if !has_mpi && command.needs_mpi() => Some("MPI is missing here".into()),
            None => None,
        };
        if let Some(reason) = left_out {
            rows.push(row(reason, Duration::ZERO));
            continue;
        }
        let folder = match &mut folder {
            Some(folder) => folder,
            empty => empty.insert(prepared(root, programs, page, list)?),
        };
        let deadline = if options.quick {
            DEADLINE_OF_CI
        } else {
            DEADLINE
        };
        println!("{page}:{}$ {}", command.line, command.text);
        let begun = Instant::now();
        let ended = folder.run(&command.text, deadline)?;
        let time = begun.elapsed();
        let result = match ended {
            Ended::Code(code) if code == list.exit_code(command) => "passed".into(),
            Ended::Code(code) => format!("FAILED: exit code {code}\n{}", folder.last_lines()),
            Ended::Late => format!(
                "FAILED: did not end within {deadline:?}\n{}",
                folder.last_lines()
            ),
        };
        println!("{result}, {:.1} s", time.as_secs_f64());
        rows.push(row(result, time));
    }
    Ok(rows)
}

/// Makes the folder of a page, with the files that the page assumes.
fn prepared(root: &Path, programs: &Path, page: &str, list: &List) -> Result<PageFolder, String> {
    let temp = TempDir::new("docs").map_err(|e| format!("a temporary folder: {e}"))?;
    let folder = PageFolder::new(temp, root, programs)?;
    for script in list.preparations(page) {
        match folder.run(script, DEADLINE_OF_CI)? {
            Ended::Code(0) => {}
            _ => return Err(format!("{page}: `{script}` fails\n{}", folder.last_lines())),
        }
    }
    Ok(folder)
}

fn table(rows: &[Row]) -> String {
    let line = |row: &Row| {
        let result = row.result.lines().next().unwrap_or_default();
        format!(
            "{:>7.1} s  {result:<24}  {}\n",
            row.time.as_secs_f64(),
            row.command
        )
    };
    let total: Duration = rows.iter().map(|row| row.time).sum();
    let lines: String = rows.iter().map(line).collect();
    format!("\n{lines}{:>7.1} s  in all\n", total.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the entries of the list match the commands of the pages. This check runs no command.
    #[test]
    fn every_entry_of_the_list_matches_a_command() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let (commands, list) = read_all(root).unwrap();
        assert!(commands.len() > 90, "{}", commands.len());
        let verify = commands
            .iter()
            .find(|it| it.text == "cargo run --release -- verify");
        let verify = verify.expect("the page of verify has it");
        assert!(
            list.skipped(verify).is_none() && !list.is_slow(verify),
            "CI runs it"
        );
    }
}
